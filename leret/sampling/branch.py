"""Trying several prompts and samples at one state, and scoring what each of them finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import to_jsonable_python

from leret.errors import PolicyError, ProgramError, RetrievalError
from leret.pipelines.prompts import Prompt
from leret.policies.base import Policy, Request
from leret.rewards import Measure, measure
from leret.sampling.records import Origin, is_final, storable
from leret.sampling.rollout import failure_of, seed_of
from leret.sampling.steps import Known, Stepper
from leret.sampling.store import Store
from leret.types import Failure, Question, Ranking, Sample, State, digest

__all__ = ["Branch", "Brancher", "Here"]

_REPORTED = ("recall", "ap")
"""Measures kept beside the reward."""


@dataclass(frozen=True)
class Branch:
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
    """

    question: Question
    state: State
    outputs: Sequence[Mapping[str, Any]]
    known: Known


class Brancher:
    """Makes the samples of a state, each of them once in the life of a run.

    Args:
        stepper: the program.
        policy: completes.
        store: what it holds is not asked again; what is new is put there.
        branch: what to try.
    """

    def __init__(self, stepper: Stepper, policy: Policy, store: Store, branch: Branch) -> None:
        self._stepper = stepper
        self._policy = policy
        self._store = store
        self._branch = branch
        self._policy_digest = policy.digest
        self._measures: dict[str, Measure] = {
            name: measure(name) for name in dict.fromkeys((branch.reward, *_REPORTED))
        }
        self._origins = [
            Origin(policy.name, self._policy_digest, prompt.digest, branch.temperature, branch.top_p, branch.max_tokens)
            for prompt in branch.prompts
        ]

    async def samples(self, here: Here) -> list[Sample]:
        """All samples of a state, in the order of prompt and index: stored ones, and new ones, which are stored."""
        state = here.state
        stored = self._store.samples_at(state.question_id, state.step, state.id, self._policy_digest)
        by_id = {sample.id: sample for sample in stored}
        scored: dict[str, Ranking | Failure] = {}
        made = await asyncio.gather(
            *(self._of_prompt(here, place, by_id, scored) for place in range(len(self._branch.prompts)))
        )
        return [sample for group in made for sample in group]

    async def _of_prompt(
        self, here: Here, place: int, stored: Mapping[str, Sample], scored: dict[str, Ranking | Failure]
    ) -> list[Sample]:
        wanted = [self._wanted(here.state, place, index) for index in range(self._branch.n_samples)]
        samples = [stored.get(sample.id, sample) for sample in wanted]
        todo = [i for i, sample in enumerate(samples) if sample is wanted[i] or not is_final(sample)]
        if not todo:
            return samples
        blank = [i for i in todo if samples[i].completion is None]
        completed = await self._complete(here.state, place, [wanted[i] for i in blank])
        for i, sample in zip(blank, completed, strict=True):
            samples[i] = sample
        for i in todo:
            if samples[i].completion is not None:
                samples[i] = await self._score(here, samples[i], scored)
        self._store.put_samples([samples[i] for i in todo], self._origins[place])
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
        if not blank:
            return []
        branch = self._branch
        request = Request(
            self._stepper.formatter.messages(state.predictor, state.inputs, branch.prompts[place]),
            tuple(sample.seed for sample in blank),
            branch.temperature,
            branch.max_tokens,
            branch.top_p,
        )
        try:
            completions = await self._policy.complete(request)
        except PolicyError as error:
            return [replace(sample, failure=failure_of(error)) for sample in blank]
        return [
            replace(
                sample,
                completion=storable(completion.text),
                n_prompt_tokens=completion.n_prompt_tokens,
                n_completion_tokens=completion.n_completion_tokens,
            )
            for sample, completion in zip(blank, completions, strict=True)
        ]

    async def _score(self, here: Here, sample: Sample, scored: dict[str, Ranking | Failure]) -> Sample:
        outputs = self._stepper.formatter.parse(here.state.predictor, sample.completion or "")
        if outputs is None:
            return replace(sample, failure=Failure("parse", "the completion is not in the adapter's format"))
        plain = to_jsonable_python(outputs, fallback=str)
        key = json.dumps(plain, sort_keys=True)
        result = scored.get(key)
        if result is None:
            result = scored[key] = await self._ranking(here, outputs)
        if isinstance(result, Failure):
            return replace(sample, outputs=plain, failure=result)
        doc_ids = tuple(passage.doc_id for passage in result)
        values = {name: value(doc_ids, here.question.gold) for name, value in self._measures.items()}
        return replace(
            sample,
            outputs=plain,
            doc_ids=doc_ids,
            scores=tuple(passage.score for passage in result),
            reward=values[self._branch.reward],
            components=values,
            failure=None,
        )

    async def _ranking(self, here: Here, outputs: Mapping[str, Any]) -> Ranking | Failure:
        try:
            return (await self._stepper.go(here.question, [*here.outputs, outputs], here.known)).ranking
        except (RetrievalError, ProgramError) as error:
            return failure_of(error)
