"""Actors that answer a program's LM calls, and the roles of its predictors in sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from leret.config.sampling import SamplingSettings
from leret.core.types import LMCall, Task, seed_of
from leret.policies.base import Messages, Policy, Request
from leret.programs.needs import NeedsCompletion, Step
from leret.programs.prompts import ZERO_SHOT, Formatter, Prompt
from leret.programs.runner import ProgramRunner
from leret.rewards import Scoring, scoring
from leret.rollouts.hints import Hints


class Actor(Protocol):
    """Answers the LM calls of a program with a policy or a rule."""

    async def act(
        self, task: Task, need: NeedsCompletion, step: int, index: int
    ) -> tuple[LMCall, Step]: ...


@dataclass(frozen=True)
class Decoding:
    """Decoding settings; temperature 0 is greedy.

    ``limits`` overrides ``max_tokens`` per predictor.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)

    def request(self, need: NeedsCompletion, messages: Messages, *parts: Any) -> Request:
        """Return a request for one completion, with a seed derived from ``seed`` and ``parts``."""
        seed = seed_of(self.seed, *parts)
        max_tokens = self.limits.get(need.predictor, self.max_tokens)
        return Request(
            messages,
            (seed,),
            self.temperature,
            max_tokens,
            self.top_p,
            need.stop,
            need.choice,
            need.predictor,
        )


@dataclass(frozen=True)
class PolicyActor:
    """Answers with a policy and one prompt.

    Each completion's seed depends on seed, task, step, prompt and index.
    """

    policy: Policy
    formatter: Formatter
    decoding: Decoding
    prompt: Prompt = ZERO_SHOT

    async def act(
        self, task: Task, need: NeedsCompletion, step: int, index: int
    ) -> tuple[LMCall, Step]:
        messages = self.formatter.messages(need, self.prompt)
        request = self.decoding.request(need, messages, task.id, step, self.prompt.digest, index)
        [completion] = await self.policy.complete(request)
        answer = self.formatter.step(need, completion.text)
        outputs = None if isinstance(answer.outputs, Exception) else (answer.outputs or [{}])[0]
        value = completion.value
        call = LMCall(
            need.predictor,
            need.inputs,
            messages if value is None else (),
            completion.text,
            outputs,
            value,
            completion.n_prompt_tokens + completion.n_completion_tokens,
        )
        return call, answer


@dataclass(frozen=True)
class Role:
    """The policy for a predictor, the credit of its completions, and its sampling keys.

    Keys that are None are those of the plan.

    Attributes:
        sampled: if False, one zero-shot completion continues the path, and is not trained on.
            Predictors created inside ``forward`` are never sampled.
        credit: ``step``: reward of the documents retrieved by the end of the step. ``final``: final
            reward after running the program to its end from each sample. ``both``: weighted mean of
            the step and final reward. ``auto``: ``step`` if a search follows the predictor
            (``both`` if the predictor also decides when the program stops), else ``final``; without
            a final reward, no samples.
    """

    policy: Policy
    sampled: bool = True
    credit: Literal["auto", "step", "final", "both"] = "auto"
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    n_samples: int | None = None


@dataclass(frozen=True)
class SamplingPlan:
    """Settings for sampling states and rewarding the samples.

    ``n_samples`` is the number of completions per state and prompt.

    Attributes:
        final: final reward, which scores an outcome with the program's ``prediction``; it is called
            in a thread.
        n_continuations: runs to the end from each sample, unless the credit is ``step``; their
            rewards are averaged.
        final_weight: weight of the final reward for credit ``both``, 0 to 1.
        searched: for each predictor reached so far, whether a search follows it; None before the
            first tasks have run.
        token_ids: keep the token ids and log-probabilities of sampled texts.
        stops: predictors and picks that decide when the program stops.
        hints: writes the hints of prompts that show one.
    """

    prompts: tuple[Prompt, ...]
    n_samples: int
    seed: int
    temperature: float
    top_p: float
    max_tokens: int
    role: Callable[[NeedsCompletion], Role]
    reward: Scoring = field(default_factory=lambda: scoring("ap"))
    final: Scoring | None = None
    n_continuations: int = 1
    final_weight: float = 0.5
    searched: Mapping[str, bool] | None = None
    token_ids: bool = False
    stops: frozenset[str] = frozenset()
    hints: Hints | None = None

    @classmethod
    def of(
        cls, settings: SamplingSettings, role: Callable[[NeedsCompletion], Role], **values: Any
    ) -> SamplingPlan:
        """Return the plan with the rewards and credit of a recipe; ``values`` are other fields."""
        end = settings.end_reward
        return cls(
            role=role,
            reward=scoring(settings.reward),
            final=None if end is None else scoring(end, "final"),
            n_continuations=settings.n_continuations,
            final_weight=settings.final_weight,
            **values,
        )

    def role_of(self, need: NeedsCompletion) -> Role:
        """Return the role with ``auto`` credit resolved.

        If no run reached the predictor, ``final``, else ``step``.
        """
        role = self.role(need)
        if need.predictor.startswith("("):
            return replace(role, sampled=False)
        if not role.sampled or role.credit != "auto":
            return role
        searched = self.searched or {}
        if not searched.get(need.predictor, self.final is None):
            return replace(role, credit="final", sampled=self.final is not None)
        if need.predictor in self.stops:
            return replace(role, credit="both")
        return replace(role, credit="step")

    def roles(self, runner: ProgramRunner) -> dict[str, Role]:
        return {name: self.role_of(runner.formatter.need(name, {})) for name in runner.replay.names}

    def decoding_of(self, role: Role) -> tuple[float, float, int]:
        """Return a role's temperature, top-p and max_tokens; the plan's where the role has None."""
        temperature = self.temperature if role.temperature is None else role.temperature
        top_p = self.top_p if role.top_p is None else role.top_p
        max_tokens = self.max_tokens if role.max_tokens is None else role.max_tokens
        return temperature, top_p, max_tokens
