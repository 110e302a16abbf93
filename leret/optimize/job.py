"""One call of `LeReT.compile`: the student, the data and the settings, checked, and the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import dspy
from dspy.teleprompt import bootstrap_finetune as stock
from pydantic_core import to_jsonable_python

from leret.config.sampling import SamplingSettings
from leret.config.training import WriterKeys
from leret.core.dspy_internals import StandInLM, current_adapter
from leret.core.errors import ConfigError, ProgramError
from leret.core.progress import Progress
from leret.core.runs import Run, installed_version
from leret.core.types import Outcome, Task, digest
from leret.optimize.inputs import (
    CallBudget,
    RewardFunction,
    counted_policy,
    pick_actors,
    read_tasks,
    refuse_recurring,
    step_reward,
    teacher_prompt,
    trained_lms,
    with_weights,
)
from leret.optimize.student import begin_run, logger, name_of, source_of, student_digest
from leret.policies.base import Policy
from leret.policies.dspy_lm import policy_of
from leret.policies.local.policy import LocalPolicy
from leret.programs.needs import NeedsCompletion
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.search import Search, search_tool
from leret.retrieval.base import Retriever
from leret.rewards import Reward
from leret.rollouts.actors import Role
from leret.training.algorithms import ALGORITHMS

T = TypeVar("T")
Credit = Literal["step", "final", "both"]

_WRITING: tuple[Any, ...] = (WriterKeys,)
ALGORITHM_NAMES = tuple(
    name
    for name, algorithm in ALGORITHMS.items()
    if issubclass(algorithm.settings, _WRITING) and name != "distill"
)
"""Algorithms of `leret.LeReT`; distill needs a run of `leret sample`, for its teacher and hints."""

ONLINE = tuple(name for name in ALGORITHM_NAMES if ALGORITHMS[name].is_online)
"""Algorithms that sample during training; the other algorithms learn from stored samples."""

_IDENTIFYING = ("prompts", "samples", "n_continuations", "credit", "seed")
"""Settings that identify a run directory, in addition to reward, metric and algorithms."""


class CompileSettings(Protocol):
    """Arguments of `LeReT`."""

    reward: str | RewardFunction | None
    metric: Callable[..., Any] | None
    prompts: int
    samples: int
    algorithms: tuple[str, ...]
    credit: Credit | None
    train_kwargs: Any
    run_dir: str | Path | None
    seed: int
    max_lm_calls: int | None
    n_continuations: int
    num_threads: int | None


@dataclass
class CompileJob:
    """Inputs of a call of `LeReT.compile`, and the run with its results.

    Attributes:
        program: copy of the student. ``originals`` maps its LMs to the student's, where they differ.
        examples: examples of the trainset by task.
        prompts: the student's prompt and those of the teachers.
        trained: LMs to train by predictor.
        policies: policies and the actors of picks, by predictor and pick.
        final: reward of the metric; None without a metric.
        retriever: retriever for all searches; None if the program or ``rm`` brings one.
        rm: DSPy's retriever, if it is not leret's.
        logs: entries of ``trial_logs``.
    """

    settings: CompileSettings
    program: dspy.Module
    originals: Mapping[dspy.BaseLM, dspy.BaseLM]
    adapter: dspy.Adapter
    examples: Mapping[Task, dspy.Example]
    valset: Sequence[dspy.Example]
    prompts: Sequence[Prompt]
    budget: CallBudget
    trained: Mapping[str, dspy.LM]
    policies: dict[str, Policy]
    reward: str | Reward
    final: Reward | None
    retriever: Retriever | None
    rm: Any
    run: Run
    logs: list[dict[str, Any]] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    @property
    def stored(self) -> list[str]:
        """Names of the algorithms that learn from stored samples."""
        return [name for name in self.settings.algorithms if name not in ONLINE]

    @property
    def credit(self) -> Literal["auto"] | Credit:
        if self.settings.credit:
            return self.settings.credit
        if self.settings.reward:
            return "auto"
        return "final"

    @property
    def sampling(self) -> SamplingSettings:
        """Settings for stored samples and online training; their rewards may be functions."""
        settings = SamplingSettings(
            samples=self.settings.samples,
            seed=self.settings.seed,
            credit=self.credit,
            n_continuations=self.settings.n_continuations,
            max_unparsed_rate=1.0,
        )
        return settings.model_copy(update={"reward": self.reward, "final": self.final})

    def role(self, need: NeedsCompletion) -> Role:
        """Return the role for the LM that DSPy would call.

        A call is sampled only if that LM is to be trained. Its temperature is the LM's, or the
        plan's if the LM is greedy or has none.
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
            lm.kwargs.get("temperature") or None,
            lm.kwargs.get("max_tokens"),
        )

    def log(self, stage: str, text: str, **values: Any) -> None:
        """Write an entry to DSPy's log, ``trial_logs`` and the run's events."""
        logger.info("LeReT, %s: %s", stage, text)
        self.logs.append({"stage": stage, "text": text, **values})
        self.run.event("optimize", stage, text=text, **values)


