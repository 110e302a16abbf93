"""Running a program once on each of many tasks: one completion a step, no branching.

Evaluation and the bank's zero-shot runs go this way; sampling tries several completions at a step (`states`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from leret.core.aio import for_each
from leret.core.errors import LeretError, PolicyError, ProgramError, RetrievalError
from leret.core.types import Failure, Hop, LMCall, Ranking, Rollout, Task, digest, merge
from leret.policies.base import Messages, Policy, PromptTooLongError, Request
from leret.programs.needs import Finished, NeedsCompletion, Step
from leret.programs.prompts import ZERO_SHOT, Formatter, Prompt
from leret.programs.replay import SearchResults
from leret.programs.runner import ProgramRunner
from leret.programs.search import SearchCall

BOUNDARIES: Mapping[str, type[LeretError]] = {
    "policy": PolicyError, "retrieval": RetrievalError, "program": ProgramError,
}  # fmt: skip
"""What is raised for a kind of failure."""


class Actor(Protocol):
    """Answers the steps of a program: a policy, or a rule."""

    async def act(self, task: Task, need: NeedsCompletion, step: int, index: int) -> tuple[LMCall, Step]:
        """What the program goes on with, and the record of it."""
        ...


@dataclass(frozen=True)
class Decoding:
    """How completions are asked for; greedily at temperature 0. ``limits`` are ``max_tokens`` of single predictors."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)

    def request(self, need: NeedsCompletion, messages: Messages, *parts: Any) -> Request:
        """For one completion, whose seed follows from the parts."""
        seeds, max_tokens = (seed_of(self.seed, *parts),), self.limits.get(need.predictor, self.max_tokens)
        return Request(messages, seeds, self.temperature, max_tokens, self.top_p, (), need.choice, need.predictor)


@dataclass(frozen=True)
class PolicyActor:
    """Answers by a policy under one prompt; seed, task, step, prompt and index make the seed of every completion."""

    policy: Policy
    formatter: Formatter
    decoding: Decoding
    prompt: Prompt = ZERO_SHOT

    async def act(self, task: Task, need: NeedsCompletion, step: int, index: int) -> tuple[LMCall, Step]:
        """One completion, parsed."""
        messages = self.formatter.messages(need, self.prompt)
        request = self.decoding.request(need, messages, task.id, step, self.prompt.digest, index)
        [completion] = await self.policy.complete(request)
        made, value = self.formatter.step(need, completion.text), completion.value
        outputs = None if isinstance(made.outputs, Exception) else (made.outputs or [{}])[0]
        sent = messages if value is None else ()
        return LMCall(need.predictor, need.inputs, sent, completion.text, outputs, value), made


@dataclass(frozen=True)
class RolloutRunner:
    """Runs one program with one actor."""

    runner: ProgramRunner
    actor: Actor

    async def run(
        self,
        tasks: Sequence[Task],
        *,
        index: int = 0,
        concurrency: int = 128,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
    ) -> list[Rollout]:
        """One rollout a task, in their order; ``index`` tells repeated runs apart where the temperature is above 0."""
        rollouts: dict[int, Rollout] = {}

        async def one(place: int) -> None:
            rollouts[place] = await self.run_one(tasks[place], index)
            on_done(rollouts[place])

        await for_each(range(len(tasks)), one, min(concurrency, max(1, len(tasks))))
        return [rollouts[place] for place in range(len(tasks))]

    async def run_one(self, task: Task, index: int = 0) -> Rollout:
        """Run one task; what fails is in the rollout."""
        calls: list[LMCall] = []
        steps: list[Step] = []
        results: SearchResults = {}
        need: NeedsCompletion | Finished | None = None
        failure: Failure | None = None
        prediction: Any = None
        try:
            need = await self.runner.advance(task, steps, results)
            while isinstance(need, NeedsCompletion):
                call, step = await self.actor.act(task, need, len(steps), index)
                calls.append(call)
                steps.append(step)
                need = await self.runner.advance(task, steps, results)
            if need.unparsed:
                failure = unparsed(self.runner.formatter, calls[-1].predictor, calls[-1].completion or "")
            else:
                prediction = need.prediction
        except (PolicyError, RetrievalError, ProgramError) as error:
            failure = failure_of(error)
        hops = _hops(need.searches) if need else ()
        return Rollout(task.id, hops, failure is None, failure, prediction, index, tuple(calls))


def _hops(searches: Sequence[SearchCall]) -> tuple[Hop, ...]:
    found: list[Ranking] = []
    hops = []
    for search in searches:
        found += search.added
        hops.append(Hop(search.queries, merge(found), search.n_steps))
    return tuple(hops)


def failure_of(error: PolicyError | RetrievalError | ProgramError) -> Failure:
    """The record of an outage, of a crash, or of a prompt that does not fit the model."""
    kind = next(kind for kind, boundary in BOUNDARIES.items() if isinstance(error, boundary))
    return Failure("prompt" if isinstance(error, PromptTooLongError) else kind, str(error))


def unparsed(formatter: Formatter, predictor: str, completion: str) -> Failure:
    """The record of a completion that is not in the adapter's format, with an example of it."""
    reads = ""
    if predictor in formatter.picks:
        return Failure("parse", f"{completion[:200]!r} is not the id of a candidate of {predictor}")
    if not predictor.startswith("("):
        fields = {name: f"<{name}>" for name in formatter.signature(predictor).output_fields}
        reads = f"; {type(formatter.adapter).__name__} reads {formatter.completion(predictor, fields)!r}"
    return Failure("parse", f"{completion[:200]!r} is not in the adapter's format{reads}")


def seed_of(*parts: Any) -> int:
    """A 63-bit seed from JSON values, the same on every machine."""
    return int(digest("seed", *parts)[:16], 16) >> 1
