"""Sampling completions with several prompts at a state, and scoring where each completion leads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, repeat
from typing import Any, Protocol

from leret.core.aio import started
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
from leret.http.usage import UsageByPrompt
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

    ``policy_digest`` covers the policies of all roles, because the steps after a sample depend on every policy.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        store: SampleStore | None,
        plan: SamplingPlan,
        usage: UsageByPrompt | None = None,
        walks: OpenWalks | None = None,
    ) -> None:
        self.usage = UsageByPrompt() if usage is None else usage
        self.walks = walks or OpenWalks()
        self.roles = plan.roles(runner)
        self.credits = {role.credit for role in self.roles.values() if role.sampled}
        digests = {name: role.policy.digest for name, role in self.roles.items()}
        single = len(set(digests.values())) == 1
        self.policy_digest = next(iter(digests.values())) if single else digest("policies", digests)
        self._runner = runner
        self._store = store
        self._plan = plan
        final = plan.final or (plan.reward if "both" in self.credits else None)
        self._crediting = Crediting(plan.reward, final, plan.final_weight)
        self._rewards = self._crediting.functions
        self._depth = plan.reward.depth
        if final is None and "final" in self.credits:
            raise ConfigError(
                "sampling.credit: final needs a final reward; set sampling.final or credit: step"
            )

    async def sample_state(self, point: Point, state: State) -> list[Sample]:
        """Return all samples of a state, ordered by prompt and index; missing samples are made and stored."""
        visit = self._visit(point, state)
        stored: dict[str, Sample] = {}
        if self._store is not None and not point.fresh:
            known = self._store.samples_at(state.task_id, state.step, state.id, self.policy_digest)
            stored = {sample.id: sample for sample in known}
        plan, role = self._plan, visit.role
        prompts, n = (
            (plan.prompts, role.n_samples or plan.n_samples) if role.sampled else ((ZERO_SHOT,), 1)
        )
        if visit.need.choice is not None:  # picks have no demos, so all samples use one prompt
            prompts, n = (ZERO_SHOT,), n * len(prompts)
        draw = state.draw
        groups = await asyncio.gather(
            *(self._of_prompt(visit, draw, prompt, n, stored) for prompt in prompts)
        )
        samples = [sample for group in groups for sample in group]
        if not self._crediting.needs_group:
            return samples
        regrouped = self._crediting.regrouped(
            samples
        )  # samples that replace failed ones change the other rewards
        if self._store is not None:
            self._store.put_rewards(
                [
                    new
                    for new, old in zip(regrouped, samples, strict=True)
                    if new.reward != old.reward
                ]
            )
        return regrouped

    async def draw(self, point: Point, state: State) -> list[Sample]:
        """Return zero-shot samples of a state without outcomes and rewards."""
        visit, n = self._visit(point, state), self._plan.n_samples
        return await self._of_prompt(
            visit, state.draw, ZERO_SHOT, visit.role.n_samples or n, {}, scored=False
        )

    async def score(self, point: Point, state: State, texts: Sequence[str]) -> list[Sample]:
        """Score completions as one group and return the samples without storing any."""
        blank = Sample("", state.id, state.task_id, state.step, ZERO_SHOT.name, 0, 0)
        blanks = [
            replace(blank, id=digest(state.id, i), index=i, seed=i) for i in range(len(texts))
        ]
        completions = [Completion(text, "stop", 0, 0) for text in texts]
        samples = await self._score(self._visit(point, state), blanks, completions)
        return self._crediting.regrouped(samples) if self._crediting.needs_group else samples

    async def next_point(self, point: Point, sample: Sample) -> Point:
        """Return the point that a sample leads to, without repeating the program run made for scoring."""
        reached = point.reach(self._runner, sample.completion or "", point.check)
        return await point.after(self._runner, reached, sample.id)

    async def run_on(self, start: Point | Awaitable[Point], *seed: Any) -> Walk:
        """Walk to the program's end with one completion per step, seeded by the plan and ``seed``; store nothing."""

        async def visit(point: Point) -> Point:
            assert isinstance(point.need, NeedsCompletion)
            state = self._runner.state(point.task, point.need, len(point.steps))
            seeds = (seed_of(self._plan.seed, *seed, state.step),)
            [completion] = await self._ask(
                self._visit(point, state), ZERO_SHOT, seeds, "continuation"
            )
            return await point.after(
                self._runner, self._runner.formatter.step(point.need, completion.text)
            )

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
        state, role = visit.state, visit.role
        params = SamplingParams(
            role.policy.name, self.policy_digest, prompt.digest, *visit.decoding
        )
        asked = (
            params.prompt_digest,
            params.temperature,
            params.top_p,
            params.max_tokens,
            params.policy_digest,
        )
        samples: list[Sample] = []
        for index in range(n):
            seed = seed_of(
                self._plan.seed, draw, state.step, asked[0], index
            )  # the id depends on these values too
            name = digest(state.id, state.step, asked[0], index, seed, *asked[1:])
            blank = Sample(name, state.id, state.task_id, state.step, prompt.name, index, seed)
            samples.append(stored.get(name, blank))
        todo = [
            i
            for i, one in enumerate(samples)
            if one.id not in stored or (one.failure and one.failure.is_outage)
        ]
        if not todo:
            return samples
        new = [samples[i] for i in todo]
        seeds = tuple([sample.seed for sample in new if sample.completion is None])
        try:
            answers: Iterator[Completion | Failure] = iter(
                await self._ask(visit, prompt, seeds, prompt.name) if seeds else []
            )
        except PolicyError as error:
            answers = repeat(failure_of(error))
        completions = [
            next(answers) if one.completion is None else completion_of(one) for one in new
        ]
        if scored:
            new = await self._score(visit, new, completions)
        else:
            pairs = zip(new, completions, strict=True)
            new = [
                replace(a, **({"failure": b} if isinstance(b, Failure) else {"completion": b.text}))
                for a, b in pairs
            ]
        for i, sample in zip(todo, new, strict=True):
            samples[i] = sample
        if self._store is not None:
            self._store.put_samples(new, params)
        return samples

    async def _ask(
        self, visit: _Visit, prompt: Prompt, seeds: tuple[int, ...], name: str
    ) -> list[Completion]:
        """Return one completion per seed; their usage is counted under ``name``."""
        need, state, (temperature, top_p, max_tokens) = visit.need, visit.state, visit.decoding
        messages: Messages = tuple(
            [dict(message) for message in state.messages]
        )  # the zero-shot prompt
        if prompt.digest != ZERO_SHOT.digest:
            messages = self._runner.formatter.messages(need, prompt, messages)
        call, began = need.call, time.monotonic()
        writes = visit.role.sampled and call.choice is None
        tokens = self._plan.token_ids and writes
        try:
            completions = await visit.role.policy.complete(
                Request(
                    messages,
                    seeds,
                    temperature,
                    max_tokens,
                    top_p,
                    visit.stop,
                    call.choice,
                    call.predictor,
                    logprobs=tokens,
                    token_ids=writes,
                )
            )
        except PolicyError:
            self.usage[state.step, name].lost(len(seeds))
            raise
        seconds, n_prompt = time.monotonic() - began, completions[0].n_prompt_tokens
        written = sum([completion.n_completion_tokens for completion in completions])
        self.usage[state.step, name].answered(seconds, n_prompt, written, len(completions))
        if tokens and not all(
            one.token_ids and len(one.token_ids) == len(one.logprobs or ()) for one in completions
        ):
            raise ConfigError(
                f"sampling.token_ids: the server of {visit.role.policy.name} sent no token ids with log-probabilities; "
                "use vLLM or a model in this process, or set sampling.token_ids: false"
            )
        return completions

    async def _score(
        self, visit: _Visit, samples: Sequence[Sample], completions: Sequence[Completion | Failure]
    ) -> list[Sample]:
        """Score completions. Searches and continuations of all completions start together, to share batches."""
        point, runner = visit.point, self._runner
        to_end = visit.role.sampled and visit.role.credit != "step"
        texts, finals = list[str](), list[asyncio.Task[dict[str, float]]]()
        for sample, answer in zip(samples, completions, strict=True):
            text = "" if isinstance(answer, Failure) else answer.text
            texts.append(text if text.isascii() else storable(text))
            if isinstance(answer, Failure):
                continue
            reached = point.reach(
                runner, texts[-1], point.check and sample.index == 0
            )  # check one path per prompt
            if to_end and (key := _key(reached.outputs, texts[-1])) not in point.finals:
                point.finals[key] = started(self._final(visit, key, reached))
                finals.append(point.finals[key])
        if finals:
            await self.walks.wait(finals)
        return [
            replace(sample, failure=answer)
            if isinstance(answer, Failure)
            else await self._result(visit, sample, answer, text, to_end)
            for sample, answer, text in zip(samples, completions, texts, strict=True)
        ]

    async def _result(
        self, visit: _Visit, sample: Sample, answer: Completion, text: str, to_end: bool
    ) -> Sample:
        point, role = visit.point, visit.role
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
                outputs, failure = {}, unparsed(self._runner.formatter, visit.need.predictor, text)
            else:
                reward, components = 0.0, {"sampled": 0.0}
                ranking = merge(added for search in need.searches for added in search.added)
            if role.sampled and failure is None:
                n_steps = len(point.steps) + 1
                deep = await self._runner.deep(need, n_steps, self._depth) if self._depth else ()
                known = (ranking, prediction, n_steps, deep)
                outcome = Outcome(point.task, text, deepcopy(outputs), *known)
                rewards = REPORTED if role.credit == "final" else self._rewards
                values = {
                    name: value
                    for name, part in rewards.items()
                    if (value := part(outcome)) is not None
                }
                values |= final
                [(reward, components)] = self._crediting.mixed(
                    [values], role.credit, sample.task_id
                )
        if answer.value is not None:
            logp = {"logp": answer.logprobs[0]} if answer.logprobs else {}
            components = {**components, "q": answer.value, **logp}
        logprobs = answer.logprobs if self._plan.token_ids and answer.token_ids else None
        return Sample(
            sample.id, sample.state_id, sample.task_id, sample.step, sample.prompt, sample.index, sample.seed, text,
            outputs, tuple([one.doc_id for one in ranking]), tuple([one.score for one in ranking]), reward, components,
            failure, answer.n_prompt_tokens, answer.n_completion_tokens,
            answer.token_ids or None, logprobs, answer.finish_reason,
        )  # fmt: skip

    async def _final(self, visit: _Visit, key: str, reached: Reached) -> dict[str, float]:
        """Return the components of the final reward after a step, averaged over continuations to the end."""
        state = visit.state
        after = await visit.point.after(self._runner, reached)
        n = 1 if isinstance(after.need, Finished) else self._plan.n_continuations
        reward = self._return if visit.role.credit == "return" else self.end_values

        async def run_on(index: int) -> dict[str, float]:
            return await reward(
                await self.run_on(after, "continuation", state.draw, state.step, key, index)
            )

        ends = [started(run_on(index)) for index in range(n)]
        await self.walks.wait(ends)
        runs = [await end for end in ends]
        names = dict.fromkeys(name for values in runs for name in values)
        known = {name: [values[name] for values in runs if name in values] for name in names}
        means = {name: sum(values) / len(values) for name, values in known.items()}
        return means if visit.role.credit == "return" else self._crediting.final_components(means)

    async def end_values(self, path: Walk) -> dict[str, float]:
        """Return the parts of the final reward at a path's end; 0 if the program ended with an unparsed completion."""
        final, end = self._crediting.final, path.end
        assert final is not None
        if end.unparsed:
            return dict.fromkeys(final.parts, 0.0)
        values: dict[str, float] = await asyncio.to_thread(final.values, end.outcome())
        if not values:
            raise ConfigError(
                f"the final reward has no value for task {end.task.id}; remove tasks without labels"
            )
        return values

    def final_components(self, values: Mapping[str, float]) -> dict[str, float]:
        return self._crediting.final_components(values) if values else {}

    async def _return(self, path: Walk) -> dict[str, float]:
        outcomes = list[Outcome | None]()
        for point in (*path.points[:-1], path.end):
            deep = (
                await self._runner.deep(point.need, len(point.steps), self._depth)
                if self._depth
                else ()
            )
            outcomes.append(None if point.unparsed else point.outcome(deep))
        return {
            "return": await asyncio.to_thread(
                self._crediting.discounted_return, outcomes, self._plan.gamma
            )
        }