def open_job(
    settings: CompileSettings,
    student: dspy.Module,
    trainset: Sequence[dspy.Example],
    teacher: dspy.Module | Sequence[dspy.Module] | None,
    valset: Sequence[dspy.Example] | None,
) -> CompileJob:
    """Check the inputs of a call of `LeReT.compile`, and open its run.

    LeretError if the program cannot be optimized.
    """
    stock.prepare_student(student)
    stock.assert_all_predictors_have_lms(student, role="student")
    if valset and settings.metric is None:
        raise ConfigError("valset needs a metric: pass LeReT(metric=...), or remove valset")
    examples = read_tasks(trainset, settings.reward)
    refuse_recurring(examples, valset or ())
    teachers = [teacher] if isinstance(teacher, dspy.Module) else list(teacher or ())
    prompts = [ZERO_SHOT]
    for number, teaching in enumerate(teachers, start=1):
        prompts.append(teacher_prompt(number, student, teaching))
    program = stock.copy_program_with_lms(student)
    originals = with_weights(program)
    adapter = current_adapter()
    budget = CallBudget(settings.max_lm_calls)
    trained = trained_lms(program)
    for policy in map(policy_of, trained.values()):
        if isinstance(policy, LocalPolicy):
            policy.model.check_trainable()
    policies: dict[str, Policy] = {}
    for name, predictor in program.named_predictors():
        policies[name] = counted_policy(predictor.lm, budget)
    policies.update(pick_actors(program))
    reward = step_reward(settings.reward, examples)
    final = _final_reward(settings.metric, examples)
    retriever, rm = _retrieval(program)
    identity = _identity(settings, program, policies, adapter, examples, prompts)
    job = CompileJob(
        settings=settings,
        program=program,
        originals=originals,
        adapter=adapter,
        examples=examples,
        valset=list(valset or ()),
        prompts=prompts,
        budget=budget,
        trained=trained,
        policies=policies,
        reward=reward,
        final=final,
        retriever=retriever,
        rm=rm,
        run=begin_run(settings.run_dir, identity),
    )
    n_duplicates = len(trainset) - len(examples)
    if n_duplicates:
        job.log("trainset", f"{n_duplicates} duplicate examples are ignored")
    return job


def _retrieval(program: dspy.Module) -> tuple[Retriever | None, Any]:
    """Return ``dspy.settings.rm`` as leret's retriever or as another one; None for both without."""
    rm = dspy.settings.rm
    searches = [search for _, search in program.named_sub_modules(Search)]
    has_retriever = any(search.retriever is not None for search in searches)
    if isinstance(rm, Retriever) and not has_retriever:
        return rm, None
    if callable(rm):
        return None, search_tool(rm, name="rm")
    return None, None


def _final_reward(
    metric: Callable[..., Any] | None, examples: Mapping[Task, dspy.Example]
) -> Reward | None:
    if metric is None:
        return None

    def final(outcome: Outcome) -> float:
        return float(metric(examples[outcome.task], outcome.prediction))

    return final


def _identity(
    settings: CompileSettings,
    program: dspy.Module,
    policies: Mapping[str, Policy],
    adapter: dspy.Adapter,
    examples: Mapping[Task, dspy.Example],
    prompts: Sequence[Prompt],
) -> dict[str, Any]:
    """Return the values that identify the run.

    They are settings, data, and the student's code, prompts and weights.
    """
    identity: dict[str, Any] = {
        "dspy": installed_version("dspy"),
        "student": student_digest(program, policies),
    }
    for name in _IDENTIFYING:
        identity[name] = getattr(settings, name)
    record = to_jsonable_python(vars(adapter), fallback=source_of)
    digests: dict[str, Any] = {
        "trainset": [[task.id, list(task.gold)] for task in examples],
        "teacher": [prompt.digest for prompt in prompts],
        "adapter": [type(adapter).__qualname__, record],
    }
    functions = {"reward": settings.reward, "metric": settings.metric}
    for name, function in functions.items():
        identity[name] = function
        if callable(function):
            identity[name] = name_of(function)
            digests[name] = source_of(function)
    identity["algorithms"] = list(settings.algorithms)
    identity["digest"] = {name: digest(value) for name, value in digests.items()}
    return identity


def in_thread(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
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
