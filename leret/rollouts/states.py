"""Sampling completions with several prompts at a state, and scoring where each completion leads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, repeat
from typing import Any, Protocol

from leret.core.aio import gathered, started
from leret.core.dspy_internals import AdapterParseError
from leret.core.errors import ConfigError, PolicyError
from leret.core.runs import Run
from leret.core.types import (
    Failure,
    Outcome,
    Ranking,
    Sample,
    SamplingParams,
    State,
    Task,
    digest,
    json_encoder,
    merge,
    seed_of,
    storable,
)
from leret.http.usage import Usage
from leret.policies.base import Completion, Messages, Request
from leret.programs.needs import Finished, NeedsCompletion
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.runner import ProgramRunner
from leret.rollouts.actors import Role, SamplingPlan
from leret.rollouts.credit import REPORTED, Crediting
from leret.rollouts.failures import FAILURES, failure_of, unparsed
from leret.rollouts.walk import OpenWalks, Point, Reached, Walk, begin, walk

LOOKED_AT = 8
"""Number of tasks that the program runs on to see which predictors are followed by a search."""

_encode = json_encoder(sort_keys=True)


class SampleStore(Protocol):
    """Stores samples (see `leret.sampling.store`)."""

    def samples_at(
        self, question_id: str, step: int, state_id: str, policy_digest: str
    ) -> list[Sample]: ...
    def put_samples(self, samples: Iterable[Sample], origin: SamplingParams) -> None: ...
    def put_rewards(self, samples: Iterable[Sample]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Visit:
    """One visit to a state; ``decoding`` is (temperature, top_p, max_tokens)."""

    point: Point
    need: NeedsCompletion
    state: State
    role: Role
    decoding: tuple[float, float, int]
    stop: tuple[str, ...]  # strings that end a completion


class StateSampler:
    """Samples states. Samples in the store are used again, so a resumed run does not repeat them.

    ``policy_digest`` covers the policies of all roles, because the steps after a sample depend on
    every policy.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        store: SampleStore | None,
        plan: SamplingPlan,
        usage: Usage | None = None,
        walks: OpenWalks | None = None,
    ) -> None:
        self.usage = usage or Usage()
        self.walks = walks or OpenWalks()
        self.roles = plan.roles(runner)
        self.credits = {role.credit for role in self.roles.values() if role.sampled}
        digests = {name: role.policy.digest for name, role in self.roles.items()}
        self.policy_digest = next(iter(digests.values()), "")
        if len(set(digests.values())) != 1:
            self.policy_digest = digest("policies", digests)
        self._runner = runner
        self._store = store
        self._plan = plan
        final = plan.final
        if final is None and "both" in self.credits:
            final = plan.reward
        self.crediting = Crediting(plan.reward, final, plan.final_weight)
        self._rewards = self.crediting.functions
        self._depth = plan.reward.depth
        if final is None and "final" in self.credits:
            raise ConfigError(
                "sampling.credit: final needs a final reward; set sampling.final or credit: step"
            )

    async def sample_state(self, point: Point, state: State) -> list[Sample]:
        """Return all samples of a state, ordered by prompt and index.

        Missing samples are made and stored.
        """
        visit = self._visit(point, state)
        stored: dict[str, Sample] = {}
        if self._store is not None:
            rows = self._store.samples_at(state.task_id, state.step, state.id, self.policy_digest)
            stored = {sample.id: sample for sample in rows}
        prompts: tuple[Prompt, ...] = (ZERO_SHOT,)
        n = 1
        if visit.role.sampled:
            prompts = self._plan.prompts
            n = visit.role.n_samples or self._plan.n_samples
        if visit.need.choice is not None:  # picks have no demos, so all samples use one prompt
            n *= len(prompts)
            prompts = (ZERO_SHOT,)
        groups = await gathered(
            self._of_prompt(visit, state.draw, prompt, n, stored) for prompt in prompts
        )
        samples = list(chain.from_iterable(groups))
        if not self.crediting.needs_group:
            return samples
        # samples that replace failed ones change the other rewards
        regrouped = self.crediting.regrouped(samples)
        if self._store is not None:
            pairs = zip(regrouped, samples, strict=True)
            self._store.put_rewards([new for new, old in pairs if new.reward != old.reward])
        return regrouped

    async def draw(self, point: Point, state: State) -> list[Sample]:
        """Return zero-shot samples of a state without outcomes and rewards."""
        visit = self._visit(point, state)
        n = visit.role.n_samples or self._plan.n_samples
        return await self._of_prompt(visit, state.draw, ZERO_SHOT, n, {}, scored=False)

    async def score(self, point: Point, state: State, texts: Sequence[str]) -> list[Sample]:
        """Score completions as one group and return the samples without storing any."""
        blank = Sample("", state.id, state.task_id, state.step, ZERO_SHOT.name, 0, 0)
        blanks = [
            replace(blank, id=digest(state.id, i), index=i, seed=i) for i in range(len(texts))
        ]
        completions = [Completion(text, "stop", 0, 0) for text in texts]
        samples = await self._score(self._visit(point, state), blanks, completions)
        if self.crediting.needs_group:
            return self.crediting.regrouped(samples)
        return samples

    async def next_point(self, point: Point, sample: Sample) -> Point:
        """Return the point that a sample leads to.

        The program run made for scoring is not repeated.
        """
        reached = point.reach(self._runner, sample.completion or "", point.check)
        return await point.after(self._runner, reached, sample.id)

    async def run_on(self, start: Point | Awaitable[Point], *seed: Any) -> Walk:
        """Walk to the program's end with one completion per step, seeded by the plan and ``seed``.

        Store nothing.
        """

        async def visit(point: Point) -> Point:
            assert isinstance(point.need, NeedsCompletion)
            state = self._runner.state(point.task, point.need, len(point.steps))
            seeds = (seed_of(self._plan.seed, *seed, state.step),)
            at_state = self._visit(point, state)
            [completion] = await self._ask(at_state, ZERO_SHOT, seeds)
            step = self._runner.formatter.step(point.need, completion.text)
            return await point.after(self._runner, step)

        return await walk(start, visit)

    def _visit(self, point: Point, state: State) -> _Visit:
        assert isinstance(point.need, NeedsCompletion)
        role = self._plan.role_of(point.need)
        return _Visit(point, point.need, state, role, self._plan.decoding_of(role), point.need.stop)

    async def _of_prompt(
        self,
        visit: _Visit,
        draw: str,
        prompt: Prompt,
        n: int,
        stored: Mapping[str, Sample],
        scored: bool = True,
    ) -> list[Sample]:
        state = visit.state
        key = prompt.digest
        settings = (*visit.decoding, self.policy_digest)
        samples: list[Sample] = []
        todo: list[int] = []
        for index in range(n):
            seed = seed_of(self._plan.seed, draw, state.step, key, index)
            name = digest(state.id, state.step, key, index, seed, *settings)
            sample = stored.get(name)
            if sample is None or (sample.failure is not None and sample.failure.is_outage):
                todo.append(index)
            if sample is None:
                step = state.step
                sample = Sample(name, state.id, state.task_id, step, prompt.name, index, seed)
            samples.append(sample)
        if not todo:
            return samples
        new = [samples[index] for index in todo]
        seeds = tuple([sample.seed for sample in new if sample.completion is None])
        answers: Iterator[Completion | Failure] = iter(())
        if seeds:
            try:
                answers = iter(await self._ask(visit, prompt, seeds))
            except PolicyError as error:
                answers = repeat(failure_of(error))
        completions: list[Completion | Failure] = []
        for sample in new:
            if sample.completion is None:
                completions.append(next(answers))
            else:
                completions.append(completion_of(sample))
        if scored:
            new = await self._score(visit, new, completions)
        else:
            pairs = zip(new, completions, strict=True)
            new = [_with_completion(sample, completion) for sample, completion in pairs]
        for index, sample in zip(todo, new, strict=True):
            samples[index] = sample
        if self._store is not None:
            policy_name = visit.role.policy.name
            params = SamplingParams(policy_name, self.policy_digest, key, *visit.decoding)
            self._store.put_samples(new, params)
        return samples

    async def _ask(self, visit: _Visit, prompt: Prompt, seeds: tuple[int, ...]) -> list[Completion]:
        """Return one completion per seed."""
        call = visit.need.call
        policy = visit.role.policy

        # the zero-shot prompt
        messages: Messages = tuple([dict(message) for message in visit.state.messages])
        if prompt.digest != ZERO_SHOT.digest:
            messages = self._runner.formatter.messages(visit.need, prompt, messages)
        if prompt.hint is not None and self._plan.hints is not None:
            messages = self._plan.hints.show(
                messages, visit.point.task, visit.need, visit.state.messages
            )
        temperature, top_p, max_tokens = visit.decoding
        writes = visit.role.sampled and call.choice is None
        with_tokens = self._plan.token_ids and writes
        request = Request(
            messages,
            seeds,
            temperature,
            max_tokens,
            top_p,
            visit.stop,
            call.choice,
            call.predictor,
            logprobs=with_tokens,
            token_ids=writes,
        )
        began = time.monotonic()
        try:
            completions = await policy.complete(request)
        except PolicyError:
            self.usage.lost(len(seeds))
            raise
        seconds = time.monotonic() - began
        n_prompt = completions[0].n_prompt_tokens
        n_written = sum([completion.n_completion_tokens for completion in completions])
        self.usage.answered(seconds, n_prompt, n_written, len(completions))
        if with_tokens and not all(map(_has_token_ids, completions)):
            raise ConfigError(
                f"sampling.token_ids: the server of {policy.name} sent no token ids with "
                "log-probabilities; use vLLM or a model in this process, or set "
                "sampling.token_ids: false"
            )
        return completions

    async def _score(
        self, visit: _Visit, samples: Sequence[Sample], completions: Sequence[Completion | Failure]
    ) -> list[Sample]:
        """Score completions.

        Searches and continuations of all completions start together, to share batches.
        """
        point = visit.point
        to_end = visit.role.sampled and visit.role.credit != "step"
        texts: list[str] = []
        finals: list[asyncio.Task[dict[str, float]]] = []
        for sample, answer in zip(samples, completions, strict=True):
            if isinstance(answer, Failure):
                texts.append("")
                continue
            text = answer.text
            if not text.isascii():
                text = storable(text)
            texts.append(text)
            check = point.check and sample.index == 0  # check one path per prompt
            reached = point.reach(self._runner, text, check)
            if not to_end:
                continue
            key = _key(reached.outputs, text)
            if key not in point.finals:
                point.finals[key] = started(self._final(visit, key, reached))
                finals.append(point.finals[key])
        if finals:
            await self.walks.wait(finals)
        scored: list[Sample] = []
        for sample, answer, text in zip(samples, completions, texts, strict=True):
            if isinstance(answer, Failure):
                scored.append(replace(sample, failure=answer))
            else:
                scored.append(await self._result(visit, sample, answer, text, to_end))
        return scored

    async def _result(
        self, visit: _Visit, sample: Sample, answer: Completion, text: str, to_end: bool
    ) -> Sample:
        point = visit.point
        role = visit.role
        _, outputs, end = point.reached[text]
        ranking: Ranking = ()
        reward: float | None = None
        components: dict[str, float] = {}
        failure: Failure | None = None
        try:
            final = await point.finals[_key(outputs, text)] if to_end else {}
            need = await end
        except FAILURES as error:
            failure = failure_of(error)
        else:
            prediction = need.prediction if isinstance(need, Finished) else None
            if isinstance(prediction, AdapterParseError):
                outputs = {}
                failure = unparsed(self._runner.formatter, visit.need.predictor, text)
            else:
                reward = 0.0
                components = {"sampled": 0.0}
                ranking = merge(chain.from_iterable(search.added for search in need.searches))
            if role.sampled and failure is None:
                n_steps = len(point.steps) + 1
                deep = (
                    await self._runner.deep_ids(need, n_steps, self._depth) if self._depth else ()
                )
                outcome = Outcome(
                    point.task, text, deepcopy(outputs), ranking, prediction, n_steps, deep
                )
                functions = REPORTED if role.credit == "final" else self._rewards
                parts: dict[str, float] = {}
                for name, function in functions.items():
                    value = function(outcome)
                    if value is not None:
                        parts[name] = value
                parts |= final
                [(reward, components)] = self.crediting.mixed([parts], role.credit, sample.task_id)
        if answer.value is not None:
            components["q"] = answer.value
            if answer.logprobs:
                components["logp"] = answer.logprobs[0]
        return Sample(  # twice as fast as dataclasses.replace
            id=sample.id,
            state_id=sample.state_id,
            task_id=sample.task_id,
            step=sample.step,
            prompt=sample.prompt,
            index=sample.index,
            seed=sample.seed,
            completion=text,
            outputs=outputs,
            doc_ids=tuple([passage.doc_id for passage in ranking]),
            scores=tuple([passage.score for passage in ranking]),
            reward=reward,
            components=components,
            failure=failure,
            n_prompt_tokens=answer.n_prompt_tokens,
            n_completion_tokens=answer.n_completion_tokens,
            token_ids=answer.token_ids or None,
            logprobs=answer.logprobs if self._plan.token_ids and answer.token_ids else None,
            finish_reason=answer.finish_reason,
        )

    async def _final(self, visit: _Visit, key: str, reached: Reached) -> dict[str, float]:
        """Return the components of the final reward after a step, averaged over continuations."""
        state = visit.state
        after = await visit.point.after(self._runner, reached)

        async def run_on(index: int) -> dict[str, float]:
            seed = ("continuation", state.draw, state.step, key, index)
            return await self.end_values(await self.run_on(after, *seed))

        n = 1 if isinstance(after.need, Finished) else self._plan.n_continuations
        ends = await self.walks.gather(run_on(index) for index in range(n))
        by_name: dict[str, list[float]] = {}
        for end in ends:
            for name, value in end.items():
                by_name.setdefault(name, []).append(value)
        means = {name: sum(values) / len(values) for name, values in by_name.items()}
        return self.crediting.final_components(means)

    async def end_values(self, path: Walk) -> dict[str, float]:
        """Return the parts of the final reward at a path's end.

        0 if the program ended with an unparsed completion.
        """
        final = self.crediting.final
        assert final is not None
        end = path.end
        if end.unparsed:
            return dict.fromkeys(final.parts, 0.0)
        values: dict[str, float] = await asyncio.to_thread(final.values, end.outcome())
        if not values:
            raise ConfigError(
                f"the final reward has no value for task {end.task.id}; remove tasks without labels"
            )
        return values


