"""A student: its run, examples from its samples, its score on held-out examples, and its online trainings."""

from __future__ import annotations

import functools
import inspect
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import dspy
from dspy.teleprompt.bootstrap_finetune import copy_program_with_lms
from pydantic_core import to_jsonable_python

from leret.config.policy import LocalPolicySettings
from leret.config.sampling import SamplingRecipe, SamplingSettings
from leret.core.errors import LeretError, PolicyError, ProgramError, RunError, TrainingError, reason
from leret.core.files import cache_directory
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.stages import check_resumable
from leret.core.types import digest
from leret.optimize.inputs import CallBudget, OtherCalls, greedy_lm
from leret.policies.base import Policy
from leret.programs.needs import NeedsCompletion
from leret.programs.pick import named_picks
from leret.programs.runner import ProgramRunner
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.actors import Role
from leret.rollouts.environment import Environment
from leret.sampling.bank.bootstrap import NEVER, THREADS, RunMonitor
from leret.sampling.store.store import StateSamples
from leret.training.algorithms import ALGORITHMS, TrainingRecipe
from leret.training.algorithms.base import StoredAlgorithm
from leret.training.data import GroupSamples, TrainingExample

logger = logging.getLogger("dspy.teleprompt.leret")  # where DSPy's own optimizers log

_RETENTION_S = 7 * 86_400  # after which the next compile removes a run in leret's cache


def begin_run(place: str | Path | None, now: Mapping[str, Any]) -> Run:
    """Open or create the run; None makes a directory in leret's cache.

    ``now`` has all values that decide its content; ``now["student"]`` is `student_digest`.
    """
    if place is None:
        parent = cache_directory() / "optimize"
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.iterdir():
            if time.time() - old.stat().st_mtime > _RETENTION_S:
                shutil.rmtree(old, ignore_errors=True)
        place = tempfile.mkdtemp(dir=parent)
    run = Run.create(Path(place).resolve())
    before = run.manifest.optimize
    if before is not None and before["student"] != now["student"]:
        logger.info("LeReT: %s belongs to another student; the files of this one are in its students/", run.path)
        run = Run.create(run.path / "students" / now["student"][:12])
        before = run.manifest.optimize
    if before is not None:
        check_resumable(run.path, before, now, otherwise="give LeReT another run_dir")
    elif run.store.exists():
        raise RunError(f"{run.path} is a run of `leret sample`; give LeReT another run_dir")
    else:
        run.update(optimize=now)
    return run


def student_digest(program: dspy.Module, policies: Mapping[str, Any]) -> str:
    """Name a student by its code, its prompts and its weights; ``policies`` are those of its predictors."""
    predictors = [
        [name, predictor.signature.dump_state(), to_jsonable_python(predictor.demos, fallback=repr),
         policies[name].digest, *map(predictor.lm.kwargs.get, ("temperature", "max_tokens"))]
        for name, predictor in program.named_predictors()
    ]  # fmt: skip
    predictors += [[name, policies[name].digest] for name in named_picks(program)]
    return digest(([source_of(type(module)) for _, module in program.named_sub_modules()], predictors))


def source_of(thing: Any) -> str:
    """Return the code of a function or a class; its name if Python has no code of it."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return name_of(thing)


def name_of(thing: Any) -> str:
    """Return the name of a function or a class, or of another value's class."""
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


def training_examples(
    groups: Sequence[StateSamples],
    lms: Mapping[str, dspy.LM],
    algorithms: Iterable[str],
    recipe_of: Callable[[str, dspy.LM], TrainingRecipe],
) -> dict[str, dict[dspy.LM, list[TrainingExample]]]:
    """Return the examples of each algorithm on stored samples and LM, in the order of the states.

    ``lms`` are by predictor.

    Raises:
        PolicyError: no completion parses.
        TrainingError: at no state do two completions differ in reward.
    """
    samples = {lm: GroupSamples([group for group in groups if lms[group.state.predictor] is lm]) for lm in lms.values()}
    by_algorithm: dict[str, dict[dspy.LM, list[TrainingExample]]] = {}
    for name in algorithms:
        algorithm = cast(StoredAlgorithm, ALGORITHMS[name])
        recipes = {lm: recipe_of(name, lm) for lm in samples}
        by_algorithm[name] = {lm: [] for lm in samples}
        for lm, recipe in recipes.items():
            with suppress(TrainingError):  # another LM or algorithm may learn from its samples
                by_algorithm[name][lm] = algorithm.examples(recipe, samples[lm])
    if not any(examples for by_lm in by_algorithm.values() for examples in by_lm.values()):
        raise _nothing_learnt(groups)
    return by_algorithm


