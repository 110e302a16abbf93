"""A round's samples: whole runs of the program with the policy as it is, or the states that the run has stored.

Bits must not depend on the clock: what is decoded together decides a logit's last digits, and in rare cases a token.
So a round's policy waits until nothing else can go on, and then completes all that is asked for, in a fixed order.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, int64, tensor

from leret.config.sampling import SamplingSettings
from leret.config.training import RoundRecipe
from leret.core.aio import gathered
from leret.core.errors import ProgramError, RetrievalError
from leret.core.runs import Run
from leret.core.types import Choice, Sample, State, Task
from leret.policies.base import Completion, Policy, PromptTooLongError, Request
from leret.policies.load import policy_for
from leret.policies.local.policy import LocalPolicy
from leret.policies.pickers.picker import Picker
from leret.programs.needs import NeedsCompletion
from leret.programs.prompts import ZERO_SHOT
from leret.programs.replay import SearchResults
from leret.retrieval.base import Retriever
from leret.rewards import scoring
from leret.rollouts.environment import Environment
from leret.rollouts.rollout import failure_of, seed_of
from leret.rollouts.selection import select_next
from leret.rollouts.states import BranchPoint, Role, SamplingPlan, StateSampler
from leret.sampling.scheduler import SamplingStats, refuse_failures
from leret.sampling.stage import scorable, with_credit
from leret.sampling.store.store import Store
from leret.training.online.served import ServedPolicy

if TYPE_CHECKING:
    from leret.programs.runner import ProgramRunner

_QUIET = 32
"""Turns of the event loop in which nothing new is asked: as many as a search's answer may need to become a request."""

Group = tuple[State, Sequence[Sample]]

LivePolicy = LocalPolicy | ServedPolicy | Picker
"""A policy in training."""


@dataclass(slots=True)
class Sampled:
    """The samples of a round that have a reward or a price; those of one state, and of one task, stand together.

    Attributes:
        sequences: ids of prompt and completion; the end token, where it was reached, is the last. Of picks: the
            `Choice`, and the id of the candidate.
        groups: (n,) number of the state, from 0.
        rewards: (n,) float32.
        parts: (n, n_parts) of the rewards, NaN where one does not apply.
        facts: for the log: means over the round, by TRL's names where it has them.
        walks: (n,) number of the task, from 0.
        at_end: rewards are those of the program's end, whatever the step.
    """

    sequences: Sequence[tuple[Any, Any]]
    groups: Tensor
    rewards: Tensor
    parts: Tensor
    facts: dict[str, float]
    walks: Tensor = field(default_factory=lambda: tensor([]))
    at_end: bool = False


class RoundPolicy:
    """A live policy that completes, in one batch, what a round's tasks ask for at one time.

    Attributes:
        made: prompt ids, or the choice, and completion by seed.
    """

    def __init__(self, policy: LivePolicy, idle: Callable[[], bool]) -> None:
        self.name, self.digest = policy.name, policy.digest
        self.made: dict[int, tuple[Sequence[int] | Choice, Completion]] = {}
        self._policy: Any = policy
        self._idle = idle
        self._waiting: list[tuple[Request, asyncio.Future[list[Completion]]]] = []
        self._answering: asyncio.Task[None] | None = None

    async def complete(self, request: Request) -> list[Completion]:
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer())
        return await future

    async def aclose(self) -> None:
        """The model is another's."""

    async def _answer(self) -> None:
        n_waiting = n_quiet = 0
        while n_quiet < _QUIET:
            await asyncio.sleep(0 if self._idle() else 0.0005)
            n_quiet = n_quiet + 1 if self._idle() and len(self._waiting) == n_waiting else 0
            n_waiting = len(self._waiting)
        asked, self._waiting, self._answering = self._waiting, [], None
        asked.sort(key=lambda one: (json.dumps(one[0].messages), one[0].seeds))
        try:
            fitting = [(request, read, future) for request, future in asked if (read := self._read(request, future))]
            made = self._policy.complete_many([request for request, _, _ in fitting])
        except Exception as error:
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for (request, read, future), completions in zip(fitting, made, strict=True):
            if isinstance(completions, BaseException):  # a server's
                future.set_exception(completions)
                continue
            self.made |= {seed: (read, one) for seed, one in zip(request.seeds, completions, strict=True)}
            future.set_result(completions)

    def _read(self, request: Request, future: asyncio.Future[list[Completion]]) -> Sequence[int] | Choice:
        try:
            return request.choice or self._policy.prompt_ids(request.messages)
        except PromptTooLongError as error:
            future.set_exception(error)
            return ()


