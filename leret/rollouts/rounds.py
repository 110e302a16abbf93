"""Rounds of samples for training, along program runs of the policy or along stored paths.

Results must not depend on timing, but the composition of a batch affects the last digits of logits,
and rarely a token. So a round waits until every open walk has a request, and then completes all
requests in a fixed order.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, int64, tensor

from leret.config.training import RoundRecipe
from leret.core.errors import ConfigError
from leret.core.runs import Run
from leret.core.types import Choice, Sample, State, Task, seed_of
from leret.policies.base import Completion, PromptTooLongError, Request
from leret.policies.load import policy_for
from leret.programs.needs import NeedsCompletion
from leret.programs.prompts import ZERO_SHOT
from leret.retrieval.base import Retriever
from leret.retrieval.batching import SearchBatcher
from leret.rewards import scoring
from leret.rollouts.actors import Role, SamplingPlan
from leret.rollouts.credit import training_rewards
from leret.rollouts.environment import Environment, scored_by
from leret.rollouts.facts import (
    Group,
    completed_samples,
    completion_facts,
    distinct,
    reward_percentiles,
    word_facts,
)
from leret.rollouts.failures import SamplingStats, refuse_failures
from leret.rollouts.questions import sample_question
from leret.rollouts.selection import select_next
from leret.rollouts.states import StateSampler, with_credit
from leret.rollouts.trees import sample_tree
from leret.rollouts.walk import OpenWalks, Point, begin, walk

if TYPE_CHECKING:
    from leret.programs.runner import ProgramRunner

StoredPaths = Mapping[str, Mapping[int, Sample]]
"""Stored samples that continued a path, by question and step."""


class LivePolicy(Protocol):
    """A policy in training. Policies that generate text also have ``prompt_ids``."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    def renew(self, digest: str) -> None: ...
    def complete_many(
        self, requests: Sequence[Request]
    ) -> Sequence[list[Completion] | BaseException]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Sampled:
    """Rewarded samples of a round, ordered by task and state.

    Attributes:
        sequences: token ids of prompt and completion (with the end token if reached), or `Choice`
            and candidate id.
        groups: (n,) index of the state, from 0.
        rewards: (n,) float32.
        parts: (n, n_parts) parts of the rewards, NaN for parts that do not apply.
        metrics: metrics for the log, mostly means over the round, with the names that TRL uses.
        walks: (n,) index of the task, from 0.
        at_end: whether the reward is the final reward at every step.
        predictors: (n,) predictor names, to split a round among several policies in training.
        logps: log-probabilities of each completion's tokens as sampled, if known.
        teacher_prompts: prompt ids of a teacher that sees hints; empty without hints.
        rollouts: (n,) index of the rollout, if whole rollouts of a task are compared (``groups:
            question``); else None.
    """

    sequences: Sequence[tuple[Any, Any]]
    groups: Tensor
    rewards: Tensor
    parts: Tensor
    metrics: dict[str, float]
    walks: Tensor = field(default_factory=lambda: tensor([]))
    at_end: bool = False
    predictors: Sequence[str] = ()
    rollouts: Tensor | None = None
    logps: Sequence[Sequence[float]] = ()
    teacher_prompts: Sequence[Sequence[int]] = ()

    def of(self, predictors: Collection[str]) -> Sampled:
        """Return the samples of some predictors, with states and tasks numbered from 0."""
        numbers = [i for i, name in enumerate(self.predictors) if name in predictors]
        rows = tensor(numbers, dtype=int64)
        _, groups = self.groups[rows].unique(return_inverse=True)
        _, walks = self.walks[rows].unique(return_inverse=True)
        return replace(
            self,
            sequences=[self.sequences[i] for i in numbers],
            groups=groups,
            rewards=self.rewards[rows],
            parts=self.parts[rows],
            walks=walks,
            predictors=[self.predictors[i] for i in numbers],
            logps=[self.logps[i] for i in numbers],
            teacher_prompts=[self.teacher_prompts[i] for i in numbers if self.teacher_prompts],
        )


