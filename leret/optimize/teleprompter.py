"""LeReT as a DSPy optimizer.

It makes the objects that leret's stages take: `sample_tasks` samples the student, `train_examples` trains its LMs, and
`dspy.Evaluate` chooses by the user's metric.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import Any, Literal

import dspy
from dspy.teleprompt import Teleprompter
from dspy.teleprompt import bootstrap_finetune as stock
from pydantic_core import to_jsonable_python

from leret.config.sampling import SamplingSettings
from leret.core.errors import ConfigError, LeretError, PolicyError, ProgramError, RunError, TrainingError, reason
from leret.core.files import cache_directory
from leret.core.progress import Progress, Silent, shown
from leret.core.runs import Run, installed_version
from leret.core.stages import check_resumable
from leret.core.types import Sample, digest
from leret.optimize.finetune import directory_of, train_examples
from leret.optimize.inputs import (
    CallBudget,
    LMCallsSpent,
    RewardFunction,
    counted_lm,
    counted_policy,
    is_trainable,
    read_tasks,
    refuse_recurring,
    step_reward,
)
from leret.policies.checkpoints import find_model
from leret.programs.needs import NeedsCompletion
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.saved import with_save
from leret.programs.search import Search, search_tool
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.rewards import Reward
from leret.rewards import reward as reward_named
from leret.sampling.bank.bank import load_bank, save_bank
from leret.sampling.bank.bootstrap import NEVER, THREADS, BankPlan, RunMonitor, bootstrap_prompts
from leret.sampling.preferences.dataset import state_targets
from leret.sampling.preferences.pairs import distinct, make_pairs
from leret.sampling.rollouts.branching import Role, SamplingPlan
from leret.sampling.rollouts.rollout import BOUNDARIES
from leret.sampling.stage import sample_tasks
from leret.sampling.store.schema import StateSamples
from leret.sampling.store.store import Store
from leret.training.algorithms import ALGORITHMS
from leret.training.data import TrainingExample

logger = logging.getLogger("dspy.teleprompt.leret")  # where DSPy's own optimizers log

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
        algorithms: sft, ipo, dpo: one after the other, each from the weights of the one before.
        credit: ``step``: a completion is scored by the reward; ``final``: by the metric at the program's end; ``both``:
            by their mean; None: ``step`` at a predictor that a search follows, ``final`` at another one, which is not
            trained where there is no metric.
        train_kwargs: keys of the recipes of `leret train` (``learning_rate`` ...), for all algorithms or under the name
            of one; or such a dict for each LM.
        run_dir: of samples and trained policies; compile goes on with what is there. None takes a new one. Another
            student (other code, demos, instructions or weights) has a directory of its own in it.
        seed: of sampling and training.
        max_lm_calls: of the program's LMs, in one compile, those on the valset included.
        n_continuations: runs to the program's end from each completion, for credit ``final``.
    """

    def __init__(
        self,
        *,
        reward: str | RewardFunction | None = None,
        metric: Callable[..., Any] | None = None,
        prompts: int = 1,
        samples: int = 4,
        algorithms: Sequence[str] = ("sft", "ipo"),
        credit: Literal["step", "final", "both"] | None = None,
        train_kwargs: dict[str, Any] | dict[dspy.LM, dict[str, Any]] | None = None,
        run_dir: str | Path | None = None,
        seed: int = 0,
        max_lm_calls: int | None = None,
        n_continuations: int = 1,
    ) -> None:
        super().__init__(train_kwargs=train_kwargs)
        self.reward, self.metric, self.credit = reward, metric, credit
        self.prompts, self.samples, self.n_continuations = prompts, samples, n_continuations
        self.algorithms, self.run_dir, self.seed, self.max_lm_calls = tuple(algorithms), run_dir, seed, max_lm_calls
        if not self.algorithms or not set(self.algorithms) <= set(ALGORITHMS):
            raise ConfigError(f"algorithms={self.algorithms!r}: give one or more of {', '.join(ALGORITHMS)}")
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
        with shown() if sys.stderr.isatty() else nullcontext(Silent()) as job.progress:
            candidates = [job.candidate("student", job.program)]
            job.sample()
            models: dict[dspy.LM, str] = {}
            for algorithm, examples in job.training_examples().items():
                candidates.append(job.candidate(algorithm, job.train(algorithm, examples, models)))
        ranked = sorted(candidates, key=lambda one: -one["score"]) if valset else candidates[::-1]  # first of equals
        best, score = ranked[0], candidates[0]["score"]
        if best is candidates[0]:
            text = f"nothing was better than the student ({score:g} on valset): the student is returned"
        elif valset:
            text = f"the result of {best['stage']} is returned: {best['score']:g} on valset, the student {score:g}"
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
        self.prompts = [ZERO_SHOT, *(_prompt(i, student, program) for i, program in enumerate(teachers, 1))]
        self.program = stock.copy_program_with_lms(student)
        self.adapter = dspy.settings.adapter or dspy.ChatAdapter()
        self.budget = CallBudget(settings.max_lm_calls)
        self.stopped: LeretError | None = None  # sampling, by max_lm_calls
        self.trained = _trained_lms(self.program, settings.samples)
        self.policies = {n: counted_policy(p.lm, self.budget) for n, p in self.program.named_predictors()}
        self.run = self._begin()
        if len(self.examples) < len(trainset):
            self.log("trainset", f"{len(trainset) - len(self.examples)} examples recur and count once")

    def sample(self) -> None:
        """Samples of all tasks in the run's store, or of as many as ``max_lm_calls`` allows."""
        settings, examples, before = self.settings, self.examples, self.budget.spent
        self.budget.reserved = before * len(settings.algorithms)
        metric, reward = settings.metric, step_reward(settings.reward, examples)
        final = metric and (lambda outcome: float(metric(examples[outcome.task], outcome.prediction)))
        try:
            with dspy.context(callbacks=[]):  # of replays, not of the program
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
        text = f"{counts['samples']} samples at {counts['states']} states of {len(examples)} examples"
        self.log("sample", text, lm_calls=self.budget.spent - before, **counts)

    def _retriever(self) -> Retriever | None:
        """That of ``dspy.settings``, where no `leret.Search` of the program has its own."""
        own = any(search.retriever is not None for _, search in self.program.named_sub_modules(Search))
        return dspy.settings.rm if isinstance(dspy.settings.rm, Retriever) and not own else None

    def _bank(self, reward: str | Reward) -> list[Prompt]:
        """The student's prompt, and few-shot ones: half of the examples make demos, the others score them."""
        if (bank := load_bank(self.run)) is None:
            wanted, tasks = self.settings.prompts, list(self.examples)
            warm, cold = ([self._counted(p.lm, greedy) for p in self.program.predictors()] for greedy in (False, True))
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
        """Who answers a call of the program: the policy of its predictor's LM, else that of ``dspy.settings.lm``."""
        name = need.predictor
        if name not in self.policies:
            if dspy.settings.lm is None:
                raise ProgramError(f"{name} is made inside forward and has no LM: call dspy.configure(lm=...)")
            self.policies[name] = counted_policy(dspy.settings.lm, self.budget)
        lm = next((lm for lm, names in self.trained.items() if name in names), None)
        if lm is None:
            return Role(self.policies[name], sampled=False)
        credit = self.settings.credit or ("auto" if self.settings.reward else "final")
        return Role(self.policies[name], True, credit, lm.kwargs.get("temperature"), lm.kwargs.get("max_tokens"))

    def training_examples(self) -> dict[str, dict[dspy.LM, list[TrainingExample]]]:
        """Targets and pairs by algorithm and LM, at the states of its predictors; refused where there is none."""
        found = {name: {lm: list[TrainingExample]() for lm in self.trained} for name in self.settings.algorithms}
        lms = {name: lm for lm, names in self.trained.items() for name in names}
        with Store(self.run.store, read_only=True) as store:
            groups = [group for group in store.groups() if group.samples[0].is_sampled and group.state.predictor in lms]
        for group in groups:
            for algorithm, by_lm in found.items():
                by_lm[lms[group.state.predictor]] += _examples_of(group, algorithm, self.settings.seed)
        if not any(examples for by_lm in found.values() for examples in by_lm.values()):
            raise self.stopped or _nothing_learnt(groups)
        return found

    def train(
        self, algorithm: str, examples: Mapping[dspy.LM, Sequence[TrainingExample]], models: dict[dspy.LM, str]
    ) -> dspy.Module:
        """The program with its LMs trained on; ``models`` has their names, and gets the new ones."""
        for lm, own in examples.items():
            self.log(algorithm, f"{lm.model} on {len(own)} examples", lm=lm.model, examples=len(own))
            if own:
                given = dict(self.settings.train_kwargs[lm] or {})
                of_algorithm = {name: given.pop(name, {}) for name in ALGORITHMS}[algorithm]
                thinking = lm.engine.settings.enable_thinking
                keys = {"seed": self.settings.seed, "enable_thinking": thinking, **given, **of_algorithm}
                keys["algorithm"], start = algorithm, models.get(lm) or lm.finetuning_model or lm.model
                models[lm] = f"leret/{train_examples(start, own, keys, self.run.path, progress=self.progress)}"
        program = stock.copy_program_with_lms(self.program)
        new = {lm: lm.copy(model=model, finetuning_model=None) for lm, model in models.items()}
        for predictor in program.predictors():
            predictor.lm = new.get(predictor.lm, predictor.lm)
        return program

    def candidate(self, stage: str, program: dspy.Module) -> dict[str, Any]:
        """A program with its mean metric on the valset in percent: greedy; None without a valset."""
        score = None
        if self.valset:
            before, scored = self.budget.spent, ScoredProgram(stock.copy_program_with_lms(program))
            for predictor in scored.program.predictors():
                predictor.lm = self._counted(predictor.lm, greedy=True)
            metric = scored.watched(self.settings.metric, self.progress)
            evaluate = dspy.Evaluate(devset=self.valset, metric=metric, num_threads=THREADS, max_errors=NEVER)
            self.progress.start(f"valset, {stage}", len(self.valset))
            score = evaluate(scored, callback_metadata={"optimizer": "LeReT", "stage": stage}).score
            self.progress.finish()
            scored.monitor.raise_first(f"valset, stage {stage}")
            facts = {"score": score, "lm_calls": self.budget.spent - before}
            self.log(stage, f"{score:g} on valset ({len(self.valset)} examples)", **facts)
        return {"score": score, "program": program, "stage": stage}

    def log(self, stage: str, text: str, **facts: Any) -> None:
        """Tell DSPy's log, ``trial_logs`` and the run what a stage came to."""
        logger.info("LeReT, %s: %s", stage, text)
        self.logs.append({"stage": stage, "text": text, **facts})
        self.run.event("optimize", stage, text=text, **facts)

    def _counted(self, lm: dspy.BaseLM, greedy: bool) -> dspy.BaseLM:
        """A copy whose calls count; of another LM than those that are trained as it is."""
        return counted_lm(lm, self.budget, **({"temperature": 0.0} if greedy and is_trainable(lm) else {}))

    def _begin(self) -> Run:
        """The run of this student: ``run_dir``, or a directory in it where that was begun with another student."""
        place, now = self.settings.run_dir, self._identity()
        if place is None:
            parent = cache_directory() / "optimize"
            parent.mkdir(parents=True, exist_ok=True)
            place = tempfile.mkdtemp(dir=parent)
        run = Run.create(Path(place).resolve())
        before = run.manifest().get("optimize")
        if before is not None and before["student"] != now["student"]:
            logger.info("LeReT: %s is of another student; what this one comes to is in its students/", run.path)
            run = Run.create(run.path / "students" / now["student"][:12])
            before = run.manifest().get("optimize")
        if before is not None:
            check_resumable(run.path, before, now, otherwise="give LeReT another run_dir")
        elif run.store.exists():
            raise RunError(f"{run.path} is a run of `leret sample`; give LeReT another run_dir")
        else:
            run.update(optimize=now)
        return run

    def _identity(self) -> dict[str, Any]:
        """What a run is begun with: settings, data, and the student by its code, its prompts and its weights."""
        settings = self.settings
        functions = {"reward": settings.reward, "metric": settings.metric}
        digests: dict[str, Any] = {
            "trainset": [[task.id, list(task.gold)] for task in self.examples],
            "teacher": [prompt.digest for prompt in self.prompts],
            "adapter": [type(self.adapter).__qualname__, to_jsonable_python(vars(self.adapter), fallback=_source)],
            **{name: _source(value) for name, value in functions.items() if callable(value)},
        }
        student = [_source(type(module)) for _, module in self.program.named_sub_modules()], [
            [name, predictor.signature.dump_state(), to_jsonable_python(predictor.demos, fallback=repr),
             self.policies[name].digest, *map(predictor.lm.kwargs.get, ("temperature", "max_tokens"))]
            for name, predictor in self.program.named_predictors()
        ]  # fmt: skip
        return {
            "dspy": installed_version("dspy"),
            "student": digest(student),
            **{name: getattr(settings, name) for name in _SETTINGS},
            **{name: _name(value) if callable(value) else value for name, value in functions.items()},
            "algorithms": list(settings.algorithms),
            "digest": {name: digest(value) for name, value in digests.items()},
        }