async def predictors_searched(
    runner: ProgramRunner, sampler: StateSampler, tasks: Iterable[Task]
) -> dict[str, bool]:
    """Run each of the first tasks once.

    Return, by predictor, whether any run searched before the next LM call. Unparsed completions and
    failed tasks do not count; predictors that no path reaches are left out. LeretError if the
    program is not deterministic or all tasks failed.
    """
    searched: dict[str, bool] = {}

    async def look(task: Task) -> Walk:
        return await sampler.run_on(begin(runner, task, check=True), "look", task.id)

    paths = await sampler.walks.gather(look(task) for task in islice(tasks, LOOKED_AT))
    errors = [path.error for path in paths if path.error is not None]
    if paths and len(errors) == len(paths):
        raise errors[0].failed()
    for path in paths:
        if path.error is not None:
            continue
        for before, after in pairwise(path.points):
            if not isinstance(before.need, NeedsCompletion):
                continue
            if isinstance(after.steps[-1].outputs, AdapterParseError):
                continue
            name = before.need.predictor
            has_searched = len(after.need.searches) > len(before.need.searches)
            searched[name] = searched.get(name, False) or has_searched
    return dict(sorted(searched.items()))


async def with_credit(
    plan: SamplingPlan,
    runner: ProgramRunner,
    tasks: Iterable[Task],
    run: Run | None = None,
    walks: OpenWalks | None = None,
) -> SamplingPlan:
    """Return the plan with ``searched`` and ``stops``, which resolve credit ``auto``.

    ``searched`` is read from the run, or determined on the first tasks.
    """
    roles = [plan.role(runner.formatter.need(name, {})) for name in runner.replay.names]
    n_auto = sum(role.sampled and role.credit == "auto" for role in roles)
    plan = replace(plan, stops=runner.replay.stops)
    # without a final reward, a single `auto` means `step`
    if n_auto == 0 or (n_auto == 1 and plan.final is None):
        return replace(plan, searched={})
    if run is not None and run.manifest.searched is not None:
        return replace(plan, searched=run.manifest.searched)
    sampler = StateSampler(runner, None, plan, walks=walks)
    searched = await predictors_searched(runner, sampler, tasks)
    if run is not None:
        run.update(searched=searched)
    return replace(plan, searched=searched)


def completion_of(sample: Sample) -> Completion:
    """Return the completion stored in a sample."""
    logprobs = sample.logprobs
    if "logp" in sample.components:
        logprobs = (sample.components["logp"],)
    return Completion(
        sample.completion or "",
        sample.finish_reason or "stop",
        sample.n_prompt_tokens or 0,
        sample.n_completion_tokens or 0,
        token_ids=sample.token_ids,
        logprobs=logprobs,
        value=sample.components.get("q"),
    )


def _with_completion(sample: Sample, completion: Completion | Failure) -> Sample:
    if isinstance(completion, Failure):
        return replace(sample, failure=completion)
    return replace(sample, completion=completion.text)


def _has_token_ids(completion: Completion) -> bool:
    if not completion.token_ids:
        return False
    return len(completion.token_ids) == len(completion.logprobs or ())


def _key(outputs: Mapping[str, Any], completion: str) -> str:
    if not outputs:
        return f"unparsed {completion}"
    return _encode(outputs)