class Round:
    """Collects the requests of a round's open walks.

    Each live policy completes its requests in one batch. ``completions`` maps a request's seed to
    the prompt ids (or the choice) and the completion.
    """

    def __init__(self) -> None:
        self.walks = OpenWalks(self._answer_when_all_wait)
        self.completions: dict[int, tuple[Sequence[int] | Choice, Completion]] = {}
        self._waiting: list[tuple[LivePolicy, Request, asyncio.Future[list[Completion]]]] = []

    async def complete(self, policy: LivePolicy, request: Request) -> list[Completion]:
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((policy, request, future))
        self._answer_when_all_wait()
        return await future

    def _answer_when_all_wait(self) -> None:
        if len(self._waiting) < self.walks.n:
            return
        waiting = self._waiting
        self._waiting = []
        waiting.sort(key=lambda row: (json.dumps(row[1].messages), row[1].seeds))
        by_policy: dict[LivePolicy, list[tuple[Request, asyncio.Future[list[Completion]]]]] = {}
        for policy, request, future in waiting:
            by_policy.setdefault(policy, []).append((request, future))
        for policy, requests in by_policy.items():
            self._answer(policy, requests)

    def _answer(
        self,
        policy: LivePolicy,
        waiting: Sequence[tuple[Request, asyncio.Future[list[Completion]]]],
    ) -> None:
        fitting = []
        try:
            for request, future in waiting:
                prompt = _read(policy, request, future)
                if prompt:
                    fitting.append((request, future, prompt))
            answers = policy.complete_many([request for request, _, _ in fitting])
        except Exception as error:
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for (request, future, prompt), answer in zip(fitting, answers, strict=True):
            if isinstance(answer, BaseException):  # a policy on a server returns its errors
                future.set_exception(answer)
                continue
            for seed, completion in zip(request.seeds, answer, strict=True):
                self.completions[seed] = (prompt, completion)
            future.set_result(answer)


def _read(
    policy: Any, request: Request, future: asyncio.Future[list[Completion]]
) -> Sequence[int] | Choice | None:
    try:
        return request.choice or policy.prompt_ids(request.messages)
    except PromptTooLongError as error:
        future.set_exception(error)
        return None


class RoundPolicy:
    """A live policy with the interface of `Policy`; its requests go through a round."""

    def __init__(self, round_: Round, policy: LivePolicy) -> None:
        self.name = policy.name
        self.digest = policy.digest
        self._round = round_
        self._policy = policy

    async def complete(self, request: Request) -> list[Completion]:
        return await self._round.complete(self._policy, request)

    async def aclose(self) -> None:
        """Do nothing, because training owns the model."""


def round_of(n_tasks: int, size: int, seed: int, number: int) -> list[int]:
    """Return the distinct indices of a round's tasks. Every epoch has a new order."""
    orders: dict[int, list[int]] = {}
    indices: dict[int, None] = {}
    for position in range(number * size, (number + 1) * size):
        epoch, i = divmod(position, n_tasks)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed} {epoch}").sample(range(n_tasks), n_tasks)
        indices[orders[epoch][i]] = None
    return list(indices)


