"""LeReT as a DSPy optimizer.

`sample_tasks` samples the student, `train_examples` trains its LMs, and `dspy.Evaluate` chooses the
best program by the user's metric.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import dspy
import numpy as np
from dspy.teleprompt import Teleprompter
from dspy.teleprompt import bootstrap_finetune as stock
from pydantic_core import to_jsonable_python

from leret.config.sampling import SamplingSettings
from leret.config.training import WriterKeys, WritingRecipe
from leret.core.bundled import SCOPES
from leret.core.dspy_internals import StandInLM, current_adapter, one_truncation_warning
from leret.core.errors import ConfigError, LeretError, PolicyError, ProgramError
from leret.core.progress import Progress, shown
from leret.core.runs import installed_version
from leret.core.types import digest
from leret.evaluation.statistics import bootstrap_intervals
from leret.optimize.finetune import train_examples, validated
from leret.optimize.inputs import (
    CallBudget,
    CountedPolicy,
    LMCallsSpent,
    RewardFunction,
    counted_lm,
    counted_policy,
    greedy_lm,
    pick_actors,
    read_tasks,
    refuse_recurring,
    server_of,
    step_reward,
    teacher_prompt,
    trained_lms,
    with_weights,
)
from leret.optimize.student import (
    StudentEnvironment,
    begin_run,
    logger,
    name_of,
    score,
    source_of,
    student_digest,
    training_examples,
)
from leret.policies.base import Policy
from leret.policies.dspy_lm import policy_of
from leret.policies.local.chat_template import dated
from leret.policies.local.policy import LocalPolicy
from leret.programs.needs import NeedsCompletion
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.saved import with_save
from leret.programs.search import Search, search_tool
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.rewards import Reward, scoring
from leret.rollouts.actors import Role, SamplingPlan
from leret.rollouts.failures import BOUNDARIES
from leret.sampling.bank.bank import load_bank, save_bank
from leret.sampling.bank.bootstrap import BankPlan, bootstrap_prompts
from leret.sampling.stage import sample_tasks
from leret.sampling.store.store import StateSamples, Store
from leret.training.algorithms import ALGORITHMS, TrainingRecipe
from leret.training.data import TrainingExample
from leret.training.model import training_record

T = TypeVar("T")
Credit = Literal["auto", "step", "final", "both", "return"]


def _writes(settings: Any) -> bool:
    return issubclass(settings, WriterKeys)


_ALGORITHMS = tuple(name for name, algorithm in ALGORITHMS.items() if _writes(algorithm.settings))
_ONLINE = tuple(name for name in _ALGORITHMS if ALGORITHMS[name].is_online)
"""Algorithms that sample during training; the other algorithms learn from stored samples."""

_SETTINGS = ("prompts", "samples", "n_continuations", "credit", "seed")
"""Arguments of `LeReT` that identify a run directory, in addition to reward, metric and algorithms.
"""


class LeReT(
    stock.FinetuneTeleprompter, Teleprompter
):  # tracers patch only direct subclasses of Teleprompter
    """Trains the LMs of a program on rewards for their completions.

    At every LM call of the program on the trainset, LeReT samples and scores several completions.
    Training favors the completions with higher scores.

    Args:
        reward: step reward. A name from `leret.rewards` (``ap``, ``recall@5``) scores all documents
            retrieved by the end of the step; each example must then list its relevant documents in
            a field ``gold``, ``gold_ids`` or ``relevant_doc_ids``, or by title in ``gold_titles``.
            A function ``(example, outcome) -> float`` gets a `leret.core.types.Outcome` with
            ``doc_ids``, ``outputs`` and ``text``.
        metric: function ``(example, prediction, trace=None) -> float | bool`` that scores final
            predictions.
        prompts: number of prompts per LM call. The first is the student's prompt. The others are
            few-shot prompts from the teacher, or from BootstrapFewShotWithRandomSearch. Only the
            student's prompt is trained.
        samples: completions per prompt and LM call.
        algorithms: training algorithms in order, each starting from the previous weights. sft, dpo,
            ipo and kto train on stored samples; grpo, rloo and ppo sample with the policy in
            training.
        credit: score of a completion: the reward (``step``), the metric at the program's end
            (``final``), their mean (``both``), or the reward at the program's end (``return``).
            None uses ``step`` for predictors that are followed by a search (``both`` if they also
            decide when to stop, as in `dspy.ReAct`), and ``final`` for other predictors, which are
            not trained if there is no metric.
        train_kwargs: keys of `leret train` recipes (such as ``learning_rate``), for all algorithms
            or nested by algorithm name; or one such dict per LM. The default ``learning_rate``
            depends on the model size.
        run_dir: directory for samples and trained policies; compile continues from its contents. A
            student with different code, demos, instructions or weights uses a subdirectory. None
            uses a temporary directory in leret's cache, which a later compile deletes after a week,
            so save the program.
        seed: seed for sampling and training.
        max_lm_calls: maximum number of LM calls by the program in one compile, including calls on
            the valset.
        n_continuations: number of runs from each completion to the program's end, to compute the
            metric or the return.
        num_threads: threads for the valset.
    """

    def __init__(
        self,
        *,
        reward: str | RewardFunction | None = None,
        metric: Callable[..., Any] | None = None,
        prompts: int = 1,
        samples: int = 8,
        algorithms: Sequence[str] = ("sft", "ipo"),
        credit: Literal["step", "final", "both", "return"] | None = None,
        train_kwargs: dict[str, Any] | dict[dspy.LM, dict[str, Any]] | None = None,
        run_dir: str | Path | None = None,
        seed: int = 0,
        max_lm_calls: int | None = None,
        n_continuations: int = 1,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(train_kwargs=train_kwargs)
        self.num_threads = num_threads
        self.reward = reward
        self.metric = metric
        self.credit = credit
        self.prompts = prompts
        self.samples = samples
        self.n_continuations = n_continuations
        self.algorithms = tuple(algorithms)
        self.run_dir = run_dir
        self.seed = seed
        self.max_lm_calls = max_lm_calls
        if not self.algorithms or not set(self.algorithms) <= set(_ALGORITHMS):
            raise ConfigError(
                f"algorithms={self.algorithms!r}: choose from {', '.join(_ALGORITHMS)}; `leret "
                "train` trains pickers"
            )
        if credit not in (None, "step", "final", "both", "return"):
            raise ConfigError(
                f"credit={credit!r}: choose step, final, both or return, or remove credit"
            )
        if reward is None and (metric is None or credit in ("step", "both", "return")):
            raise ConfigError(
                "reward is missing; pass a name (reward='ap') or a function, or use credit='final' "
                "with a metric"
            )
        if metric is None and credit in ("final", "both"):
            raise ConfigError(f"credit={credit!r} needs a metric to score the program's end")

    def compile(
        self,
        student: dspy.Module,
        *,
        trainset: list[dspy.Example],
        teacher: dspy.Module | list[dspy.Module] | None = None,
        valset: list[dspy.Example] | None = None,
    ) -> dspy.Module:
        """Optimize a copy of the student.

        The program is rerun many times with recorded completions and recorded searches (by
        `leret.Search`, `leret.search_tool` or ``dspy.settings.rm``). Any other tool is called again
        in every run, with side effects.

        Args:
            student: program with an LM on every predictor. Each `leret.LM` is trained once, for all
                its predictors; other LMs answer their predictors and are not trained.
            trainset: examples with inputs to sample from.
            teacher: one or more programs with the same predictors as the student.
            valset: examples for choosing the best program, by ``metric`` at temperature 0, among
                the student and the trained programs. Without a valset, the last trained program is
                returned.

        Returns:
            The best program, with attributes ``candidate_programs`` (best first), ``trial_logs``
                and ``run_dir``. It is
            a copy of the student if no training improves the score. Each trained LM is named after
                its directory.

        Raises:
            LeretError: the program cannot be optimized, or the samples provide nothing to train on.
        """
        job = CompileJob(self, student, trainset, teacher, valset)
        job.log("run", f"samples and policies are in {job.run.path}")
        with dated(job.run.manifest.date), shown() as job.progress, one_truncation_warning():
            candidates = job.restore_lms(job.train_all())
        ranked = candidates[::-1]
        if valset:  # a stable sort
            ranked = sorted(candidates, key=lambda candidate: -candidate["score"])
        best = ranked[0]
        job.log("result", job.conclusion(candidates[0], best), returned=best["stage"])
        job.note_servers(best)
        program: dspy.Module = best["program"]
        program._compiled = True
        program.candidate_programs = ranked
        program.trial_logs = job.logs
        program.run_dir = str(job.run.path)
        return with_save(program, job.adapter)


class CompileJob:
    """One call of `LeReT.compile`.

    The constructor raises an error if the program cannot be optimized.
    """

    progress: Progress

    def __init__(
        self,
        settings: LeReT,
        student: dspy.Module,
        trainset: Sequence[dspy.Example],
        teacher: dspy.Module | Sequence[dspy.Module] | None,
        valset: Sequence[dspy.Example] | None,
    ) -> None:
        stock.prepare_student(student)
        stock.assert_all_predictors_have_lms(student, role="student")
        self.settings = settings
        self.valset = list(valset or ())
        self.logs: list[dict[str, Any]] = []
        if self.valset and settings.metric is None:
            raise ConfigError("valset needs a metric: pass LeReT(metric=...), or remove valset")
        self.examples = read_tasks(trainset, settings.reward)
        refuse_recurring(self.examples, self.valset)
        teachers = [teacher] if isinstance(teacher, dspy.Module) else list(teacher or ())
        self.prompts = [ZERO_SHOT]
        for number, program in enumerate(teachers, start=1):
            self.prompts.append(teacher_prompt(number, student, program))
        self.program = stock.copy_program_with_lms(student)
        self.originals = with_weights(self.program)
        self.adapter = current_adapter()
        self.budget = CallBudget(settings.max_lm_calls)
        self.stopped: LeretError | None = None  # set if max_lm_calls ended the sampling
        self.trained = trained_lms(self.program, settings.samples)
        for policy in map(policy_of, self.trained.values()):
            if isinstance(policy, LocalPolicy):
                policy.model.check_trainable()
        counted = {
            name: counted_policy(predictor.lm, self.budget)
            for name, predictor in self.program.named_predictors()
        }
        self.policies: dict[str, Policy] = {**counted, **pick_actors(self.program)}
        metric = settings.metric
        examples = self.examples
        self.reward = step_reward(settings.reward, examples)
        self.final = metric and (
            lambda outcome: float(metric(examples[outcome.task], outcome.prediction))
        )
        rm = dspy.settings.rm
        searches = [search for _, search in self.program.named_sub_modules(Search)]
        has_retriever = any(search.retriever is not None for search in searches)
        self.retriever: Retriever | None = None
        self.rm: Any = None  # non-leret retriever
        if isinstance(rm, Retriever) and not has_retriever:
            self.retriever = rm
        elif callable(rm):
            self.rm = search_tool(rm, name="rm")
        # by predictor: states, and states with unequal rewards
        self.spread: dict[str, list[int]] = {}
        self.calls_per_run = float(len(counted))
        self.run = begin_run(settings.run_dir, self._identity())
        if len(self.examples) < len(trainset):
            self.log(
                "trainset", f"{len(trainset) - len(self.examples)} duplicate examples are ignored"
            )

    def train_all(self) -> list[dict[str, Any]]:
        candidates = [self.candidate("student", self.program)]
        self.estimate(candidates[0])
        algorithms = self.settings.algorithms
        examples: dict[str, dict[dspy.LM, list[TrainingExample]]] = {}
        if not set(algorithms) <= set(_ONLINE):
            self.sample()
            examples = self.training_examples()
        models: dict[dspy.LM, str] = {}
        for algorithm in algorithms:
            trained = self.train(algorithm, examples.get(algorithm, {}), models)
            candidates.append(self.candidate(algorithm, trained))
        return candidates

    def restore_lms(self, candidates: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Give each predictor without a trained LM the LM of the student; return the candidates."""
        for candidate in candidates:
            for predictor in candidate["program"].predictors():
                predictor.lm = self.originals.get(predictor.lm, predictor.lm)
        return candidates

    def conclusion(self, student: Mapping[str, Any], best: Mapping[str, Any]) -> str:
        """Describe the result, with the paired difference on the valset and its 95 % interval."""
        if best is student:
            return (
                f"returning the student ({best['score']:g} on valset): no training improved it. "
                f"{self.advice()}"
            )
        if best["score"] is None:
            return (
                f"returning the result of {best['stage']}, the last training, without a score: "
                "there is no valset"
            )
        differences = 100 * (np.array(best["subscores"]) - np.array(student["subscores"]))
        low, high = bootstrap_intervals(differences[:, None])[0]
        return (
            f"returning the result of {best['stage']}: {best['score']:g} on valset (student: "
            f"{student['score']:g}), difference {differences.mean():+.1f} [{low:+.1f}, {high:+.1f}]"
        )

    def note_servers(self, best: Mapping[str, Any]) -> None:
        """Log where a trained LM runs if the student's LM ran on a server.

        The server keeps the first weights.
        """
        urls = filter(None, map(server_of, self.trained.values()))
        servers = ", ".join(sorted(set(urls)))
        if servers and best["stage"] != "student":
            self.log(
                "serve",
                f"the trained LM runs in this process, because {servers} has the first weights; "
                "to serve it: optimized.save(DIR), `leret serve policy DIR/policies/NAME`, "
                "leret.load(DIR, serve=URL)",
            )

    def sample(self) -> None:
        settings = self.settings
        before = self.budget.spent
        plan = SamplingPlan(
            prompts=(ZERO_SHOT,),
            n_samples=settings.samples,
            seed=settings.seed,
            temperature=1.0,
            top_p=1.0,
            max_tokens=64,
            role=self.role,
            reward=scoring(self.reward),
            final=self.final and scoring(self.final, "final"),
            n_continuations=settings.n_continuations,
        )
        self.budget.reserved = before * len(settings.algorithms)
        try:
            # replays call no callbacks
            with dspy.context(callbacks=[], _leret_spend=self.budget.spend):
                if settings.prompts > len(self.prompts) == 1:
                    reward = self.reward
                    if settings.reward is None:
                        reward = self.final or reward
                    self.prompts = self._bank(reward)
                plan = replace(plan, prompts=tuple(self.prompts))
                _in_thread(asyncio.run, self._sample(plan))
        except LMCallsSpent as error:
            self.stopped = error
            self.log("sample", f"{error}; training uses the samples so far")
        finally:
            self.budget.reserved = 0
            self.progress.finish()
        with Store(self.run.store, read_only=True) as store:
            counts = store.counts()
            for group in store.groups():
                if not group.samples[0].is_sampled:
                    continue
                rewards = {s.reward for s in group.samples if s.reward is not None}
                counters = self.spread.setdefault(group.state.predictor, [0, 0])
                counters[0] += 1
                if len(rewards) > 1:
                    counters[1] += 1
        n_samples = counts["samples"]
        n_states = counts["states"]
        text = f"{n_samples} samples at {n_states} states from {len(self.examples)} examples"
        spread = {
            name: {"states": n, "with_spread": n_spread}
            for name, (n, n_spread) in self.spread.items()
        }
        self.log("sample", text, lm_calls=self.budget.spent - before, predictors=spread, **counts)
        for name, (n, n_spread) in self.spread.items():
            if not n_spread:
                text = f"the rewards are equal at each of {n} states"
                self.log("sample", f"{name} has no samples to train on: {text}")

    def _bank(self, reward: str | Reward) -> list[Prompt]:
        """Return the student's prompt and few-shot prompts.

        Half of the examples become demos, half are for scoring.
        """
        bank = load_bank(self.run)
        if bank is not None:
            return bank
        n_prompts = self.settings.prompts
        tasks = list(self.examples)
        lms = [predictor.lm for predictor in self.program.predictors()]
        self.progress.start("prompt bank", None)
        bank = bootstrap_prompts(
            self.program.deepcopy(),
            self.adapter,
            [greedy_lm(lm, self.budget) for lm in lms],
            self.retriever,
            scoring(reward),
            tasks[::2][:50],
            tasks[1::2][:50],
            BankPlan(n_prompts, 3, 8, None),
            teacher=[counted_lm(lm, self.budget) for lm in lms],
            on_scored=lambda: self.progress.advance(1),
        )
        save_bank(self.run, bank, n_prompts)
        scores = [prompt.score for prompt in bank]
        self.log("prompts", f"made {len(bank)} of {n_prompts} prompts", scores=scores)
        return bank

    async def _sample(self, plan: SamplingPlan) -> None:
        program = self.program.deepcopy()
        searches: AbstractContextManager[SearchBatcher | None] = nullcontext()
        if self.retriever is not None:
            searches = closing(SearchBatcher(self.retriever))
        settings = SamplingSettings(samples=plan.n_samples, seed=plan.seed, max_unparsed_rate=1.0)
        self.progress.start("sampling", len(self.examples))
        lm = next(iter(self.trained.values()))
        with searches as search, Store(self.run.store) as store:
            stats = await sample_tasks(
                list(self.examples),
                program,
                self.adapter,
                search,
                plan,
                store,
                settings,
                rm=self.rm,
                read=lm.engine.reader(lm.model),
                run=self.run,
                progress=self.progress,
            )
        notes = list(stats.notes)
        failure = stats.last_failure
        if failure is not None:
            n_outages = stats.failures["policy"] + stats.failures["retrieval"]
            if n_outages:
                boundary = BOUNDARIES.get(failure.kind, PolicyError)
                raise boundary(
                    f"{n_outages} completions or searches failed; the last error: "
                    f"{failure.message}. Fix the cause and compile again with the same run_dir "
                    "to reuse the samples so far"
                ).failed()
            notes.append(f"failed: {failure.message}")
        for note in notes:
            self.log("sample", note, failures=dict(stats.failures))

    @property
    def credit(self) -> Credit:
        if self.settings.credit:
            return self.settings.credit
        if self.settings.reward:
            return "auto"
        return "final"

    def role(self, need: NeedsCompletion) -> Role:
        """Return the role for the LM that DSPy would call.

        A call is sampled only if that LM is to be trained.
        """
        name = need.predictor
        owner = name  # predictor whose LM is called
        if isinstance(need.call.lm, StandInLM):
            owner = need.call.lm.owner
        if need.choice is not None:
            return Role(self.policies[name], sampled=False, temperature=0.0)
        if owner not in self.policies:
            if dspy.settings.lm is None:
                raise ProgramError(
                    f"{name} is created inside forward and has no LM: call dspy.configure(lm=...)"
                )
            self.policies[owner] = counted_policy(dspy.settings.lm, self.budget)
        lm = self.trained.get(owner)
        if self.trained.get(name) is not lm or lm is None:
            return Role(self.policies[owner], sampled=False)
        return Role(
            self.policies[name],
            True,
            self.credit,
            lm.kwargs.get("temperature"),
            lm.kwargs.get("max_tokens"),
        )

    def training_examples(self) -> dict[str, dict[dspy.LM, list[TrainingExample]]]:
        groups: list[StateSamples] = []
        with Store(self.run.store, read_only=True) as store:
            for group in store.groups():
                if group.samples[0].is_sampled and group.state.predictor in self.trained:
                    groups.append(group)
        stored = [name for name in self.settings.algorithms if name not in _ONLINE]
        recipe_of = partial(self._recipe, without="max_steps")
        try:
            return training_examples(groups, self.trained, stored, recipe_of)
        except LeretError as error:
            raise (self.stopped or error) from None

    def train(
        self,
        algorithm: str,
        examples: Mapping[dspy.LM, Sequence[TrainingExample]],
        models: dict[dspy.LM, str],
    ) -> dspy.Module:
        """Train each LM further, update ``models``, and return the program with the trained LMs.

        ``models`` maps an LM to its model name.

        LMs are trained one after another. An online algorithm uses new samples instead of
        ``examples``.
        """
        for lm in dict.fromkeys(self.trained.values()):
            start = models.get(lm) or lm.finetuning_model or lm.model
            keys = self._keys(algorithm, lm)
            if algorithm in _ONLINE:
                before = self.budget.spent
                text = f"{lm.model} on new samples from {len(self.examples)} examples"
                self.log(algorithm, text, lm=lm.model)
                path = self._train_online(start, keys, lm, models)
                models[lm] = self._trained(algorithm, path, lm_calls=self.budget.spent - before)
                continue
            rows = examples.get(lm, ())
            text = f"{lm.model} on {len(rows)} examples"
            self.log(algorithm, text, lm=lm.model, examples=len(rows))
            if rows:
                path = train_examples(start, rows, keys, self.run.path, progress=self.progress)
                models[lm] = self._trained(algorithm, path)
        return self._program(models)

    def _train_online(
        self, start: str, keys: Mapping[str, Any], lm: dspy.LM, models: Mapping[dspy.LM, str]
    ) -> Path:
        program = self._program(models)
        for name, predictor in program.named_predictors():
            self.policies[name] = counted_policy(predictor.lm, self.budget)
        names = [name for name, trained in self.trained.items() if trained is lm]
        settings = SamplingSettings(
            credit=self.credit, n_continuations=self.settings.n_continuations
        )
        settings = settings.model_copy(update={"reward": self.reward, "final": self.final})
        environment = StudentEnvironment(
            program,
            self.adapter,
            self.retriever,
            self.rm,
            lm,
            partial(self._live_role, names),
            settings,
            self.run.cache,
        )
        with dspy.context(callbacks=[], _leret_spend=self.budget.spend):
            return _in_thread(
                train_examples,
                start,
                list(self.examples),
                {**keys, "predictors": names},
                self.run.path,
                progress=self.progress,
                environment=environment,
                run=self.run,
            )

    def _live_role(self, names: Sequence[str], need: NeedsCompletion, live: Policy) -> Role:
        """Return the role for a call in online training.

        Only calls by ``names`` are sampled, with policy ``live``.
        """
        role = self.role(need)
        if not role.sampled or need.predictor not in names:
            return replace(role, sampled=False)
        policy = CountedPolicy(live.name, live.digest, self.budget, live.complete)
        return replace(role, policy=policy)

    def _recipe(self, algorithm: str, lm: dspy.LM, without: str = "") -> TrainingRecipe:
        """Return a training recipe without the keys that only `train_examples` takes."""
        keys = self._keys(algorithm, lm)
        for name in ("enable_thinking", without):
            keys.pop(name, None)
        return validated(TrainingRecipe, keys)

    def _keys(self, algorithm: str, lm: dspy.LM) -> dict[str, Any]:
        keys = dict(self.settings.train_kwargs[self.originals.get(lm, lm)] or {})
        algorithm_keys = {name: keys.pop(name, {}) for name in _ALGORITHMS}[algorithm]
        defaults = {
            "seed": self.settings.seed,
            "enable_thinking": lm.engine.settings.enable_thinking,
        }
        return {**defaults, **keys, **algorithm_keys, "algorithm": algorithm}

    def _trained(self, algorithm: str, path: Path, **values: Any) -> str:
        """Log the steps and the learning rate of a training.

        Return the model name of the trained LM.
        """
        record = training_record(path)
        rate = record.get("key", {}).get("recipe", {}).get("learning_rate")
        if rate is not None:
            text = f"{record['steps']} steps at learning rate {rate:g}"
            self.log(algorithm, text, learning_rate=rate, **values)
        return f"leret/{path}"

    def _program(self, models: Mapping[dspy.LM, str]) -> dspy.Module:
        program = stock.copy_program_with_lms(self.program)
        new = {lm: lm.copy(model=model, finetuning_model=None) for lm, model in models.items()}
        for predictor in program.predictors():
            predictor.lm = new.get(predictor.lm, predictor.lm)
        return program

    def estimate(self, student: Mapping[str, Any]) -> None:
        """Log the estimated number of LM calls, from the mean number in a run of the student."""
        settings = self.settings
        n = len(self.examples)
        if self.valset:
            self.calls_per_run = self.budget.spent / len(self.valset)
        calls = self.calls_per_run
        total = calls * len(self.valset) * len(settings.algorithms)
        if not set(settings.algorithms) <= set(_ONLINE):
            total += calls * n * settings.samples * settings.prompts
        for algorithm, lm in product(settings.algorithms, dict.fromkeys(self.trained.values())):
            if algorithm in _ONLINE:
                recipe = cast(WritingRecipe, self._recipe(algorithm, lm))
                n_questions = recipe.n_rounds(n) * recipe.questions_per_round
                total += n_questions * recipe.num_generations * calls
        self.log("estimate", f"about {total:,.0f} LM calls, at {calls:.1f} per run of the program")

    def advice(self) -> str:
        for lm in self.trained.values():
            name = lm.model.removeprefix("leret/")
            if name in SCOPES and name != lm.model:
                return (
                    f"{lm.model} {SCOPES[name]}; use a model from the Hugging Face Hub or a "
                    "directory, or try algorithms=['grpo']"
                )
        n = sum(n_states for n_states, _ in self.spread.values())
        n_spread = sum(n_unequal for _, n_unequal in self.spread.values())
        if n and n_spread < n / 5:
            return (
                f"Samples differ in reward at only {n_spread} of {n} states: raise samples or the "
                "LM's temperature, or use a finer reward"
            )
        return (
            "Raise learning_rate in train_kwargs, use more examples or samples, or try "
            "algorithms=['grpo']"
        )

    def candidate(self, stage: str, program: dspy.Module) -> dict[str, Any]:
        """Score a program at temperature 0 on the valset, in percent.

        The score is None without a valset.
        """
        mean: float | None = None
        subscores: list[float] = []
        if self.valset and self.settings.metric:
            before = self.budget.spent
            mean, subscores = score(
                stage,
                program,
                self.valset,
                self.settings.metric,
                self.budget,
                self.progress,
                self.settings.num_threads,
                must_parse=stage == "student",
            )
            text = f"{mean:g} on valset ({len(self.valset)} examples)"
            self.log(stage, text, score=mean, lm_calls=self.budget.spent - before)
        return {"score": mean, "program": program, "stage": stage, "subscores": subscores}

    def log(self, stage: str, text: str, **values: Any) -> None:
        """Write an entry to DSPy's log, ``trial_logs`` and the run's events."""
        logger.info("LeReT, %s: %s", stage, text)
        self.logs.append({"stage": stage, "text": text, **values})
        self.run.event("optimize", stage, text=text, **values)

    def _identity(self) -> dict[str, Any]:
        """Return the values that identify the run.

        They are settings, data, and the student's code, prompts and weights.
        """
        settings = self.settings
        functions = {"reward": settings.reward, "metric": settings.metric}
        adapter = to_jsonable_python(vars(self.adapter), fallback=source_of)
        digests: dict[str, Any] = {
            "trainset": [[task.id, list(task.gold)] for task in self.examples],
            "teacher": [prompt.digest for prompt in self.prompts],
            "adapter": [type(self.adapter).__qualname__, adapter],
        }
        identity: dict[str, Any] = {
            "dspy": installed_version("dspy"),
            "student": student_digest(self.program, self.policies),
        }
        for name in _SETTINGS:
            identity[name] = getattr(settings, name)
        for name, function in functions.items():
            identity[name] = function
            if callable(function):
                identity[name] = name_of(function)
                digests[name] = source_of(function)
        identity["algorithms"] = list(settings.algorithms)
        identity["digest"] = {name: digest(value) for name, value in digests.items()}
        return identity


def _in_thread(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call the function in another thread if this thread has an event loop (as in a notebook)."""
    try:
        asyncio.get_running_loop()
        has_loop = True
    except RuntimeError:
        has_loop = False
    # outside the except block, so that tracebacks in the program omit the RuntimeError
    if not has_loop:
        return call(*args, **kwargs)
    with ThreadPoolExecutor(1, "leret-optimize") as thread:
        return thread.submit(copy_context().run, partial(call, *args, **kwargs)).result()
