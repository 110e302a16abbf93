"""Trying several prompts and samples at one state, and scoring what each of them finds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import to_jsonable_python

from leret.core.errors import PolicyError, ProgramError, RetrievalError
from leret.core.types import Failure, Outcome, Ranking, Sample, State, Task, digest
from leret.core.usage import UsageByPrompt
from leret.policies.base import Policy, Request
from leret.programs.prompts import Prompt
from leret.programs.runner import Known, ProgramRunner
from leret.rewards import Reward, reward
from leret.sampling.rollouts.rollout import failure_of, seed_of, unparsed
from leret.sampling.store.schema import SamplingParams, is_final, storable
from leret.sampling.store.store import Store

_REPORTED = ("recall", "ap")
"""Measures kept beside the reward."""

_sorted_json = json.JSONEncoder(sort_keys=True).encode  # json.dumps would build an encoder at every call
_Found = dict[str, "asyncio.Future[Ranking | Failure]"]
"""What outputs retrieve at one state, by the outputs."""


@dataclass(frozen=True)
class SamplingPlan:
    """What is tried at every state.

    Args:
        prompts: of the bank.
        n_samples: completions a prompt.
        seed: of the run.
        reward: name of the measure of the accumulated ranking.
    """

    prompts: tuple[Prompt, ...]
    n_samples: int
    seed: int
    temperature: float
    top_p: float
    max_tokens: int
    reward: str = "ap"


@dataclass(frozen=True)
class Here:
    """Where a question stands.

    Attributes:
        outputs: of the steps before.
        known: what this path has retrieved; scoring adds to it.
        fresh: the store held nothing of the question when the session began, so it need not be asked.
    """

    question: Task
    state: State
    outputs: Sequence[Mapping[str, Any]]
    known: Known
    fresh: bool = False


class StateSampler:
    """Makes the samples of a state, each of them once in the life of a run.

    Args:
        stepper: the program.
        policy: completes.
        store: what it holds is not asked again; what is new is put there.
        branch: what to try.
        ledger: takes note of every request; None takes a new one.
    """

    def __init__(
        self,
        stepper: ProgramRunner,
        policy: Policy,
        store: Store,
        branch: SamplingPlan,
        ledger: UsageByPrompt | None = None,
    ) -> None:
        self.ledger = ledger or UsageByPrompt()
        self._stepper = stepper
        self._policy = policy
        self._store = store
        self._branch = branch
        self._policy_digest = policy.digest
        names = dict.fromkeys((branch.reward, *_REPORTED))
        self._rewards: dict[str, Reward] = {name: reward(name) for name in names}
        self._origins = [
            SamplingParams(
                policy.name, self._policy_digest, prompt.digest, branch.temperature, branch.top_p, branch.max_tokens
            )
            for prompt in branch.prompts
        ]

    async def samples(self, here: Here) -> list[Sample]:
        """All samples of a state, in the order of prompt and index: stored ones, and new ones, which are stored."""
        state = here.state
        by_id: dict[str, Sample] = {}
        if not here.fresh:
            stored = self._store.samples_at(state.question_id, state.step, state.id, self._policy_digest)
            by_id = {sample.id: sample for sample in stored}
        found: _Found = {}
        made = await asyncio.gather(
            *(self._of_prompt(here, place, by_id, found) for place in range(len(self._branch.prompts)))
        )
        return [sample for group in made for sample in group]

    async def _of_prompt(self, here: Here, place: int, stored: Mapping[str, Sample], found: _Found) -> list[Sample]:
        wanted = [self._wanted(here.state, place, index) for index in range(self._branch.n_samples)]
        samples = [stored.get(sample.id, sample) for sample in wanted]
        todo = [i for i, sample in enumerate(samples) if sample is wanted[i] or not is_final(sample)]
        if not todo:
            return samples
        blank = [i for i in todo if samples[i].completion is None]
        if blank:
            completed = await self._complete(here.state, place, [wanted[i] for i in blank])
            for i, sample in zip(blank, completed, strict=True):
                samples[i] = sample
        scored = await self._score(here, [samples[i] for i in todo], found)
        for i, sample in zip(todo, scored, strict=True):
            samples[i] = sample
        self._store.put_samples(scored, self._origins[place])
        return samples

    def _wanted(self, state: State, place: int, index: int) -> Sample:
        """A sample that is not made yet: its id and its seed follow from what asks for it."""
        branch, origin = self._branch, self._origins[place]
        seed = seed_of(branch.seed, state.id, state.step, origin.prompt_digest, index)
        name = digest(
            state.id, state.step, origin.prompt_digest, index, seed,
            origin.temperature, origin.top_p, origin.max_tokens, origin.policy_digest,
        )  # fmt: skip
        return Sample(name, state.id, state.question_id, state.step, branch.prompts[place].name, index, seed)

    async def _complete(self, state: State, place: int, blank: Sequence[Sample]) -> list[Sample]:
        branch = self._branch
        prompt = branch.prompts[place]
        request = Request(
            self._stepper.formatter.messages(state.predictor, state.inputs, prompt, state.messages[-1]),
            tuple(sample.seed for sample in blank),
            branch.temperature,
            branch.max_tokens,
            branch.top_p,
        )
        began = time.monotonic()
        try:
            completions = await self._policy.complete(request)
        except PolicyError as error:
            self.ledger.failed(state.step, prompt.name, len(blank))
            return [replace(sample, failure=failure_of(error)) for sample in blank]
        tokens = [completion.n_completion_tokens for completion in completions]
        seconds = time.monotonic() - began
        self.ledger.answered(state.step, prompt.name, completions[0].n_prompt_tokens, tokens, seconds)
        return [
            replace(
                sample,
                completion=storable(completion.text),
                n_prompt_tokens=completion.n_prompt_tokens,
                n_completion_tokens=completion.n_completion_tokens,
            )
            for sample, completion in zip(blank, completions, strict=True)
        ]

    async def _score(self, here: Here, samples: Sequence[Sample], found: _Found) -> list[Sample]:
        """Samples with a reward or a failure; those without a completion stay as they are.

        All of them are searched for at once, so that they are in one batch of the retriever's.
        """
        parsed: list[tuple[dict[str, Any], asyncio.Future[Ranking | Failure]] | None] = []
        for sample in samples:
            outputs = None
            if sample.completion is not None:
                outputs = self._stepper.formatter.parse(here.state.predictor, sample.completion)
            parsed.append(None if outputs is None else self._asked(here, outputs, found))
        await asyncio.gather(*(entry[1] for entry in parsed if entry is not None))
        results = [None if entry is None else (entry[0], entry[1].result()) for entry in parsed]
        return [self._judged(here, sample, result) for sample, result in zip(samples, results, strict=True)]

    def _asked(
        self, here: Here, outputs: Mapping[str, Any], found: _Found
    ) -> tuple[dict[str, Any], asyncio.Future[Ranking | Failure]]:
        """The outputs as plain values, and what they will retrieve: equal outputs at one state ask once."""
        plain = to_jsonable_python(outputs, fallback=str)
        key = _sorted_json(plain)
        if key not in found:
            found[key] = asyncio.ensure_future(self._ranking(here, outputs))
        return plain, found[key]

    def _judged(self, here: Here, sample: Sample, result: tuple[dict[str, Any], Ranking | Failure] | None) -> Sample:
        if sample.completion is None:
            return sample
        if result is None:
            formatter = self._stepper.formatter
            return replace(sample, failure=unparsed(formatter, here.state.predictor, sample.completion))
        plain, ranking = result
        if isinstance(ranking, Failure):
            return replace(sample, outputs=plain, failure=ranking)
        outcome = Outcome(here.question, sample.completion, plain, ranking, n_steps=here.state.step + 1)
        values = {name: value(outcome) for name, value in self._rewards.items()}
        return replace(
            sample,
            outputs=plain,
            doc_ids=tuple([passage.doc_id for passage in ranking]),
            scores=tuple([passage.score for passage in ranking]),
            reward=values[self._branch.reward],
            components={name: value for name, value in values.items() if value is not None},
            failure=None,
        )

    async def _ranking(self, here: Here, outputs: Mapping[str, Any]) -> Ranking | Failure:
        try:
            return (await self._stepper.advance(here.question, [*here.outputs, outputs], here.known)).ranking
        except (RetrievalError, ProgramError) as error:
            return failure_of(error)
