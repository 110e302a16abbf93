"""Trying several prompts and samples at one state, and scoring what each of them leads to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from leret.core.aio import gathered, started
from leret.core.errors import ConfigError, PolicyError, ProgramError, RetrievalError
from leret.core.types import Failure, Outcome, Sample, State, Task, digest, json_encoder
from leret.http.usage import UsageByPrompt
from leret.policies.base import Completion, Messages, Policy, Request
from leret.programs.needs import Finished, NeedsChoice, NeedsCompletion, Step
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.replay import SearchResults
from leret.programs.runner import ProgramRunner
from leret.rewards import Scoring, scoring, values_of
from leret.sampling.rollouts.credit import REPORTED, Crediting
from leret.sampling.rollouts.rollout import failure_of, seed_of, unparsed
from leret.sampling.store.schema import SamplingParams, is_final, storable
from leret.sampling.store.store import Store

_encode = json_encoder(sort_keys=True)


@dataclass(frozen=True)
class Role:
    """Who answers a predictor, and what its completions are scored by.

    Attributes:
        sampled: if not, one completion under the zero-shot prompt goes on, and nothing is learnt from it. So it is
            with all predictors that a program makes inside ``forward``.
        credit: ``step``: the reward of what was retrieved by the end of the step; ``final``: the final reward of the
            program, which is run to its end from each sample; ``both``: their weighted mean; ``auto``: ``step`` where
            a search follows the predictor, else ``final``, or not sampled where there is no final reward.
        temperature: of its completions; None takes the plan's. So with ``max_tokens`` and ``top_p``.
    """

    policy: Policy
    sampled: bool = True
    credit: Literal["auto", "step", "final", "both"] = "auto"
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class SamplingPlan:
    """What is tried at every state, ``n_samples`` completions a prompt, and how it is scored.

    Attributes:
        role: of the predictor that a program stands at.
        reward: of a step.
        final: of the program's end, whose outcome has the ``prediction``. Called in a thread.
        n_continuations: runs to the end from each sample under credit ``final`` and ``both``; the mean counts.
        final_weight: of ``final`` under credit ``both``, 0 to 1.
        searched: whether a search follows a predictor, as far as it is known; None: not looked at yet.
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

    def role_of(self, need: NeedsCompletion) -> Role:
        """The role at a step, with its credit decided; of a predictor that no path came to, ``final`` if it can be."""
        role = self.role(need)
        if need.predictor.startswith("("):
            return replace(role, sampled=False)
        if not role.sampled or role.credit != "auto":
            return role
        if (self.searched or {}).get(need.predictor, self.final is None):
            return replace(role, credit="step")
        return replace(role, credit="final", sampled=self.final is not None)

    def roles(self, runner: ProgramRunner) -> dict[str, Role]:
        """Of all predictors of a program, by name."""
        return {name: self.role_of(runner.formatter.need(name, {})) for name in runner.replay.names}


Reached = tuple[Step, Mapping[str, Any], asyncio.Future[NeedsCompletion | Finished]]
"""A completion's step, its outputs as JSON values, and where it leads."""


@dataclass(slots=True)
class BranchPoint:
    """Where a task stands on its path, and what the samples there lead to.

    Attributes:
        need: the step that the program stands at, or its end.
        steps: of the path before.
        results: what this path has retrieved; scoring adds to it.
        parent: the sample that led here.
        fresh: the store held nothing of the task when the session began, so it need not be asked.
        check: run paths several times, and refuse a program that comes to another place.
        reached: steps, their outputs as JSON values, and where they lead, by their completions.
        finals: the components of the final reward of what they lead to, each a mean over its continuations, by their
            outputs as JSON.
    """

    task: Task
    need: NeedsCompletion | Finished
    steps: tuple[Step, ...] = ()
    results: SearchResults = field(default_factory=dict)
    parent: str | None = None
    fresh: bool = False
    check: bool = False
    reached: dict[str, Reached] = field(default_factory=dict)
    finals: dict[str, asyncio.Future[dict[str, float]]] = field(default_factory=dict)