class ScoredProgram(dspy.Module):
    """A program as `dspy.Evaluate` runs it: no prediction where the policy spoiled a run."""

    def __init__(self, program: dspy.Module) -> None:
        super().__init__()
        self.program, self.monitor = program, RunMonitor()

    def forward(self, **inputs: Any) -> Any:
        return self.monitor.run(self.program, inputs)[0]

    def watched(self, metric: Any, progress: Progress) -> Callable[..., float]:
        """The metric; 0 where there is no prediction."""

        @functools.wraps(metric)
        def score(example: dspy.Example, prediction: Any, trace: Any = None) -> float:
            progress.advance(1)
            try:
                return 0.0 if prediction is None else float(metric(example, prediction))
            except Exception as error:
                self.monitor.outage = ProgramError(f"the metric failed: {reason(error)}").with_traceback(
                    error.__traceback__
                )
                raise

        return score


def _trained_lms(program: dspy.Module, n_samples: int) -> dict[dspy.LM, list[str]]:
    """The LMs that are trained, with the names of their predictors."""
    found: dict[dspy.LM, list[str]] = {}
    for name, predictor in program.named_predictors():
        if is_trainable(predictor.lm):
            found.setdefault(predictor.lm, []).append(name)
    if not program.predictors():
        raise ProgramError(f"{type(program).__name__} has no predictor to train; use dspy.Predict")
    if not found:
        models = sorted({str(predictor.lm.model) for predictor in program.predictors()})
        raise PolicyError(f"none of the student's LMs can be trained ({', '.join(models)}); give it a leret.LM(...)")
    for lm in found:
        if n_samples > 1 and lm.kwargs.get("temperature") == 0:
            raise ConfigError(f"{lm.model} has temperature 0, so all samples would be one; leret.LM(temperature=1.0)")
        try:
            find_model(directory_of(lm.finetuning_model or lm.model))
        except LeretError as error:
            raise PolicyError(
                f"{lm.model} has no weights here to train ({error}); name their directory by "
                "leret.LM(finetuning_model=...), or freeze its predictors with another LM"
            ) from error
    return found


