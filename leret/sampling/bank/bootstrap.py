"""Bootstrapping demos with DSPy's optimizer, with a monitor so that outages stop it and are not scored as 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import dspy
from dspy.teleprompt import BootstrapFewShotWithRandomSearch
from pydantic_core import to_jsonable_python

from leret.core import dspy_internals as internals
from leret.core.dspy_internals import AdapterParseError, EngineLM, lm15
from leret.core.errors import LeretError, PolicyError, ProgramError, RunError
from leret.core.types import Outcome, Rollout, SharedInstance, Task, digest, merge
from leret.policies.tool_calls import ToolReader, read_calls
from leret.programs.checks import SearchMemory
from leret.programs.load import bound_inputs, input_names
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.search import as_rm
from leret.retrieval.base import Retriever
from leret.rewards import Reward

THREADS = 16
"""Number of questions scored concurrently, so that the policy can batch requests."""

NEVER = 1_000_000_000
"""Error limit passed to DSPy; `RunMonitor` stops the optimizer instead."""


@dataclass(frozen=True)
class BankPlan:
    """Settings of a bank.

    ``n_prompts`` includes the zero-shot prompt; ``candidates`` counts the demo sets to score.

    A run's steps become demos if its reward is at least ``threshold``; None admits the teacher's
    best quarter of runs.
    """

    n_prompts: int
    max_demos: int
    candidates: int
    threshold: float | None


def bootstrap_prompts(
    program: dspy.Module,
    adapter: dspy.Adapter,
    lms: Sequence[dspy.BaseLM],
    retriever: Retriever | None,
    reward: Reward,
    train: Sequence[Task],
    dev: Sequence[Task],
    plan: BankPlan,
    *,
    teacher: Sequence[dspy.BaseLM],
    on_scored: Callable[[], None] = lambda: None,
    stop: threading.Event | None = None,
) -> list[Prompt]:
    """Bootstrap the prompts of a bank. The call may replace the LMs of the program's predictors.

    The ``teacher`` makes demos on ``train``, and ``lms`` score candidates on ``dev``; both have one
    LM per predictor. After ``stop`` is set, the next program run raises an error. Returns the
    zero-shot prompt, then few-shot prompts by descending score.
    """
    monitor = RunMonitor(retriever, stop or threading.Event())
    student = RetrievalStudent(program, monitor)
    train_examples = _examples(train)
    try:
        with (
            internals.suppress_output("dspy"),
            dspy.context(_leret_lms=lms, adapter=adapter, disable_history=True),
        ):
            if plan.threshold is None:
                metric = partial(_value, reward)
                evaluate = dspy.Evaluate(
                    devset=train_examples, metric=metric, num_threads=THREADS, max_errors=NEVER
                )
                with dspy.context(_leret_lms=teacher):
                    scores = [float(score) for *_, score in evaluate(student).results]
                plan = replace(plan, threshold=best_quarter(scores))
            optimizer = _optimizer(plan, reward, teacher, on_scored)
            best = optimizer.compile(
                student,
                trainset=train_examples,
                valset=_examples(dev),
                restrict=range(-1, plan.candidates - 1),
            )
    except Exception:
        monitor.raise_first("the prompt bank could not be made")
        raise
    monitor.raise_first("the prompt bank could not be made")
    return [ZERO_SHOT, *_distinct(best.candidate_programs, plan.n_prompts - 1)]


def _examples(tasks: Sequence[Task]) -> list[dspy.Example]:
    return [dspy.Example(task=task).with_inputs("task") for task in tasks]


def best_quarter(rewards: Iterable[float]) -> float:
    """Return the least reward of the best quarter of runs (at least 1e-9), as the demos' threshold."""
    ordered = sorted(rewards, reverse=True)
    good = ordered[: max(1, round(len(ordered) / 4))]
    return max([1e-9, *good[-1:]])


def _value(reward: Reward, example: dspy.Example, prediction: Any) -> float:
    outcome = Outcome(example.task, ranking=prediction.ranking, prediction=prediction.result)
    return reward(outcome) or 0.0


def _optimizer(
    plan: BankPlan,
    reward: Reward,
    teacher: Sequence[dspy.BaseLM],
    on_scored: Callable[[], None],
) -> Any:
    def metric(example: dspy.Example, prediction: Any, trace: Any = None) -> float:
        if trace is None:
            on_scored()
        elif not prediction.complete:
            return 0.0  # incomplete runs provide no demos
        return _value(reward, example, prediction)

    return BootstrapFewShotWithRandomSearch(
        metric=metric,
        metric_threshold=plan.threshold,
        teacher_settings={"_leret_lms": teacher},
        max_bootstrapped_demos=plan.max_demos,
        max_labeled_demos=0,  # labeled demos would lack the queries
        # DSPy adds a candidate with unshuffled questions
        num_candidate_programs=max(plan.candidates - 1, 0),
        num_threads=THREADS,
        max_errors=NEVER,
    )


