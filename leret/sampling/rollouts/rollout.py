"""Running a program once on each of many questions: one prompt, one completion a step, no branching.

Evaluation and the demo's baselines go this way; sampling tries several completions at a step (`branching`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leret.core.aio import for_each
from leret.core.errors import PolicyError, ProgramError, RetrievalError
from leret.core.types import Failure, Hop, Rollout, Task, digest
from leret.policies.base import Policy, PromptTooLongError, Request
from leret.programs.prompts import ZERO_SHOT, Formatter, Prompt
from leret.programs.replay import NeedsCompletion, Replay
from leret.programs.runner import MAX_STEPS, Known, ProgramRunner
from leret.retrieval.batching import SearchBatcher


class RolloutRunner:
    """Runs one program with one policy.

    Args:
        replay: the program.
        formatter: of the same program.
        policy: writes the completions.
        front: the retriever; one event loop at a time.
        max_tokens: completion tokens at most.
        temperature: 0 is greedy.
        top_p: of sampling.
        seed: with the question, the step, the prompt and ``sample`` it makes the seed of every completion.
    """

    def __init__(
        self,
        replay: Replay,
        formatter: Formatter,
        policy: Policy,
        front: SearchBatcher,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._stepper = ProgramRunner(replay, formatter, front)
        self._policy = policy
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._top_p = top_p
        self._seed = seed

    async def run(
        self,
        questions: Sequence[Task],
        prompt: Prompt = ZERO_SHOT,
        *,
        sample: int = 0,
        concurrency: int = 128,
        on_done: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """One rollout a question, in the order of the questions.

        Args:
            questions: any.
            prompt: of the bank.
            sample: tells repeated runs apart where the temperature is above 0.
            concurrency: questions in flight.
            on_done: called with every rollout as it ends.
        """
        rollouts: list[Rollout | None] = [None] * len(questions)

        async def one(index: int) -> None:
            rollout = await self.run_one(questions[index], prompt, sample)
            rollouts[index] = rollout
            if on_done is not None:
                on_done(rollout)

        await for_each(range(len(questions)), one, min(concurrency, max(1, len(questions))))
        return [rollout for rollout in rollouts if rollout is not None]

    async def run_one(self, question: Task, prompt: Prompt = ZERO_SHOT, sample: int = 0) -> Rollout:
        """Run one question; what fails is in the rollout."""
        hops: list[Hop] = []
        outputs: list[Mapping[str, Any]] = []
        known: Known = {}

        def ended(failure: Failure | None, prediction: Any = None) -> Rollout:
            return Rollout(question.id, tuple(hops), failure is None, failure, prediction, sample)

        try:
            need = await self._stepper.advance(question, outputs, known)
            while isinstance(need, NeedsCompletion):
                if len(outputs) == MAX_STEPS:
                    return ended(Failure("program", f"the program asks for more than {MAX_STEPS} completions"))
                hop = await self._complete(question, need, len(outputs), prompt, sample)
                hops.append(hop)
                if hop.outputs is None:
                    return ended(unparsed(self._stepper.formatter, hop.predictor, hop.completion or ""))
                outputs.append(hop.outputs)
                need = await self._stepper.advance(question, outputs, known)
                hops[-1] = replace(hop, ranking=need.ranking)
        except (PolicyError, RetrievalError, ProgramError) as error:
            return ended(failure_of(error))
        return ended(None, need.prediction)

    async def _complete(self, question: Task, need: NeedsCompletion, step: int, prompt: Prompt, sample: int) -> Hop:
        formatter = self._stepper.formatter
        messages = formatter.messages(need.predictor, need.inputs, prompt)
        seed = seed_of(self._seed, question.id, step, prompt.digest, sample)
        request = Request(messages, (seed,), self._temperature, self._max_tokens, self._top_p)
        completion = (await self._policy.complete(request))[0]
        return Hop(
            predictor=need.predictor,
            inputs=need.inputs,
            messages=messages,
            completion=completion.text,
            outputs=formatter.parse(need.predictor, completion.text),
            ranking=need.ranking,
            n_prompt_tokens=completion.n_prompt_tokens,
            n_completion_tokens=completion.n_completion_tokens,
        )


def failure_of(error: PolicyError | RetrievalError | ProgramError) -> Failure:
    """The record of an outage, of a crash, or of a prompt that does not fit the model."""
    match error:
        case PromptTooLongError():
            return Failure("prompt", str(error))
        case PolicyError():
            return Failure("policy", str(error))
        case RetrievalError():
            return Failure("retrieval", str(error))
        case _:
            return Failure("program", str(error))


def unparsed(formatter: Formatter, predictor: str, completion: str) -> Failure:
    """The record of a completion that is not in the adapter's format, with an example of it."""
    example = formatter.completion(
        predictor, {name: f"<{name}>" for name in formatter.signature(predictor).output_fields}
    )
    reads = f"{type(formatter.adapter).__name__} reads {example!r}"
    return Failure("parse", f"{completion[:200]!r} is not in the adapter's format; {reads}")


def seed_of(*parts: Any) -> int:
    """A 63-bit seed from JSON values, the same on every machine."""
    return int(digest("seed", *parts)[:16], 16) >> 1
