"""Trying several prompts and samples at one state, and scoring what each of them leads to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import to_jsonable_python

from leret.core.errors import ConfigError, PolicyError, ProgramError, RetrievalError
from leret.core.types import Outcome, Sample, State, Task, digest
from leret.core.usage import UsageByPrompt
from leret.policies.base import Messages, Policy, Request
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.replay import Finished, NeedsCompletion, SearchResults, Step
from leret.programs.runner import ProgramRunner
from leret.rewards import Reward, reward
from leret.sampling.rollouts.rollout import failure_of, unparsed
from leret.sampling.store.schema import SamplingParams, is_final, storable
from leret.sampling.store.store import Store

_REPORTED = ("recall", "ap")
"""Stored beside the reward."""

_encode = json.JSONEncoder(sort_keys=True).encode  # json.dumps would build an encoder at every call


@dataclass(frozen=True)
class SamplingPlan:
    """What is tried at every state: ``n_samples`` completions a prompt."""

    prompts: tuple[Prompt, ...]
    n_samples: int
    seed: int
    temperature: float
    top_p: float
    max_tokens: int
    reward: str = "ap"


@dataclass(slots=True)
class BranchPoint:
    """Where a task stands on its path, and what the samples there lead to.

    Attributes:
        need: the step that the program stands at, or its end.
        steps: of the path before.
        results: what this path has retrieved; scoring adds to it.
        parent: the sample that led here.
        fresh: the store held nothing of the task when the session began, so it need not be asked.
        check: run every path several times, and refuse a program that comes to another place.
        reached: steps, and where they lead, by their outputs as JSON.
    """

    task: Task
    need: NeedsCompletion | Finished
    steps: tuple[Step, ...] = ()
    results: SearchResults = field(default_factory=dict)
    parent: str | None = None
    fresh: bool = False
    check: bool = False
    reached: dict[str, tuple[Step, asyncio.Future[NeedsCompletion | Finished]]] = field(default_factory=dict)


class StateSampler:
    """Makes the samples of a state, each of them once in the life of a run."""

    def __init__(
        self,
        runner: ProgramRunner,
        policy: Policy,
        store: Store,
        plan: SamplingPlan,
        usage: UsageByPrompt | None = None,
    ) -> None:
        self.usage = usage or UsageByPrompt()
        self._runner = runner
        self._policy = policy
        self._store = store
        self._plan = plan
        self._policy_digest = policy.digest
        self._rewards: dict[str, Reward] = {name: reward(name) for name in dict.fromkeys((plan.reward, *_REPORTED))}
        settings = plan.temperature, plan.top_p, plan.max_tokens
        self._params = [
            SamplingParams(policy.name, self._policy_digest, prompt.digest, *settings) for prompt in plan.prompts
        ]

    async def sample_state(self, point: BranchPoint, state: State) -> list[Sample]:
        """All samples of a state, in the order of prompt and index: stored ones, and new ones, which are stored."""
        stored: dict[str, Sample] = {}
        if not point.fresh:
            found = self._store.samples_at(state.question_id, state.step, state.id, self._policy_digest)
            stored = {sample.id: sample for sample in found}
        pairs, draw = zip(self._plan.prompts, self._params, strict=True), state.draw
        made = await asyncio.gather(*(self._of_prompt(point, state, draw, *pair, stored) for pair in pairs))
        return [sample for samples in made for sample in samples]

    async def next_point(self, point: BranchPoint, state: State, sample: Sample) -> BranchPoint:
        """Where a sample leads to; a program that was run there already is not run again."""
        assert isinstance(point.need, NeedsCompletion)
        step, future = point.reached.get(_key(sample.outputs, sample.completion), (None, None))
        if step is None:
            step = self._runner.formatter.step(point.need, sample.completion or "")
        path = (*point.steps, step)
        advance = self._runner.advance(point.task, path, point.results, point.check) if future is None else future
        return BranchPoint(point.task, await advance, path, point.results, sample.id, point.fresh, point.check)

    async def _of_prompt(
        self,
        point: BranchPoint,
        state: State,
        draw: str,
        prompt: Prompt,
        params: SamplingParams,
        stored: Mapping[str, Sample],
    ) -> list[Sample]:
        asked = params.prompt_digest, params.temperature, params.top_p, params.max_tokens, params.policy_digest
        samples: list[Sample] = []
        for index in range(self._plan.n_samples):  # the seed and the id follow from what asks for a sample
            seed = int(digest("seed", self._plan.seed, draw, state.step, asked[0], index)[:16], 16) >> 1
            name = digest(state.id, state.step, asked[0], index, seed, *asked[1:])
            blank = Sample(name, state.id, state.question_id, state.step, prompt.name, index, seed)
            samples.append(stored.get(name, blank))
        todo = [i for i, sample in enumerate(samples) if sample.id not in stored or not is_final(sample)]
        if not todo:
            return samples
        new = [samples[i] for i in todo]
        if any(sample.completion is None for sample in new):
            new = await self._complete(point, state, prompt, new)
        new = await self._score(point, state, new)
        for i, sample in zip(todo, new, strict=True):
            samples[i] = sample
        self._store.put_samples(new, params)
        return samples

    async def _complete(
        self, point: BranchPoint, state: State, prompt: Prompt, samples: Sequence[Sample]
    ) -> list[Sample]:
        assert isinstance(point.need, NeedsCompletion)
        blank = [sample for sample in samples if sample.completion is None]
        messages: Messages = tuple([dict(message) for message in state.messages])  # the zero-shot prompt's
        if prompt.digest != ZERO_SHOT.digest:
            messages = self._runner.formatter.messages(point.need, prompt, messages[-1])
        plan, seeds = self._plan, tuple([sample.seed for sample in blank])
        began = time.monotonic()
        try:
            completions = await self._policy.complete(
                Request(messages, seeds, plan.temperature, plan.max_tokens, plan.top_p)
            )
        except PolicyError as error:
            self.usage.failed(state.step, prompt.name, len(blank))
            failure = failure_of(error)
            return [replace(sample, failure=failure) if sample.completion is None else sample for sample in samples]
        tokens = [completion.n_completion_tokens for completion in completions]
        n_prompt_tokens = completions[0].n_prompt_tokens
        self.usage.answered(state.step, prompt.name, n_prompt_tokens, tokens, time.monotonic() - began)
        completed = {
            sample.id: replace(
                sample,
                completion=text if (text := completion.text).isascii() else storable(text),
                n_prompt_tokens=completion.n_prompt_tokens,
                n_completion_tokens=completion.n_completion_tokens,
                failure=None,
            )
            for sample, completion in zip(blank, completions, strict=True)
        }
        return [completed.get(sample.id, sample) for sample in samples]

    async def _score(self, point: BranchPoint, state: State, samples: Sequence[Sample]) -> list[Sample]:
        """Samples with a reward or a failure; those without a completion stay as they are.

        All of them are searched for at once, so that they share a batch of the retriever.
        """
        formatter, need = self._runner.formatter, point.need
        assert isinstance(need, NeedsCompletion)
        parsed: list[tuple[dict[str, Any], str] | None] = []
        for sample in samples:
            if sample.completion is None:
                parsed.append(None)
                continue
            step = formatter.step(need, sample.completion)
            plain = {} if isinstance(step.outputs, Exception) or not step.outputs else step.outputs[0]
            plain = to_jsonable_python(plain, fallback=str)
            key = _key(plain, sample.completion)
            if key not in point.reached:  # equal outputs at one state lead to one place
                advance = self._runner.advance(point.task, (*point.steps, step), point.results, point.check)
                point.reached[key] = step, asyncio.ensure_future(advance)
            parsed.append((plain, key))
        scored: list[Sample] = []
        for sample, entry in zip(samples, parsed, strict=True):
            if entry is None:
                scored.append(sample)
                continue
            try:
                end = await point.reached[entry[1]][1]
            except (RetrievalError, ProgramError) as error:
                scored.append(replace(sample, outputs=entry[0], failure=failure_of(error)))
                continue
            if isinstance(end, Finished) and end.unparsed:
                failure = unparsed(formatter, state.predictor, sample.completion or "")
                scored.append(replace(sample, failure=failure))
            else:
                scored.append(self._scored(point, sample, entry[0], end))
        return scored

    def _scored(
        self, point: BranchPoint, sample: Sample, outputs: Mapping[str, Any], end: NeedsCompletion | Finished
    ) -> Sample:
        prediction = end.prediction if isinstance(end, Finished) else None
        n_steps = len(point.steps) + 1
        outcome = Outcome(point.task, sample.completion or "", outputs, end.ranking, prediction, n_steps)
        values = {name: value(outcome) for name, value in self._rewards.items()}
        if values[self._plan.reward] is None:
            raise ConfigError(f"sampling.reward: {self._plan.reward} has no value for question {point.task.id}")
        return replace(
            sample,
            outputs=outputs,
            doc_ids=tuple([passage.doc_id for passage in end.ranking]),
            scores=tuple([passage.score for passage in end.ranking]),
            reward=values[self._plan.reward],
            components={name: value for name, value in values.items() if value is not None},
            failure=None,
        )


def _key(outputs: Mapping[str, Any], completion: str | None) -> str:
    return _encode(outputs) if outputs else f"unparsed {completion}"