def _distinct(candidates: Sequence[Mapping[str, Any]], n: int) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    for candidate in sorted(candidates, key=lambda c: (-c["score"], c["seed"])):
        demos = _demos(candidate["program"].program)
        prompt = Prompt(str(len(prompts) + 1), demos, score=candidate["score"] / 100)
        if any(demos.values()) and len(prompts) < n:
            prompts.setdefault(prompt.digest, prompt)
    return list(prompts.values())


def _demos(program: dspy.Module) -> dict[str, list[dict[str, Any]]]:
    demos: dict[str, list[dict[str, Any]]] = {}
    for name, predictor in program.named_predictors():
        demos[name] = []
        for demo in predictor.demos:
            fields = [key for key in predictor.signature.fields if key in demo]
            values = {key: to_jsonable_python(demo[key], fallback=str) for key in fields}
            demos[name].append(values)
    return demos


@dataclass
class RunMonitor(SharedInstance):
    """Runs programs for DSPy's optimizers and evaluation, which would score every failure as 0.

    Deep copies of a student share its monitor. Setting ``stop`` counts as an outage; no run starts
    after an ``outage``.
    """

    retriever: Retriever | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    outage: LeretError | None = None
    crash: Exception | None = None
    n_runs: int = 0
    n_crashes: int = 0
    unparsed: AdapterParseError | None = None
    n_unparsed: int = 0

    def run(self, program: dspy.Module, inputs: Mapping[str, Any]) -> tuple[Any, bool]:
        """Run a program.

        Return (prediction, True), or (None, False) if parsing fails or a prompt is too long.
        """
        if self.stop.is_set():
            self.outage = self.outage or RunError("interrupted; run the same command again")
        if self.outage is not None:
            raise self.outage
        self.n_runs += 1
        try:
            return internals.run_program(program, **inputs), True
        except AdapterParseError as error:
            self.unparsed = error
            self.n_unparsed += 1
            return None, False
        except internals.ContextWindowExceededError:
            return None, False
        except Exception as error:
            outage = outage_of(error)
            if outage is not None:
                self.outage = outage
            else:
                self.crash = error
                self.n_crashes += 1
            raise

    def raise_first(self, what: str) -> None:
        """Raise the outage, if any, or the last crash if every run crashed.

        The message begins with ``what``.
        """
        if self.outage is not None:
            raise type(self.outage)(f"{what}: {self.outage}") from self.outage
        if self.crash is not None and self.n_crashes == self.n_runs:
            failed = f"{type(self.crash).__name__}: {self.crash}"
            raise ProgramError(
                f"{what}: the program failed on every question ({failed}); fix it"
            ) from self.crash


def outage_of(error: BaseException) -> LeretError | None:
    """Return the policy or retriever error that caused a DSPy error; None if there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LeretError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return (
        PolicyError(f"{type(error).__name__}: {error}")
        if isinstance(error, internals.LMError)
        else None
    )


class RetrievalStudent(dspy.Module):
    """Runs a program; returns ``result``, ``ranking`` and ``complete`` (the run reached its end)."""

    def __init__(self, program: dspy.Module, monitor: RunMonitor) -> None:
        super().__init__()
        self.program = program
        self.monitor = monitor

    def forward(self, task: Task) -> dspy.Prediction:
        lms = dspy.settings.get("_leret_lms", ())
        for predictor, lm in zip(self.program.predictors(), lms, strict=False):
            predictor.lm = lm
        memory = SearchMemory({}, self.monitor.retriever)
        context = internals.carrying(memory, {"rm": as_rm})
        inputs = bound_inputs(input_names(self.program), task)
        result, complete = context.run(self.monitor.run, self.program, inputs)
        return dspy.Prediction(ranking=merge(memory.rankings), complete=complete, result=result)


def cached_completion_lm(
    rollouts: Iterable[Rollout], lm: dspy.BaseLM, read: ToolReader = read_calls, **settings: Any
) -> dspy.LM:
    """Return an LM that answers from rollouts, and calls ``lm`` for other prompts."""
    completions = {}
    for rollout in rollouts:
        for step in rollout.steps:
            completions[digest(list(step.messages))] = step.completion

    def answer(request: lm15.Request) -> lm15.Response:
        text = completions.get(digest(list(internals.messages_of(request))))
        if text is not None:
            return internals.text_response(request, text, read=read)
        return cast(lm15.Response, lm(replace(request, model=lm.model)))

    return EngineLM("cached", answer, **settings)
