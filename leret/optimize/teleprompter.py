"""LeReT as a DSPy optimizer.

It makes the objects that leret's stages take: `sample_tasks` samples the student, `train_examples` trains its LMs, and
`dspy.Evaluate` chooses by the user's metric.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from leret.config.training import WritingRecipe
from leret.core.bundled import POLICIES
from leret.core.dspy_internals import StandInLM, current_adapter
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
    step_reward,
    teacher_prompt,
    trained_lms,
)
from leret.optimize.online import Student, StudentEnvironment
from leret.optimize.student import (
    begin_run,
    logger,
    name_of,
    score,
    source_of,
    student_digest,
    training_examples,
)
from leret.policies.base import Policy
from leret.programs.needs import NeedsChoice, NeedsCompletion
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.saved import with_save
from leret.programs.search import Search, search_tool
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.rewards import Reward
from leret.rewards import reward as reward_named
from leret.rollouts.rollout import BOUNDARIES
from leret.rollouts.states import Role, SamplingPlan
from leret.sampling.bank.bank import load_bank, save_bank
from leret.sampling.bank.bootstrap import BankPlan, bootstrap_prompts
from leret.sampling.stage import sample_tasks
from leret.sampling.store.store import Store
from leret.training.algorithms import ALGORITHMS, TrainingRecipe
from leret.training.data import TrainingExample
from leret.training.model import training_record

T = TypeVar("T")

_ALGORITHMS = tuple(name for name, algorithm in ALGORITHMS.items() if not algorithm.picks)
_ONLINE = tuple(name for name in _ALGORITHMS if ALGORITHMS[name].is_online)
"""Algorithms that sample afresh; the others learn from samples that are stored."""

_SETTINGS = ("prompts", "samples", "n_continuations", "credit", "seed")
"""Arguments of `LeReT` that a run directory is begun with; beside them, reward, metric and algorithms."""


class LeReT(stock.FinetuneTeleprompter, Teleprompter):  # a direct subclass, too: what patches those has to see it
    """Trains the LMs of a program on what its completions lead to.

    At every LM call of the program on the trainset, several completions are tried and scored, and better and worse
    ones become training.

    Args:
        reward: of a step: a name (``ap``, ``recall@5``: of `leret.rewards`, on all that was retrieved by the end of the
            step), for which an example names its relevant documents in a field ``gold``, ``gold_ids`` or
            ``relevant_doc_ids``, or by titles in ``gold_titles``; or a function ``(example, outcome) -> float`` of a
            `leret.core.types.Outcome`, with its ``doc_ids``, ``outputs`` and ``text``.
        metric: ``(example, prediction, trace=None) -> float | bool``: scores the program's end, and the valset.
        prompts: at each LM call: the student's own one, and few-shot ones that DSPy's BootstrapFewShotWithRandomSearch
            finds; given a teacher, its demos and instructions instead. The student's alone is trained and kept.
        samples: completions a prompt and LM call.
        algorithms: sft, dpo, ipo and kto learn from the samples; grpo, rloo and ppo sample afresh, with the policy as
            it is. One after the other, each from the weights of the one before.
        credit: ``step``: a completion is scored by the reward; ``final``: by the metric at the program's end; ``both``:
            by their mean; None: ``step`` at a predictor that a search follows, ``final`` at another one, which is not
            trained where there is no metric.
        train_kwargs: keys of the recipes of `leret train` (``learning_rate`` ...), for all algorithms or under the name
            of one; or such a dict for each LM. Without a ``learning_rate``, the size of the model decides.
        run_dir: for samples and trained policies; compile goes on with what is there. Another student (other code,
            demos, instructions or weights) gets a subdirectory. None takes a temporary one in leret's cache, which the
            first compile after a week removes: save the program.
        seed: of sampling and training.
        max_lm_calls: of the program's LMs, in one compile, those on the valset included.
        n_continuations: runs to the program's end from each completion, for credit ``final``.
        num_threads: for the valset.
    """

    def __init__(
        self,
        *,
        reward: str | RewardFunction | None = None,
        metric: Callable[..., Any] | None = None,
        prompts: int = 1,
        samples: int = 8,
        algorithms: Sequence[str] = ("sft", "ipo"),
        credit: Literal["step", "final", "both"] | None = None,
        train_kwargs: dict[str, Any] | dict[dspy.LM, dict[str, Any]] | None = None,
        run_dir: str | Path | None = None,
        seed: int = 0,
        max_lm_calls: int | None = None,
        n_continuations: int = 1,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(train_kwargs=train_kwargs)
        self.num_threads = num_threads
        self.reward, self.metric, self.credit = reward, metric, credit
        self.prompts, self.samples, self.n_continuations = prompts, samples, n_continuations
        self.algorithms, self.run_dir, self.seed, self.max_lm_calls = tuple(algorithms), run_dir, seed, max_lm_calls
        if not self.algorithms or not set(self.algorithms) <= set(_ALGORITHMS):
            raise ConfigError(
                f"algorithms={self.algorithms!r}: give one or more of {', '.join(_ALGORITHMS)}; pickers are trained by "
                "`leret train`"
            )
        if credit not in (None, "step", "final", "both"):
            raise ConfigError(f"credit={credit!r}: give step, final or both, or leave it out")
        if reward is None and (metric is None or credit in ("step", "both")):
            raise ConfigError("give LeReT a reward='ap', or as a function (example, outcome); credit final needs none")
        if metric is None and credit in ("final", "both"):
            raise ConfigError(f"credit={credit!r} needs a metric, which scores the program's end")

    def compile(
        self,
        student: dspy.Module,
        *,
        trainset: list[dspy.Example],
        teacher: dspy.Module | list[dspy.Module] | None = None,
        valset: list[dspy.Example] | None = None,
    ) -> dspy.Module:
        """Optimize a copy of the student.

        The program is run many times on completions that were recorded. What it searches by `leret.Search`,
        `leret.search_tool` or ``dspy.settings.rm`` is recorded as well; any other tool is called again in every run,
        with all that it does to the world.

        Args:
            student: every predictor has an LM. A `leret.LM` is trained, once for all its predictors; a predictor with
                another LM is answered by that, and stays as it is.
            trainset: with inputs; what is sampled.
            teacher: programs of the student's shape.
            valset: chooses among the student and the results of the trainings, greedily, by ``metric``. Without one
                the last result is returned.

        Returns:
            The best program, the student's copy where none was better, with ``candidate_programs`` (best first),
            ``trial_logs`` and ``run_dir``. A trained LM is a new one with the name of its directory.

        Raises:
            LeretError: this cannot be optimized, or nothing was learnt; the message says why.
        """
        job = CompileJob(self, student, trainset, teacher, valset)
        job.log("run", f"samples and policies are in {job.run.path}")
        with shown() as job.progress:
            candidates = [job.candidate("student", job.program)]
            job.estimate(candidates[0])
            examples: dict[str, dict[dspy.LM, list[TrainingExample]]] = {}
            if not set(self.algorithms) <= set(_ONLINE):
                job.sample()
                examples = job.training_examples()
            models: dict[dspy.LM, str] = {}
            for algorithm in self.algorithms:
                if algorithm in _ONLINE:
                    trained = job.train_online(algorithm, models)
                else:
                    trained = job.train(algorithm, examples[algorithm], models)
                candidates.append(job.candidate(algorithm, trained))
        ranked = sorted(candidates, key=lambda one: -one["score"]) if valset else candidates[::-1]  # first of equals
        best, score = ranked[0], candidates[0]["score"]
        if best is candidates[0]:
            text = f"nothing was better than the student ({score:g} on valset): the student is returned. {job.advice()}"
        elif valset:
            text = f"the result of {best['stage']} is returned: {best['score']:g} on valset, the student {score:g}"
            text += f"; the difference is {job.interval(candidates[0], best)}"
        else:
            text = f"there is no valset: the result of {best['stage']}, the last training, is returned unscored"
        job.log("result", text, returned=best["stage"])
        program: dspy.Module = best["program"]
        program._compiled, program.candidate_programs = True, ranked
        program.trial_logs, program.run_dir = job.logs, str(job.run.path)
        return with_save(program, job.adapter)


class CompileJob:
    """The parts of one `LeReT.compile`, made ready; what cannot be optimized is refused as it is made."""

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
        self.settings, self.valset, self.logs = settings, list(valset or ()), list[dict[str, Any]]()
        if self.valset and settings.metric is None:
            raise ConfigError("valset is scored by a metric: give LeReT(metric=...), or leave valset out")
        self.examples = read_tasks(trainset, settings.reward)
        refuse_recurring(self.examples, self.valset)
        teachers = [teacher] if isinstance(teacher, dspy.Module) else list(teacher or ())
        self.prompts = [ZERO_SHOT, *(teacher_prompt(i, student, program) for i, program in enumerate(teachers, 1))]
        self.program = stock.copy_program_with_lms(student)
        self.adapter = current_adapter()
        self.budget = CallBudget(settings.max_lm_calls)
        self.stopped: LeretError | None = None  # sampling, by max_lm_calls
        self.trained = trained_lms(self.program, settings.samples)
        counted = {n: counted_policy(p.lm, self.budget) for n, p in self.program.named_predictors()}
        self.policies: dict[str, Policy] = {**counted, **pick_actors(self.program)}
        metric, examples = settings.metric, self.examples
        self.reward = step_reward(settings.reward, examples)
        self.final = metric and (lambda outcome: float(metric(examples[outcome.task], outcome.prediction)))
        self.spread: dict[str, list[int]] = {}  # states, and those with two rewards, by predictor
        self.calls_per_run = float(len(counted))
        self.run = begin_run(settings.run_dir, self._identity())
        if len(self.examples) < len(trainset):
            self.log("trainset", f"{len(trainset) - len(self.examples)} examples recur and count once")

    def sample(self) -> None:
        """Samples of all tasks in the run's store, or of as many as ``max_lm_calls`` allows."""
        settings, examples, before = self.settings, self.examples, self.budget.spent
        self.budget.reserved = before * len(settings.algorithms)
        reward, final = self.reward, self.final
        try:
            with dspy.context(callbacks=[], _leret_spend=self.budget.spend):  # of replays, not of the program
                if settings.prompts > len(self.prompts) == 1:
                    self.prompts = self._bank(final or reward if settings.reward is None else reward)
                plan = SamplingPlan(
                    tuple(self.prompts), settings.samples, settings.seed, temperature=1.0, top_p=1.0, max_tokens=64,
                    role=self.role, reward=reward, final=final, n_continuations=settings.n_continuations,
                )  # fmt: skip
                _run(self._sample(plan))
        except LMCallsSpent as error:
            self.stopped = error
            self.log("sample", f"{error}; what was sampled is trained on")
        finally:
            self.budget.reserved = 0
            self.progress.finish()
        with Store(self.run.store, read_only=True) as store:
            counts = store.counts()
            for group in store.groups():
                if group.samples[0].is_sampled:
                    places = self.spread.setdefault(group.state.predictor, [0, 0])
                    places[0] += 1
                    places[1] += len({one.reward for one in group.samples if one.reward is not None}) > 1
        text = f"{counts['samples']} samples at {counts['states']} states of {len(examples)} examples"
        spread = {name: {"states": n, "with_spread": n_spread} for name, (n, n_spread) in self.spread.items()}
        self.log("sample", text, lm_calls=self.budget.spent - before, predictors=spread, **counts)
        for name, (n, n_spread) in self.spread.items():
            if not n_spread:
                self.log("sample", f"{name} teaches nothing: its samples have one reward at each of {n} states")

    def _retriever(self) -> Retriever | None:
        """That of ``dspy.settings``, where no `leret.Search` of the program has its own."""
        own = any(search.retriever is not None for _, search in self.program.named_sub_modules(Search))
        return dspy.settings.rm if isinstance(dspy.settings.rm, Retriever) and not own else None

    def _bank(self, reward: str | Reward) -> list[Prompt]:
        """The student's prompt, and few-shot ones: half of the examples make demos, the others score them."""
        if (bank := load_bank(self.run)) is None:
            wanted, tasks = self.settings.prompts, list(self.examples)
            lms = [predictor.lm for predictor in self.program.predictors()]
            warm, cold = ([make(lm, self.budget) for lm in lms] for make in (counted_lm, greedy_lm))
            self.progress.start("prompt bank", None)
            bank = bootstrap_prompts(
                self.program.deepcopy(), self.adapter, cold, self._retriever(),
                reward_named(reward),
                tasks[::2][:50], tasks[1::2][:50], BankPlan(wanted, 3, 8, None),
                teacher=warm, on_scored=lambda: self.progress.advance(1),
            )  # fmt: skip
            save_bank(self.run, bank, wanted)
            self.log("prompts", f"{len(bank)} of {wanted}", scores=[prompt.score for prompt in bank])
        return bank

    async def _sample(self, plan: SamplingPlan) -> None:
        program, retriever, rm = self.program.deepcopy(), self._retriever(), dspy.settings.rm
        search = None if retriever is None else SearchBatcher(retriever)
        settings = SamplingSettings(samples=plan.n_samples, seed=plan.seed, max_unparsed_rate=1.0)
        other_rm = search_tool(rm, name="rm") if search is None and callable(rm) else None
        self.progress.start("sampling", len(self.examples))
        try:
            with Store(self.run.store) as store:
                stats = await sample_tasks(
                    list(self.examples), program, self.adapter, search, plan, store, settings,
                    rm=other_rm, run=self.run, progress=self.progress,
                )  # fmt: skip
        finally:
            if search is not None:
                search.close()
        failure, n_outages = stats.last_failure, stats.failures["policy"] + stats.failures["retrieval"]
        if failure is not None and n_outages:
            raise BOUNDARIES.get(failure.kind, PolicyError)(
                f"{n_outages} completions or searches failed, the last one: {failure.message}; what is done is kept: "
                "mend the cause and compile again with the same run_dir"
            ).failed()
        for note in [*stats.notes, *([f"failed: {failure.message}"] if failure else [])]:
            self.log("sample", note, failures=dict(stats.failures))

    def role(self, need: NeedsCompletion) -> Role:
        """Return who answers a call: the LM that DSPy would ask. It is sampled if it is the predictor's own."""
        name = need.predictor
        owner = need.call.lm.owner if isinstance(need.call.lm, StandInLM) else name  # whose LM is asked
        if isinstance(need, NeedsChoice):
            return Role(self.policies[name], sampled=False, temperature=0.0)
        if owner not in self.policies:
            if dspy.settings.lm is None:
                raise ProgramError(f"{name} is made inside forward and has no LM: call dspy.configure(lm=...)")
            self.policies[owner] = counted_policy(dspy.settings.lm, self.budget)
        lm = self.trained.get(owner)
        if self.trained.get(name) is not lm or lm is None:
            return Role(self.policies[owner], sampled=False)
        credit = self.settings.credit or ("auto" if self.settings.reward else "final")
        return Role(self.policies[name], True, credit, lm.kwargs.get("temperature"), lm.kwargs.get("max_tokens"))

    def training_examples(self) -> dict[str, dict[dspy.LM, list[TrainingExample]]]:
        """Targets and pairs by algorithm and LM, at the states of its predictors; refused where there is none."""
        with Store(self.run.store, read_only=True) as store:
            sampled = (group for group in store.groups() if group.samples[0].is_sampled)
            groups = [group for group in sampled if group.state.predictor in self.trained]
        lms = dict.fromkeys(self.trained.values())
        recipes = {
            name: {lm: validated(TrainingRecipe, _without(self._keys(name, lm), "max_steps")) for lm in lms}
            for name in self.settings.algorithms
            if name not in _ONLINE
        }
        try:
            return training_examples(groups, self.trained, recipes)
        except LeretError as error:
            raise (self.stopped or error) from None

    def train(
        self, algorithm: str, examples: Mapping[dspy.LM, Sequence[TrainingExample]], models: dict[dspy.LM, str]
    ) -> dspy.Module:
        """The program with its LMs trained on; ``models`` has their names, and gets the new ones."""
        for lm, own in examples.items():
            self.log(algorithm, f"{lm.model} on {len(own)} examples", lm=lm.model, examples=len(own))
            if own:
                start, keys = models.get(lm) or lm.finetuning_model or lm.model, self._keys(algorithm, lm)
                path = train_examples(start, own, keys, self.run.path, progress=self.progress)
                models[lm] = self._trained(algorithm, path)
        return self._program(models)

    def train_online(self, algorithm: str, models: dict[dspy.LM, str]) -> dspy.Module:
        """Return the program with its LMs trained on fresh samples, one LM after the other; see `train`."""
        tasks = list(self.examples)
        for lm in dict.fromkeys(self.trained.values()):
            program, before = self._program(models), self.budget.spent
            for name, predictor in program.named_predictors():
                self.policies[name] = counted_policy(predictor.lm, self.budget)
            names = [name for name, own in self.trained.items() if own is lm]
            keys = self._keys(algorithm, lm) | {"predictors": names}
            self.log(algorithm, f"{lm.model} on fresh samples of {len(tasks)} examples", lm=lm.model)
            rm, retriever = dspy.settings.rm, self._retriever()
            other_rm = search_tool(rm, name="rm") if retriever is None and callable(rm) else None
            settings = SamplingSettings(
                credit=self.settings.credit or ("auto" if self.settings.reward else "final"),
                n_continuations=self.settings.n_continuations,
            )
            environment = StudentEnvironment(
                Student(program, self.adapter, retriever, other_rm), lm, partial(self._live_role, names),
                self.reward, self.final, settings, self.run.cache,
            )  # fmt: skip
            start = models.get(lm) or lm.finetuning_model or lm.model
            with dspy.context(callbacks=[], _leret_spend=self.budget.spend):
                path = _in_thread(
                    train_examples, start, (), keys, self.run.path, progress=self.progress, tasks=tasks,
                    environment=environment, run=self.run,
                )  # fmt: skip
            models[lm] = self._trained(algorithm, path, lm_calls=self.budget.spent - before)
        return self._program(models)

    def _live_role(self, names: Sequence[str], need: NeedsCompletion, live: Policy) -> Role:
        """Who answers a call of an online training: the policy in training, or, unsampled, another one."""
        role = self.role(need)
        if not role.sampled or need.predictor not in names:
            return replace(role, sampled=False)
        return replace(role, policy=CountedPolicy(live.name, live.digest, self.budget, live.complete))

    def _keys(self, algorithm: str, lm: dspy.LM) -> dict[str, Any]:
        given = dict(self.settings.train_kwargs[lm] or {})
        of_algorithm = {name: given.pop(name, {}) for name in _ALGORITHMS}[algorithm]
        thinking = lm.engine.settings.enable_thinking
        keys = {"seed": self.settings.seed, "enable_thinking": thinking, **given, **of_algorithm}
        return keys | {"algorithm": algorithm}

    def _trained(self, algorithm: str, path: Path, **facts: Any) -> str:
        """Log the rate and the last loss of a training; returns the name of its LM."""
        record = training_record(path)
        rate = record.get("key", {}).get("recipe", {}).get("learning_rate")
        if rate is not None:
            losses = [entry["loss"] for entry in record["log_history"] if entry.get("loss") is not None]
            loss = f", loss {losses[0]:.3g} to {losses[-1]:.3g}" if losses else ""
            self.log(algorithm, f"{record['steps']} steps at learning rate {rate:g}{loss}", learning_rate=rate, **facts)
        return f"leret/{path}"

    def _program(self, models: Mapping[dspy.LM, str]) -> dspy.Module:
        program = stock.copy_program_with_lms(self.program)
        new = {lm: lm.copy(model=model, finetuning_model=None) for lm, model in models.items()}
        for predictor in program.predictors():
            predictor.lm = new.get(predictor.lm, predictor.lm)
        return program

    def estimate(self, student: Mapping[str, Any]) -> None:
        """Log about how many LM calls follow, by those that a run of the student takes."""
        settings, n = self.settings, len(self.examples)
        calls = self.calls_per_run = self.budget.spent / len(self.valset) if self.valset else self.calls_per_run
        total = calls * len(self.valset) * len(settings.algorithms)
        if not set(settings.algorithms) <= set(_ONLINE):
            total += calls * n * settings.samples * settings.prompts
        for algorithm, lm in product(settings.algorithms, dict.fromkeys(self.trained.values())):
            if algorithm in _ONLINE:
                recipe = cast(WritingRecipe, validated(TrainingRecipe, _without(self._keys(algorithm, lm))))
                total += recipe.n_rounds(n) * recipe.questions_per_round * recipe.num_generations * calls
        self.log("estimate", f"about {total:,.0f} LM calls follow, at {calls:.1f} a run of the program")

    def advice(self) -> str:
        """Say why nothing was learnt, as far as the samples show, and what to try."""
        if shipped := {lm.model for lm in self.trained.values()} & {f"leret/{name}" for name in POLICIES}:
            return (
                f"{shipped.pop()} knows the words of leret's generated world alone: on other data, take a model of the "
                "Hugging Face hub or a directory. On that world, try algorithms=['grpo']"
            )
        n, n_spread = (sum(numbers) for numbers in zip(*self.spread.values(), strict=True)) if self.spread else (0, 0)
        if n and n_spread < n / 5:
            return (
                f"Samples differ in reward at {n_spread} of {n} states: raise samples or the LM's temperature, or take "
                "a reward that tells more of them apart"
            )
        return "Raise learning_rate in train_kwargs, give more examples or samples, or try algorithms=['grpo']"

    def interval(self, student: Mapping[str, Any], best: Mapping[str, Any]) -> str:
        """Return the paired difference on the valset in percent with its 95 % bootstrap interval."""
        differences = 100 * (np.array(best["subscores"]) - np.array(student["subscores"]))
        low, high = bootstrap_intervals(differences[:, None])[0]
        return f"{differences.mean():+.1f} [{low:+.1f}, {high:+.1f}]"

    def candidate(self, stage: str, program: dspy.Module) -> dict[str, Any]:
        """A program with its mean metric on the valset in percent: greedy; None without a valset."""
        found, each = None, list[float]()
        if self.valset and self.settings.metric:
            before, threads = self.budget.spent, self.settings.num_threads
            found, each = score(stage, program, self.valset, self.settings.metric, self.budget, self.progress, threads)
            text = f"{found:g} on valset ({len(self.valset)} examples)"
            self.log(stage, text, score=found, lm_calls=self.budget.spent - before)
        return {"score": found, "program": program, "stage": stage, "subscores": each}

    def log(self, stage: str, text: str, **facts: Any) -> None:
        """Tell DSPy's log, ``trial_logs`` and the run what a stage came to."""
        logger.info("LeReT, %s: %s", stage, text)
        self.logs.append({"stage": stage, "text": text, **facts})
        self.run.event("optimize", stage, text=text, **facts)

    def _identity(self) -> dict[str, Any]:
        """What a run is begun with: settings, data, and the student by its code, its prompts and its weights."""
        settings = self.settings
        functions = {"reward": settings.reward, "metric": settings.metric}
        digests: dict[str, Any] = {
            "trainset": [[task.id, list(task.gold)] for task in self.examples],
            "teacher": [prompt.digest for prompt in self.prompts],
            "adapter": [type(self.adapter).__qualname__, to_jsonable_python(vars(self.adapter), fallback=source_of)],
            **{name: source_of(value) for name, value in functions.items() if callable(value)},
        }
        return {
            "dspy": installed_version("dspy"),
            "student": student_digest(self.program, self.policies),
            **{name: getattr(settings, name) for name in _SETTINGS},
            **{name: name_of(value) if callable(value) else value for name, value in functions.items()},
            "algorithms": list(settings.algorithms),
            "digest": {name: digest(value) for name, value in digests.items()},
        }


def _in_thread(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call in another thread if this one has an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call(*args, **kwargs)
    with ThreadPoolExecutor(1, "leret-optimize") as thread:
        return thread.submit(copy_context().run, partial(call, *args, **kwargs)).result()


def _without(keys: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if name not in {"enable_thinking", *names}}


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in another thread: this one may have an event loop, as in a notebook."""
    with ThreadPoolExecutor(1, "leret-optimize") as thread:
        thread.submit(copy_context().run, asyncio.run, work).result()