def _nothing_learnt(groups: Sequence[StateSamples]) -> LeretError:
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


def score(
    stage: str,
    program: dspy.Module,
    valset: Sequence[dspy.Example],
    metric: Callable[..., Any],
    budget: CallBudget,
    progress: Progress,
    num_threads: int | None = None,
) -> tuple[float, list[float]]:
    """Return the mean metric of greedy runs by `dspy.Evaluate` on held-out examples, in percent, and each example's.

    `dspy.Evaluate` counts every failure as a bad score; here an outage or a fault of the metric is raised.
    """
    scored = ScoredProgram(copy_program_with_lms(program))
    for predictor in scored.program.predictors():
        predictor.lm = greedy_lm(predictor.lm, budget)
    progress.start(f"valset, {stage}", len(valset))
    watched = scored.watched(metric, progress)
    evaluate = dspy.Evaluate(devset=list(valset), metric=watched, num_threads=num_threads or THREADS, max_errors=NEVER)
    with dspy.context(callbacks=[*dspy.settings.callbacks, OtherCalls(budget)]):
        result = evaluate(scored, callback_metadata={"optimizer": "LeReT", "stage": stage})
    progress.finish()
    scored.monitor.raise_first(f"valset, stage {stage}")
    return float(result.score), [float(value) for *_, value in result.results]


class ScoredProgram(dspy.Module):
    """A program for `dspy.Evaluate`, with None as the prediction if a completion does not parse."""

    def __init__(self, program: dspy.Module) -> None:
        super().__init__()
        self.program, self.monitor = program, RunMonitor()

    def forward(self, **inputs: Any) -> Any:
        return self.monitor.run(self.program, inputs)[0]

    def watched(self, metric: Callable[..., Any], progress: Progress) -> Callable[..., float]:
        @functools.wraps(metric)
        def score(example: dspy.Example, prediction: Any, trace: Any = None) -> float:
            progress.advance(1)
            try:
                if prediction is None:
                    return 0.0
                if (value := metric(example, prediction)) is None:
                    raise TypeError("it returned None; return a number or a bool")
                return float(value)
            except Exception as error:
                failed = ProgramError(f"the metric failed: {reason(error)}")
                self.monitor.outage = failed.with_traceback(error.__traceback__)
                raise

        return score


class StudentEnvironment(Environment):
    """An environment of online trainings over a student instead of a recipe's program.

    ``lm`` is the one in training, and ``role`` chooses the policy that answers a call, given the policy in training.
    ``retriever`` answers all searches; None if each `leret.Search` has its own, or ``rm`` searches in its place.
    ``settings`` may hold functions as rewards.
    """

    def __init__(
        self,
        program: dspy.Module,
        adapter: dspy.Adapter,
        retriever: Retriever | None,
        rm: Any,
        lm: dspy.LM,
        role: Callable[[NeedsCompletion, Policy], Role],
        settings: SamplingSettings,
        cache: Path,
    ) -> None:
        decoding = {name: lm.kwargs[name] for name in ("temperature", "max_tokens", "top_p") if lm.kwargs.get(name)}
        decoding["enable_thinking"] = lm.engine.settings.enable_thinking
        policy = LocalPolicySettings(model=lm.model.removeprefix("leret/")).model_copy(update=decoding)
        keys: dict[str, Any] = {"policy": policy, "policies": {}, "sampling": settings}
        super().__init__(SamplingRecipe.model_construct(**keys), cache)
        self.role, self.retriever = role, retriever  # type: ignore[assignment]
        self._program, self._adapter, self._rm = program, adapter, rm

    def runner(self, searches: SearchBatcher | None) -> ProgramRunner:
        return ProgramRunner.over(self._program.deepcopy(), self._adapter, searches, self._rm)

    def policies(self, policy: Policy, predictors: Any) -> Policy:
        """Return the policy in training; `role` chooses the others."""
        return policy