class RoundSampler:
    """Samples rounds of a run's tasks.

    ``policies`` holds the policies in training by predictor (``""``: all predictors), and ``keys``
    holds their sampling keys (fields of `Role`) that differ from the plan's. The trainer may change
    these and ``temperature``. Rounds follow ``paths``; if None, a path continues with one of the
    round's samples.
    """

    def __init__(
        self,
        recipe: RoundRecipe,
        environment: Environment,
        run: Run,
        policy: LivePolicy,
        paths: StoredPaths | None = None,
    ) -> None:
        self.recipe = recipe
        self.policy = policy
        self.stats = SamplingStats()
        lm = environment.recipe.policy_of(recipe.predictors)
        self.temperature = recipe.temperature or lm.temperature
        self.environment = environment
        self._run = run
        self._settings = scored_by(environment, recipe)
        if recipe.sums_steps and self._settings.credit == "both":
            raise ConfigError(
                f"credit: {recipe.algorithm} adds up step rewards itself; set credit to step or "
                "final"
            )
        self._scoring = scoring(self._settings.reward)
        retriever: Retriever | None = environment.retriever  # None: the program brings a retriever
        self._searches = None if retriever is None else SearchBatcher(retriever)
        self.runner: ProgramRunner = environment.runner(self._searches)
        self._paths = paths
        self._hints = environment.hints() if getattr(recipe, "hint", None) else None
        self._hinted: dict[str, Sequence[int] | None] = {}  # prompt ids with a hint, by state
        self.keys: Mapping[str, Mapping[str, Any]] = {}
        self._plan: SamplingPlan | None = None

    @property
    def policy(self) -> LivePolicy:
        return next(iter(self.policies.values()))

    @policy.setter
    def policy(self, policy: LivePolicy) -> None:
        self.policies = dict.fromkeys(self.recipe.predictors or [""], policy)

    def close(self) -> None:
        if self._searches is not None:
            self._searches.close()

    @property
    def _unparsed_reward(self) -> float | None:
        if self.recipe.unparsed_reward is not None:
            return self.recipe.unparsed_reward
        return self._scoring.unparsed_reward

    def _n_searches(self) -> float:
        if self._searches is None:
            return 0.0
        return float(self._searches.counts()["asked"])

    def sample(self, tasks: Sequence[Task], number: int, *, last: bool = False) -> Sampled:
        """Sample one round.

        LeretError if too many samples failed, or if ``last`` and no round had a reward.
        """
        sampled = asyncio.run(self._sample(tasks, number))
        refuse_failures(
            self.stats,
            self.environment.recipe.sampling.max_error_rate,
            max_unparsed_rate=1.0,
            last=last,
        )
        return sampled

    async def _sample(self, tasks: Sequence[Task], number: int) -> Sampled:
        round_ = Round()
        plan = await self.plan_of(round_, tasks, seed_of(self.recipe.seed, "round", number))
        sampler = StateSampler(self.runner, None, plan, walks=round_.walks)
        self._hinted = {}
        if self._hints is not None:
            self._hints.shown = self._hints.withheld = 0
        n_before = self._n_searches()
        rollouts = await self.roll_out(sampler, plan, tasks)
        for groups in rollouts:
            for _, samples in groups:
                self.stats.count(samples)
        sampled = self._collect(tasks, rollouts, round_)
        sampled.metrics["num_searches"] = self._n_searches() - n_before
        return replace(sampled, at_end=sampler.credits == {"final"})

    async def plan_of(self, round_: Round, tasks: Sequence[Task], seed: int) -> SamplingPlan:
        recipe = self.recipe
        settings = self._settings
        sampling_recipe = self.environment.recipe
        lm = sampling_recipe.policy_of(recipe.predictors)
        live = {name: RoundPolicy(round_, policy) for name, policy in self.policies.items()}
        first = next(iter(live.values()))
        policies = self.environment.policies(first, recipe.predictors)

        def role(need: NeedsCompletion) -> Role:
            policy = live.get(need.predictor) or live.get("")
            if self.environment.role is not None:
                return self.environment.role(need, policy or first)
            if policy is not None:
                return Role(policy, credit=settings.credit, **self.keys.get(need.predictor, {}))
            decoding = sampling_recipe.decoding_of(need.predictor)
            return Role(policy_for(policies, need.predictor), False, settings.credit, **decoding)

        plan = SamplingPlan.of(
            settings,
            role,
            prompts=(ZERO_SHOT,),
            n_samples=recipe.num_generations,
            seed=seed,
            temperature=self.temperature,
            top_p=recipe.top_p or lm.top_p,
            max_tokens=recipe.max_completion_length or lm.max_tokens,
        )
        if self._plan is None:
            plan = await with_credit(plan, self.runner, tasks, self._run, round_.walks)
            if recipe.sums_steps:
                plan = replace(plan, stops=frozenset())
        else:
            plan = replace(plan, searched=self._plan.searched, stops=self._plan.stops)
        self._plan = plan
        return plan

    async def roll_out(
        self, sampler: StateSampler, plan: SamplingPlan, tasks: Sequence[Task]
    ) -> list[list[Group]]:
        starts = [begin(self.runner, task) for task in tasks]
        return await sampler.walks.gather(self._walk(sampler, plan, start) for start in starts)

    async def _walk(
        self, sampler: StateSampler, plan: SamplingPlan, start: Awaitable[Point]
    ) -> list[Group]:
        groups: list[Group] = []

        async def follow(branch: Awaitable[Point]) -> list[Group]:
            return await self._walk(sampler, plan, branch)

        async def visit(point: Point) -> Point | None:
            need = point.need
            assert isinstance(need, NeedsCompletion)
            unparsed_reward = self._unparsed_reward
            if self.recipe.groups == "question":
                groups.extend(
                    await sample_question(self.runner, sampler, plan, point, unparsed_reward)
                )
                return None
            state = self.runner.state(point.task, need, len(point.steps), point.parent)
            if self.recipe.branches and need.choice is not None and plan.role_of(need).sampled:
                groups.extend(await sample_tree(sampler, point, state, follow, unparsed_reward))
                return None
            samples = await sampler.sample_state(point, state)
            groups.append((state, samples))
            if self._hints is not None:
                self._hinted[state.id] = self._teacher_prompt(point, state, samples)
            if self._paths is None:
                to_end = bool(sampler.credits - {"step"})
                chosen = select_next(
                    samples, point.task, plan.seed, state.draw, through_solved=to_end
                )
            else:
                chosen = self._paths.get(point.task.id, {}).get(state.step)
            if chosen is None:
                return None
            return await sampler.next_point(point, chosen)

        failure = (await walk(start, visit)).failure
        if failure is not None:
            self.stats.fail(failure)
        return groups

    def _collect(
        self, tasks: Sequence[Task], rollouts: Sequence[Sequence[Group]], round_: Round
    ) -> Sampled:
        samples: list[Sample] = []
        predictors: list[str] = []
        states: list[int] = []
        walks: list[int] = []
        n_states = 0
        groups = list(chain.from_iterable(rollouts))
        for number, rollout in enumerate(rollouts):
            for state, rewarded in self.scored(rollout):
                samples += rewarded
                n = len(rewarded)
                predictors += [state.predictor] * n
                states += [n_states] * n
                walks += [number] * n
                n_states += 1
        picks = self.runner.formatter.picks
        if self.recipe.branches and not set(predictors) - set(picks) and not self.stats.n_failed:
            raise ConfigError(
                f"algorithm: {self.recipe.algorithm} rewards a pick by the writer's completions "
                "after it, but no step of the program writes after a pick; use algorithm: pick"
            )
        written = [group for group in groups if group[0].predictor not in picks]
        if self.recipe.branches:  # the metrics of a joint training are the writer's
            groups = written
        rewards = tensor([sample.reward for sample in samples])
        names, parts = self.parts_of(samples)
        metrics = self.metrics_of(groups, names, parts, rewards)
        metrics |= completion_facts(groups, round_.completions)
        if self._hints is not None:
            metrics["hint/shown"] = self._hints.shown / max(1, len(groups))
            metrics["hint/withheld"] = self._hints.withheld / max(1, len(groups))
        metrics |= word_facts(written, tasks, self.recipe.branches)
        sequences: list[tuple[Sequence[int] | Choice, Sequence[int] | str]] = []
        logps: list[Sequence[float]] = []
        teacher_prompts: list[Sequence[int]] = []
        for sample in samples:
            prompt, completion = round_.completions[sample.seed]
            logps.append(completion.logprobs or ())
            if isinstance(prompt, Choice):
                sequences.append((prompt, completion.text))
                continue
            sequences.append((prompt, completion.token_ids or ()))
            if self._hints is not None:
                teacher_prompts.append(self._hinted[sample.state_id] or prompt)
        walk_rows = tensor(walks, dtype=int64)
        rollout_rows = None
        if self.recipe.groups == "question":
            index = tensor([sample.index for sample in samples], dtype=int64)
            numbers = walk_rows * self.recipe.num_generations + index
            _, rollout_rows = numbers.unique(return_inverse=True)
        return Sampled(
            sequences,
            tensor(states, dtype=int64),
            rewards,
            parts,
            metrics,
            walk_rows,
            predictors=predictors,
            rollouts=rollout_rows,
            logps=logps,
            teacher_prompts=teacher_prompts,
        )

    def _teacher_prompt(
        self, point: Point, state: State, samples: Sequence[Sample]
    ) -> Sequence[int] | None:
        """Return the ids of a state's prompt with the hint.

        Return None, and count the hint as withheld, if the longest sample does not fit after it.
        """
        assert self._hints is not None
        assert isinstance(point.need, NeedsCompletion)
        n_shown = self._hints.shown
        messages = self._hints.show(state.messages, point.task, point.need)
        policy: Any = self.policies.get(state.predictor) or self.policy
        longest = max([sample.n_completion_tokens or 0 for sample in samples], default=0)
        try:
            # An end token, which some servers do not count.
            ids: Sequence[int] = policy.prompt_ids(messages, longest + 1)
        except PromptTooLongError:
            self._hints.withheld += self._hints.shown - n_shown
            self._hints.shown = n_shown
            return None
        return ids

    def metrics_of(
        self, groups: Sequence[Group], names: Sequence[str], parts: Tensor, rewards: Tensor
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if len(names) > 1:
            for i, name in enumerate(names):
                metrics[f"rewards/{name}/mean"] = float(parts[:, i].nanmean())
        samples = completed_samples(groups)
        n_unparsed = sum(sample.is_unparsed for sample in samples)
        metrics["completions/unparsed"] = n_unparsed / max(1, len(samples))
        metrics["completions/distinct"] = distinct(groups)
        return metrics | reward_percentiles(rewards)

    def parts_of(self, samples: Sequence[Sample]) -> tuple[list[str], Tensor]:
        """Return the names of the parts and their values (n, n_parts).

        A part that does not apply is NaN. The parts of an unparsed completion are 0.
        """
        components: set[str] = set()
        for sample in samples:
            if not sample.is_unparsed:
                components |= sample.components.keys()
        names = sorted(
            name for name in components if name in self._scoring.parts or name.startswith("final")
        )
        rows: list[list[float]] = []
        for sample in samples:
            missing = 0.0 if sample.is_unparsed else math.nan
            rows.append([sample.components.get(name, missing) for name in names])
        return names, tensor(rows).reshape(len(samples), len(names))

    def scored(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with samples to train on, with these samples alone."""
        scored: list[Group] = []
        for state, samples in groups:
            rewarded = training_rewards(samples, self._unparsed_reward)
            if rewarded:
                scored.append((state, rewarded))
        return scored