async def predictors_searched(
    runner: ProgramRunner, sampler: StateSampler, tasks: Iterable[Task]
) -> dict[str, bool]:
    """Run each of the first tasks once; return, by predictor, whether any run searched before the next LM call.

    Unparsed completions and failed tasks do not count; predictors that no path reaches are left out. LeretError if the
    program is not deterministic or all tasks failed.
    """
    searched: dict[str, bool] = {}

    async def look(task: Task) -> Walk:
        return await sampler.run_on(begin(runner, task, check=True), "look", task.id)

    looks = [started(look(task)) for task in islice(tasks, LOOKED_AT)]
    await sampler.walks.wait(looks)
    paths = [await one for one in looks]
    errors = [path.error for path in paths if path.error is not None]
    if paths and len(errors) == len(paths):
        raise errors[0].failed()
    for before, after in chain.from_iterable(
        pairwise(path.points) for path in paths if path.error is None
    ):
        if isinstance(before.need, NeedsCompletion) and not isinstance(
            after.steps[-1].outputs, AdapterParseError
        ):
            name, added = (
                before.need.predictor,
                len(after.need.searches) > len(before.need.searches),
            )
            searched[name] = searched.get(name, False) or added
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
    if n_auto < 2 and not (
        n_auto and plan.final
    ):  # without a final reward, a single `auto` means `step`
        return replace(plan, searched={})
    searched = None if run is None else run.manifest.searched
    if searched is None:
        searched = await predictors_searched(
            runner, StateSampler(runner, None, plan, walks=walks), tasks
        )
        if run is not None:
            run.update(searched=searched)
    return replace(plan, searched=searched)


def completion_of(sample: Sample) -> Completion:
    """Return the completion stored in a sample."""
    known, n_tokens = (
        sample.components,
        (sample.n_prompt_tokens or 0, sample.n_completion_tokens or 0),
    )
    logprobs = (known["logp"],) if "logp" in known else sample.logprobs
    text = sample.completion or ""
    finish = sample.finish_reason or "stop"
    return Completion(
        text, finish, *n_tokens, token_ids=sample.token_ids, logprobs=logprobs, value=known.get("q")
    )


def _key(outputs: Mapping[str, Any], completion: str) -> str:
    return _encode(outputs) if outputs else f"unparsed {completion}"