class StateSampler:
    """Makes the samples of a state, each of them once in the life of a run; without a store, at every call.

    Attributes:
        roles: of the program's predictors; ``credits`` of those that are sampled.
        policy_digest: names the policies of all roles together; of a single one, its digest. The store keeps paths
            and samples by it, since what follows a sample depends on all of them.
    """

    def __init__(
        self, runner: ProgramRunner, store: Store | None, plan: SamplingPlan, usage: UsageByPrompt | None = None
    ) -> None:
        self.usage = usage or UsageByPrompt()
        self.roles = plan.roles(runner)
        self.credits = {role.credit for role in self.roles.values() if role.sampled}
        digests = {name: role.policy.digest for name, role in self.roles.items()}
        alone = len(set(digests.values())) == 1
        self.policy_digest = next(iter(digests.values())) if alone else digest("policies", digests)
        self._runner = runner
        self._store = store
        self._plan = plan
        self._crediting = Crediting(plan.reward, plan.final, plan.final_weight)
        self._rewards = self._crediting.functions
        if plan.final is None and self.credits - {"step"}:
            raise ConfigError("credit final and both need a final reward: name a metric, or use credit step")

    async def sample_state(self, point: BranchPoint, state: State) -> list[Sample]:
        """All samples of a state, in the order of prompt and index: stored ones, and new ones, which are stored."""
        assert isinstance(point.need, NeedsCompletion)
        role = self._plan.role_of(point.need)
        stored: dict[str, Sample] = {}
        if self._store is not None and not point.fresh:
            found = self._store.samples_at(state.task_id, state.step, state.id, self.policy_digest)
            stored = {sample.id: sample for sample in found}
        prompts, n, draw = self._plan.prompts if role.sampled else (ZERO_SHOT,), 1, state.draw
        if role.sampled:
            n = self._plan.n_samples
        if isinstance(point.need, NeedsChoice):  # no demos word it, so its group is of one prompt, and as large
            prompts, n = (ZERO_SHOT,), n * len(prompts)
        of_prompt = partial(self._of_prompt, point, state, draw, role, stored, n)
        made = await asyncio.gather(*map(of_prompt, prompts))
        samples = [sample for one in made for sample in one]
        if not self._crediting.needs_group:
            return samples
        regrouped = self._crediting.regrouped(samples)  # an outage that was tried again changes the others' rewards
        if self._store is not None:
            changed = [new for new, old in zip(regrouped, samples, strict=True) if new.reward != old.reward]
            self._store.put_rewards(changed)
        return regrouped

    async def score(self, point: BranchPoint, state: State, texts: Sequence[str]) -> list[Sample]:
        """What completions that others made come to, as the samples of a group; nothing is stored."""
        assert isinstance(point.need, NeedsCompletion)
        role, of = self._plan.role_of(point.need), (state.id, state.task_id, state.step, ZERO_SHOT.name)
        blank = [Sample(digest(state.id, i), *of, index=i, seed=i) for i in range(len(texts))]
        made = [Completion(text, "stop", 0, 0) for text in texts]
        samples = await self._score(point, state, role, blank, made)
        return self._crediting.regrouped(samples) if self._crediting.needs_group else samples

    async def next_point(self, point: BranchPoint, state: State, sample: Sample) -> BranchPoint:
        """Where a sample leads to; a program that was run there already is not run again."""
        assert isinstance(point.need, NeedsCompletion)
        step, _, end = self._reach(point, point.need, sample.completion or "", point.check)
        path = (*point.steps, step)
        return BranchPoint(point.task, await end, path, point.results, sample.id, point.fresh, point.check)

    async def run_on(self, point: BranchPoint, *seed: Any) -> AsyncIterator[BranchPoint]:
        """A point and all after it up to the program's end, by one completion a step under the zero-shot prompt.

        ``seed`` and the plan's make the completions' seeds; nothing is stored. Raises what the policies, the program
        and its searches do.
        """
        yield point
        while isinstance(need := point.need, NeedsCompletion):
            role, n_steps = self._plan.role_of(need), len(point.steps)
            seeds = (seed_of(self._plan.seed, *seed, n_steps),)
            asked = self._runner.formatter.messages(need), seeds, n_steps, "continuation"
            [completion] = await self._ask(role, need, *asked)
            path = (*point.steps, self._runner.formatter.step(need, completion.text))
            end = await self._runner.advance(point.task, path, point.results, point.check)
            point = BranchPoint(point.task, end, path, point.results, check=point.check)
            yield point

    async def _of_prompt(
        self,
        point: BranchPoint,
        state: State,
        draw: str,
        role: Role,
        stored: Mapping[str, Sample],
        n: int,
        prompt: Prompt,
    ) -> list[Sample]:
        plan = self._plan
        params = SamplingParams(role.policy.name, self.policy_digest, prompt.digest, *self._decoding(role))
        asked = params.prompt_digest, params.temperature, params.top_p, params.max_tokens, params.policy_digest
        samples: list[Sample] = []
        for index in range(n):
            seed = seed_of(plan.seed, draw, state.step, asked[0], index)  # with the id: from what asks for a sample
            name = digest(state.id, state.step, asked[0], index, seed, *asked[1:])
            blank = Sample(name, state.id, state.task_id, state.step, prompt.name, index, seed)
            samples.append(stored.get(name, blank))
        todo = [i for i, sample in enumerate(samples) if sample.id not in stored or not is_final(sample)]
        if not todo:
            return samples
        new = [samples[i] for i in todo]
        new = await self._score(point, state, role, new, await self._complete(point, state, role, prompt, new))
        for i, sample in zip(todo, new, strict=True):
            samples[i] = sample
        if self._store is not None:
            self._store.put_samples(new, params)
        return samples

    def _decoding(self, role: Role) -> tuple[float, float, int]:
        plan = self._plan
        temperature = plan.temperature if role.temperature is None else role.temperature
        top_p = plan.top_p if role.top_p is None else role.top_p
        return temperature, top_p, plan.max_tokens if role.max_tokens is None else role.max_tokens

    async def _ask(
        self, role: Role, need: NeedsCompletion, messages: Messages, seeds: tuple[int, ...], step: int, name: str
    ) -> list[Completion]:
        """Completions of a role's policy, counted under a name."""
        temperature, top_p, max_tokens = self._decoding(role)
        began = time.monotonic()
        try:
            asked = Request(messages, seeds, temperature, max_tokens, top_p, (), need.choice, need.predictor)
            made = await role.policy.complete(asked)
        except PolicyError:
            self.usage.failed(step, name, len(seeds))
            raise
        tokens = [completion.n_completion_tokens for completion in made]
        self.usage.answered(step, name, made[0].n_prompt_tokens, tokens, time.monotonic() - began)
        return made

    async def _complete(
        self, point: BranchPoint, state: State, role: Role, prompt: Prompt, samples: Sequence[Sample]
    ) -> list[Completion | Failure]:
        """One a sample; a completion that a sample has already is not asked for again."""
        assert isinstance(point.need, NeedsCompletion)
        made: Iterator[Completion | Failure] = iter(())
        if seeds := tuple([sample.seed for sample in samples if sample.completion is None]):
            messages: Messages = tuple([dict(message) for message in state.messages])  # the zero-shot prompt's
            if prompt.digest != ZERO_SHOT.digest:
                messages = self._runner.formatter.messages(point.need, prompt, messages[-1])
            try:
                made = iter(await self._ask(role, point.need, messages, seeds, state.step, prompt.name))
            except PolicyError as error:
                made = repeat(failure_of(error))
        return [next(made) if sample.completion is None else completion_of(sample) for sample in samples]

    def _reach(self, point: BranchPoint, need: NeedsCompletion, text: str, check: bool) -> Reached:
        """Where a completion leads to; equal ones at one state lead to one place."""
        reached = point.reached.get(text)
        if reached is None:
            step = self._runner.formatter.step(need, text)
            outputs = {} if isinstance(step.outputs, Exception) or not step.outputs else step.outputs[0]
            if step.is_nested:
                outputs = to_jsonable_python(outputs, fallback=str)
            end = self._runner.start(point.task, (*point.steps, step), point.results, check)
            reached = point.reached[text] = step, outputs, end
        return reached

    async def _score(
        self,
        point: BranchPoint,
        state: State,
        role: Role,
        samples: Sequence[Sample],
        completions: Sequence[Completion | Failure],
    ) -> list[Sample]:
        """Samples with what their completions came to.

        All of them are searched for, and run on to their ends, at once, so that they share batches.
        """
        assert isinstance(point.need, NeedsCompletion)
        with_final, texts = role.sampled and role.credit != "step", list[str]()
        for sample, answer in zip(samples, completions, strict=True):
            text = "" if isinstance(answer, Failure) else answer.text
            texts.append(text if text.isascii() else storable(text))
            if isinstance(answer, Failure):
                continue
            # Paths are checked on one completion a prompt.
            _, outputs, _ = reached = self._reach(point, point.need, texts[-1], point.check and sample.index == 0)
            if with_final and (key := _key(outputs, texts[-1])) not in point.finals:
                point.finals[key] = started(self._final(point, state, key, reached))
        scored: list[Sample] = []
        for sample, answer, text in zip(samples, completions, texts, strict=True):
            if isinstance(answer, Failure):
                scored.append(replace(sample, failure=answer))
                continue
            scored.append(await self._result(point, state, role, sample, answer, text, with_final))
        return scored

    async def _result(
        self,
        point: BranchPoint,
        state: State,
        role: Role,
        sample: Sample,
        answer: Completion,
        text: str,
        with_final: bool,
    ) -> Sample:
        """A sample with what its completion came to: a reward and its parts, or a failure."""
        _, outputs, reached = point.reached[text]
        asked = sample.id, sample.state_id, sample.task_id, sample.step, sample.prompt, sample.index, sample.seed
        tokens = answer.n_prompt_tokens, answer.n_completion_tokens
        picked = {} if answer.value is None else {"q": answer.value, **_logp(answer)}
        try:
            final = await point.finals[_key(outputs, text)] if with_final else {}
            end = await reached
        except (PolicyError, RetrievalError, ProgramError) as error:
            return Sample(*asked, text, outputs, (), (), None, picked, failure_of(error), *tokens)
        if isinstance(end, Finished) and end.unparsed:
            failure = unparsed(self._runner.formatter, state.predictor, text)
            return Sample(*asked, text, {}, (), (), None, picked, failure, *tokens)
        ranking, prediction = end.ranking, end.prediction if isinstance(end, Finished) else None
        outcome = Outcome(point.task, text, deepcopy(outputs), ranking, prediction, len(point.steps) + 1)
        reward, components = 0.0, {"sampled": 0.0}
        if role.sampled:
            functions = REPORTED if role.credit == "final" else self._rewards
            values = {**values_of(functions, outcome), **final}
            [(reward, components)] = self._crediting.mixed([values], role.credit, state.task_id)
        doc_ids, scores = tuple([passage.doc_id for passage in ranking]), tuple([passage.score for passage in ranking])
        return Sample(*asked, text, outputs, doc_ids, scores, reward, components | picked, None, *tokens)

    async def _final(self, point: BranchPoint, state: State, key: str, reached: Reached) -> dict[str, float]:
        """The final reward of what some outputs lead to: means where the program has to be run on from there."""
        step, _, end = reached
        after = BranchPoint(point.task, await end, (*point.steps, step), point.results, check=point.check)
        n = 1 if isinstance(after.need, Finished) else self._plan.n_continuations
        ends = [self._end_reward(after, "continuation", state.draw, state.step, key, i) for i in range(n)]
        found = await gathered(ends)
        names = dict.fromkeys(name for values in found for name in values)
        known = {name: [values[name] for values in found if name in values] for name in names}
        return self._crediting.final_components({name: sum(values) / len(values) for name, values in known.items()})

    async def _end_reward(self, point: BranchPoint, *seed: Any) -> dict[str, float]:
        """Parts of one run to the end; all 0 where a completion on the way does not parse."""
        final = self._crediting.final
        assert final is not None
        *_, end = [reached async for reached in self.run_on(point, *seed)]
        assert isinstance(end.need, Finished)
        if end.need.unparsed:
            return dict.fromkeys(final.parts, 0.0)
        last, n_steps = end.steps[-1], len(end.steps)
        outputs = last.outputs[0] if isinstance(last.outputs, list) and last.outputs else {}
        seen = deepcopy(outputs), end.need.ranking, end.need.prediction, n_steps
        outcome = Outcome(point.task, last.text or "", *seen)
        values: dict[str, float] = await self._runner.in_thread(final.values, outcome)
        if not values:
            raise ConfigError(f"the final reward has no value for task {point.task.id}; leave such tasks out")
        return values


def completion_of(sample: Sample) -> Completion:
    """What a sample's completion was."""
    known, n_tokens = sample.components, (sample.n_prompt_tokens or 0, sample.n_completion_tokens or 0)
    logprobs = (known["logp"],) if "logp" in known else None
    return Completion(sample.completion or "", "stop", *n_tokens, logprobs=logprobs, value=known.get("q"))


def _logp(completion: Completion) -> dict[str, float]:
    return {"logp": completion.logprobs[0]} if completion.logprobs else {}


def _key(outputs: Mapping[str, Any], completion: str) -> str:
    return _encode(outputs) if outputs else f"unparsed {completion}"