def _prompt(number: int, student: dspy.Module, teacher: dspy.Module) -> Prompt:
    named = dict(stock.prepare_teacher(student, teacher).named_predictors())
    demos = {name: [dict(demo) for demo in predictor.demos] for name, predictor in named.items()}
    return Prompt(str(number), demos, {name: predictor.signature.instructions for name, predictor in named.items()})


def _examples_of(group: StateSamples, algorithm: str, seed: int) -> list[TrainingExample]:
    """What an algorithm learns from one state, under the student's own prompt."""
    rows: Sequence[tuple[Sample, ...]] = make_pairs(distinct(group.samples), "adjacent")
    if algorithm == "sft":
        rows = [(target,) for target in state_targets(group, seed=seed)]
    messages = tuple(dict(message) for message in group.state.messages)
    return [TrainingExample(group.state.question_id, messages, tuple(s.completion or "" for s in row)) for row in rows]


def _nothing_learnt(groups: Sequence[StateSamples]) -> LeretError:
    """Why there is no pair and no target."""
    samples = [sample for group in groups for sample in group.samples]
    unparsed = [one.failure for one in samples if one.failure is not None and one.failure.kind == "parse"]
    if unparsed and len(unparsed) == len(samples):
        return PolicyError(f"none of {len(samples)} completions parses; one of them: {unparsed[0].message}")
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = sum(rewards) / max(1, len(rewards))
    return TrainingError(
        f"no pair and no target: at none of {len(groups)} sampled states did two completions differ in reward "
        f"({len(samples)} completions, {len(unparsed)} unparsed, mean reward {mean:.3f}); "
        "raise samples or the LM's temperature, or take a reward that tells them apart"
    )


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, in a thread of its own: this one may have an event loop already, as in a notebook."""
    with ThreadPoolExecutor(1, "leret-optimize") as thread:
        thread.submit(copy_context().run, asyncio.run, work).result()


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return _name(thing)


def _name(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))
