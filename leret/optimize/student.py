"""A student program's run directory, training examples, valset score, and environment."""

from __future__ import annotations

import functools
import inspect
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dspy
from dspy.teleprompt.bootstrap_finetune import copy_program_with_lms
from pydantic_core import to_jsonable_python

from leret.config.policy import LocalPolicySettings
from leret.config.sampling import SamplingRecipe, SamplingSettings
from leret.core.errors import PolicyError, ProgramError, RunError, reason
from leret.core.files import cache_directory
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.stages import check_resumable
from leret.core.types import digest
from leret.optimize.inputs import CallBudget, OtherCalls, greedy_lm
from leret.policies.base import Policy
from leret.policies.load import tool_reader
from leret.programs.needs import NeedsCompletion
from leret.programs.pick import named_picks
from leret.programs.runner import ProgramRunner
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.actors import Role
from leret.rollouts.environment import Environment
from leret.rollouts.failures import MIN_UNPARSED
from leret.sampling.bank.bootstrap import NEVER, THREADS, RunMonitor

logger = logging.getLogger("dspy.teleprompt.leret")  # DSPy's optimizers log to dspy.teleprompt

_RETENTION_S = 7 * 86_400  # compile removes older runs from leret's cache


def begin_run(place: str | Path | None, now: Mapping[str, Any]) -> Run:
    """Open or create the run at ``place``; None creates a directory in leret's cache.

    ``now`` holds all values that determine the run's content; ``now["student"]`` is a
    `student_digest`.
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
        logger.info(
            "LeReT: %s belongs to a different student; using the subdirectory students/ for this "
            "one",
            run.path,
        )
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
    """Return a digest of the student's code, prompts and weights.

    ``policies`` maps predictors to policies.
    """
    rows: list[list[Any]] = []
    for name, predictor in program.named_predictors():
        row = [
            name,
            predictor.signature.dump_state(),
            to_jsonable_python(predictor.demos, fallback=repr),
            policies[name].digest,
            predictor.lm.kwargs.get("temperature"),
            predictor.lm.kwargs.get("max_tokens"),
        ]
        rows.append(row)
    for name in named_picks(program):
        rows.append([name, policies[name].digest])
    source = functools.cache(source_of)  # for a class, `inspect` parses the whole file
    kinds: list[Any] = [type(module) for _, module in program.named_sub_modules()]
    sources = [source(kind) for kind in kinds]
    return digest((sources, rows))


def source_of(thing: Any) -> str:
    """Return the source code of a function or class, or its name if there is no source."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return name_of(thing)


def name_of(thing: Any) -> str:
    """Return the name of a function or class; for other values, the name of the class."""
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


def score(
    stage: str,
    program: dspy.Module,
    valset: Sequence[dspy.Example],
    metric: Callable[..., Any],
    budget: CallBudget,
    progress: Progress,
    num_threads: int | None = None,
    *,
    must_parse: bool = False,
) -> tuple[float, list[float]]:
    """Return the mean metric (in percent) of greedy runs, and the metric of each example.

    With ``must_parse``, raise PolicyError if no run on `MIN_UNPARSED` or more examples reached its
    end, because a completion did not parse: sampling would only repeat this.

    `dspy.Evaluate` counts every failure as a bad score, but this function raises if a service or
    the metric fails.
    """
    scored = ScoredProgram(copy_program_with_lms(program))
    for predictor in scored.program.predictors():
        predictor.lm = greedy_lm(predictor.lm, budget)
    progress.start(f"valset, {stage}", len(valset))
    watched = scored.watched(metric, progress)
    evaluate = dspy.Evaluate(
        devset=list(valset), metric=watched, num_threads=num_threads or THREADS, max_errors=NEVER
    )
    with dspy.context(callbacks=[*dspy.settings.callbacks, OtherCalls(budget)]):
        result = evaluate(scored, callback_metadata={"optimizer": "LeReT", "stage": stage})
    progress.finish()
    scored.monitor.raise_first(f"valset, stage {stage}")
    if must_parse:
        _refuse_unparsed(scored.monitor, len(valset))
    return float(result.score), [float(value) for *_, value in result.results]


def _refuse_unparsed(monitor: RunMonitor, n_examples: int) -> None:
    error = monitor.unparsed
    if error is None or n_examples < MIN_UNPARSED or monitor.n_unparsed < n_examples:
        return
    fields = ", ".join(error.signature.output_fields)
    completion = str(error.lm_response)[:200]
    raise PolicyError(
        f"valset: the completions of all {n_examples} examples failed to parse, for example: "
        f"{completion!r} is not in the format of {error.adapter_name} (outputs: {fields}); choose "
        "the adapter that the LM knows (dspy.configure(adapter=leret.CompactAdapter()) for leret's "
        "small policies), or raise the LM's max_tokens"
    )


class ScoredProgram(dspy.Module):
    """Wraps a program for `dspy.Evaluate`.

    If a completion does not parse, the prediction is None and scores 0.
    """

    def __init__(self, program: dspy.Module) -> None:
        super().__init__()
        self.program = program
        self.monitor = RunMonitor()

    def forward(self, **inputs: Any) -> Any:
        return self.monitor.run(self.program, inputs)[0]

    def watched(self, metric: Callable[..., Any], progress: Progress) -> Callable[..., float]:
        @functools.wraps(metric)
        def score(example: dspy.Example, prediction: Any, trace: Any = None) -> float:
            progress.advance(1)
            try:
                if prediction is None:
                    return 0.0
                value = metric(example, prediction)
                if value is None:
                    raise TypeError("the result is None; return a number or a bool")
                return float(value)
            except Exception as error:
                failed = ProgramError(f"the metric failed: {reason(error)}")
                self.monitor.outage = failed.with_traceback(error.__traceback__)
                raise

        return score


class StudentEnvironment(Environment):
    """Environment for online training in which a student replaces the recipe's program.

    ``lm`` is the LM in training. ``role`` gets a call and the policy in training, and chooses the
    call's policy. ``retriever`` answers all searches; if it is None, ``rm`` or the retriever of
    each `leret.Search` answers. ``settings`` may hold reward functions.
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
        decoding: dict[str, Any] = {"enable_thinking": lm.engine.settings.enable_thinking}
        for name in ("temperature", "max_tokens", "top_p"):
            if lm.kwargs.get(name):
                decoding[name] = lm.kwargs[name]
        model = (lm.finetuning_model or lm.model).removeprefix("leret/")
        policy = LocalPolicySettings(model=model).model_copy(update=decoding)
        keys: dict[str, Any] = {"policy": policy, "policies": {}, "sampling": settings}
        super().__init__(SamplingRecipe.model_construct(**keys), cache)
        self.role = role
        self.retriever = retriever  # type: ignore[assignment]
        self._program = program
        self._adapter = adapter
        self._rm = rm

    def runner(self, searches: SearchBatcher | None) -> ProgramRunner:
        read = tool_reader(self.recipe.policy)
        return ProgramRunner.over(self._program.deepcopy(), self._adapter, searches, self._rm, read)

    def policies(self, policy: Policy, predictors: Any) -> Policy:
        """Return the policy in training unchanged; ``role`` chooses the policies of other LMs."""
        return policy