class AwaitedPolicy:
    """Another policy of the program than the one in training: while it is asked, a round is not complete."""

    def __init__(self, policy: Policy, runner: ProgramRunner) -> None:
        self.name, self.digest = policy.name, policy.digest
        self._policy, self._runner = policy, runner

    async def complete(self, request: Request) -> list[Completion]:
        with self._runner.waiting():
            return await self._policy.complete(request)

    async def aclose(self) -> None:
        """The model is another's."""


def training_tasks(environment: Environment, recipe: RoundRecipe) -> list[Task]:
    """The tasks of the run's sampling that the reward applies to; `DataError` where there is none."""
    data, settings = environment.recipe.data, scored_by(environment, recipe)
    questions = environment.tasks(data.split, recipe.limit or data.limit, part=data.part)
    return scorable(questions, environment.recipe.model_copy(update={"sampling": settings}))


def scored_by(environment: Environment, recipe: RoundRecipe) -> SamplingSettings:
    """The run's settings of sampling, with the training's own reward and credit."""
    own = {"credit": recipe.credit, "reward": recipe.reward, "final": recipe.reward}
    given = {name: value for name, value in own.items() if value is not None}
    return environment.recipe.sampling.model_copy(update=given)


def round_of(n_tasks: int, size: int, seed: int, number: int) -> list[int]:
    """Places of a round's tasks, each once: a new order in every pass over them."""
    places = range(number * size, (number + 1) * size)
    orders = {epoch: random.Random(f"{seed} {epoch}").sample(range(n_tasks), n_tasks)
              for epoch in {place // n_tasks for place in places}}  # fmt: skip
    return list(dict.fromkeys(orders[place // n_tasks][place % n_tasks] for place in places))


class RoundSampler:
    """Samples rounds of a run's tasks; ``policy`` is live, and its digest another in each round.

    Attributes:
        temperature: of sampling; a training may change it between rounds.
    """

    def __init__(self, recipe: RoundRecipe, environment: Environment, run: Run, policy: LivePolicy) -> None:
        from leret.retrieval.batching import SearchBatcher

        self.recipe, self.policy, self.stats = recipe, policy, SamplingStats()
        self.temperature = recipe.temperature or environment.recipe.policy_of(recipe.predictors).temperature
        self._environment, self._run, self._settings = environment, run, scored_by(environment, recipe)
        self._scoring = scoring(self._settings.reward)
        retriever: Retriever | None = environment.retriever
        self._searches = None if retriever is None else SearchBatcher(retriever)  # None: the program has its own
        self._runner: ProgramRunner = environment.runner(self._searches)
        self._paths = _stored_paths(run) if recipe.states == "stored" else None
        self._plan: SamplingPlan | None = None

    def close(self) -> None:
        """End the thread of the searches."""
        if self._searches is not None:
            self._searches.close()

    def _n_searches(self) -> float:
        return 0.0 if self._searches is None else float(self._searches.counts()["asked"])

    def sample(self, tasks: Sequence[Task], number: int, *, last: bool = False) -> Sampled:
        """Sample one round; its samples follow from the recipe's seed, its number and the policy.

        Raises:
            LeretError: more samples failed than the run's ``sampling.max_error_rate`` allows, or, by the ``last``
                round, no sample had a reward.
        """
        sampled = asyncio.run(self._sample(tasks, number))
        refuse_failures(self.stats, self._environment.recipe.sampling.max_error_rate, max_unparsed_rate=1.0, last=last)
        return sampled

    async def _sample(self, tasks: Sequence[Task], number: int) -> Sampled:
        policy = RoundPolicy(self.policy, lambda: self._runner.idle)
        plan = await self._plan_of(policy, tasks, seed_of(self.recipe.seed, "round", number))
        sampler, asked = StateSampler(self._runner, None, plan), self._n_searches()
        walks = await gathered(self._walk(sampler, plan, task) for task in tasks)
        for walk in walks:
            for _, samples in walk:
                self.stats.count(samples)
        found = self._collect(walks, policy)
        found.facts["num_searches"] = self._n_searches() - asked
        return replace(found, at_end=sampler.credits == {"final"})

    async def _plan_of(self, policy: RoundPolicy, tasks: Sequence[Task], seed: int) -> SamplingPlan:
        recipe, settings, sampled = self.recipe, self._settings, self._environment.recipe
        lm, team = sampled.policy_of(recipe.predictors), self._environment.policies(policy, recipe.predictors)

        def role(need: NeedsCompletion) -> Role:
            if self._environment.role is not None:
                found = self._environment.role(need, policy)
                return found if found.sampled else replace(found, policy=AwaitedPolicy(found.policy, self._runner))
            if need.predictor in (recipe.predictors or {need.predictor}):
                return Role(policy, credit=settings.credit)
            other = policy_for(team, need.predictor)
            awaited = other if other is policy else AwaitedPolicy(other, self._runner)
            return Role(awaited, False, settings.credit, **sampled.decoding_of(need.predictor))

        plan = SamplingPlan(
            (ZERO_SHOT,), recipe.num_generations, seed, self.temperature, recipe.top_p or lm.top_p,
            recipe.max_completion_length or lm.max_tokens,
            role=role, reward=settings.reward, final=settings.end_reward, n_continuations=settings.n_continuations,
            final_weight=settings.final_weight, searched=None if self._plan is None else self._plan.searched,
        )  # fmt: skip
        if self._plan is None:
            plan = await with_credit(plan, self._runner, None, tasks, self._run)
        self._plan = plan
        return plan

    async def _walk(self, sampler: StateSampler, plan: SamplingPlan, task: Task) -> list[Group]:
        """The states of one run of the program, each with its samples."""
        groups: list[Group] = []
        results: SearchResults = {}
        path = None if self._paths is None else self._paths.get(task.id, {})
        try:
            point = BranchPoint(task, await self._runner.advance(task, (), results), results=results, fresh=True)
            while isinstance(point.need, NeedsCompletion):
                state = self._runner.state(task, point.need, len(point.steps), point.parent)
                samples = await sampler.sample_state(point, state)
                groups.append((state, samples))
                if path is None:
                    to_end = bool(sampler.credits - {"step"})
                    chosen = select_next(samples, task, plan.seed, state.draw, through_solved=to_end)
                else:
                    chosen = path.get(state.step)
                if chosen is None:
                    break
                point = await sampler.next_point(point, state, chosen)
        except (RetrievalError, ProgramError) as error:
            self.stats.fail(failure_of(error))
        return groups

    def _collect(self, walks: Sequence[Sequence[Group]], policy: RoundPolicy) -> Sampled:
        members: list[tuple[Sample, float]] = []
        places: list[tuple[int, int]] = []  # of the state, of the task
        for number, walk in enumerate(walks):
            for _, samples in self._scored(walk):
                members += samples
                places += [(places[-1][0] + 1 if places else 0, number)] * len(samples)
        made = [policy.made[sample.seed] for sample, _ in members]
        groups = [group for walk in walks for group in walk]
        found = [one for _, samples in groups for one in samples if one.completion is not None]
        written = [policy.made[sample.seed][1] for sample in found if sample.seed in policy.made]
        logprobs = [value for one in written for value in one.logprobs or ()]
        facts = {
            "completions/mean_length": sum(len(one.token_ids or ()) for one in written) / max(1, len(written)),
            "completions/clipped_ratio": sum(one.finish_reason == "length" for one in written) / max(1, len(written)),
            "num_samples": float(len(found)),
        }
        if logprobs:
            facts["entropy"] = -sum(logprobs) / len(logprobs)
        names, parts = self._parts([one for one, _ in members])
        facts |= self._facts(groups, names, parts)
        sequences = [(read, one.text if isinstance(read, Choice) else one.token_ids or ()) for read, one in made]
        states, tasks = tensor(places, dtype=int64).reshape(-1, 2).unbind(1)
        return Sampled(sequences, states, tensor([value for _, value in members]), parts, facts, tasks)

    def _facts(self, groups: Sequence[Group], names: Sequence[str], parts: Tensor) -> dict[str, float]:
        """For the log, what TRL has no name for: shares of completions, and the mean of each part of the reward."""
        found = [sample for _, samples in groups for sample in samples if sample.completion is not None]
        n_unparsed = sum(_unparsed(sample) for sample in found)
        means = {f"rewards/{name}/mean": float(parts[:, i].nanmean()) for i, name in enumerate(names) if len(names) > 1}
        return {
            "completions/unparsed": n_unparsed / max(1, len(found)),
            "completions/distinct": _distinct(groups),
        } | means

    def _parts(self, samples: Sequence[Sample]) -> tuple[list[str], Tensor]:
        """Names, and (n, n_parts) values; NaN where a part does not apply, 0 where a completion does not parse."""
        found = {name for sample in samples if sample.reward is not None for name in sample.components}
        names = sorted(name for name in found if name in self._scoring.parts or name.startswith("final"))
        values = [
            [sample.components.get(name, 0.0 if sample.reward is None else math.nan) for name in names]
            for sample in samples
        ]
        return names, tensor(values).reshape(len(samples), len(names))

    def _scored(self, groups: Sequence[Group]) -> list[tuple[State, list[tuple[Sample, float]]]]:
        """Samples with rewards; a completion that does not parse has its price; those of an outage are left out."""
        scored = []
        for state, samples in groups:
            known = [sample.reward for sample in samples if sample.reward is not None]
            price = (
                self._scoring.unparsed_reward if self.recipe.unparsed_reward is None else self.recipe.unparsed_reward
            )
            least = min([0.0, *known]) if price is None else price
            valid = [one for one in samples if one.is_sampled and (one.reward is not None or _unparsed(one))]
            if valid:
                scored.append((state, [(one, least if one.reward is None else one.reward) for one in valid]))
        return scored


def _stored_paths(run: Run) -> dict[str, dict[int, Sample]]:
    """The samples that went on, by question and step, of the policy that the run sampled last."""
    digest = run.manifest.policy_digest
    with Store(run.store, read_only=True) as store:
        paths: dict[str, dict[int, Sample]] = {}
        for group in store.finished(digest):
            chosen = {step.step: step.chosen for step in store.visits(group.policy_digest, group.state.task_id)}
            for sample in group.samples:
                if sample.id == chosen.get(group.state.step):
                    paths.setdefault(group.state.task_id, {})[group.state.step] = sample
    return paths


def _unparsed(sample: Sample) -> bool:
    return sample.failure is not None and sample.failure.kind == "parse"


def _distinct(groups: Sequence[Group]) -> float:
    """Different completions among those of a state: the share, a mean over states."""
    texts = [[sample.completion for sample in samples if sample.completion is not None] for _, samples in groups]
    shares = [len(set(own)) / len(own) for own in texts if own]
    return sum(shares) / max(1, len(shares))
