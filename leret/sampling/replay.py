"""`leret replay`: compute stored samples again with the run's own environment, and compare them with the store.

The sampler walks each question along its stored path. At each state, the store hides the samples to
replay, so the sampler makes them again from their seeds, exactly as `leret sample` did. Completions
of a server cannot be made again; they are searched and scored again as they are stored.
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Literal

from leret.core.aio import for_each
from leret.core.errors import ConfigError, LeretError, PolicyError
from leret.core.progress import Progress
from leret.core.runs import Run, machine, versions
from leret.core.types import Failure, Sample, SamplingParams, State, Task
from leret.policies.base import Completion, Policy, Request
from leret.policies.load import open_policies, policy_for, sampled_policy
from leret.policies.local.chat_template import dated, n_common
from leret.policies.local.policy import LocalPolicy
from leret.programs.needs import NeedsCompletion
from leret.programs.prompts import ZERO_SHOT
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.actors import SamplingPlan
from leret.rollouts.environment import Environment, changed_inputs
from leret.rollouts.states import StateSampler
from leret.rollouts.walk import Point, begin, walk
from leret.sampling.bank.bank import load_bank
from leret.sampling.stage import sampling_plan, with_bank
from leret.sampling.store.store import StateSamples, Store, dump

ROUNDING = 1e-5
"""Largest relative difference of a reward or a retriever's score that counts as rounding."""
_SHOWN = 40  # characters of a text from its first difference
_LATER = (
    "rewards that depend on later completions were not compared, "
    "because these completions are not stored"
)

Part = Literal[
    "question", "prompt", "recipe", "completion", "search", "reward", "logprob", "outage"
]


@dataclass(frozen=True)
class Difference:
    """The first part of a sample that differs from the store; ``detail`` has both values."""

    sample: str
    question: str
    step: int
    part: Part
    detail: str

    def __str__(self) -> str:
        return f"{self.sample} (question {self.question}, step {self.step}): {self.detail}"


@dataclass
class ReplayReport:
    """Counts of replayed samples.

    ``rounded`` samples equal the store up to the last bits of their numbers. ``completions`` is the
    number of samples with a new completion. ``largest`` is the largest difference of a
    log-probability or Q-value; None if the store has none. ``different`` counts ``differences`` by
    part.
    """

    samples: int = 0
    equal: int = 0
    rounded: int = 0
    different: dict[str, int] = field(default_factory=dict)
    completions: int = 0
    largest: float | None = None
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def replay(
    run: Run,
    sample: str | None = None,
    *,
    n_random: int | None = None,
    progress: Progress | None = None,
) -> ReplayReport:
    """Compute a run's samples again and compare them with the store, which does not change.

    Args:
        run: a run of `leret sample`.
        sample: id of the only sample to replay.
        n_random: number of samples to draw, always the same from one store; None means all.
        progress: shows how many samples are done.

    Raises:
        ConfigError: no sample has that id.
        RunError: the run was not made by `leret sample`.
    """
    progress = progress or Progress()
    report = ReplayReport()
    with (
        dated(run.manifest.date),
        Environment.open(run) as environment,
        Store(run.store, read_only=True) as store,
    ):
        wanted = _wanted(store.sample_ids(), sample, n_random)
        for name in changed_inputs(run, environment):
            report.notes.append(f"{name}: its content has changed since sampling")
        asyncio.run(_replay(run, environment, store, wanted, report, progress))
        progress.finish()
    report.notes += _machine_notes(run)
    parts = Counter(difference.part for difference in report.differences)
    report.different = {str(part): n for part, n in parts.items()}
    report.samples = report.equal + report.rounded + len(report.differences)
    if report.samples < len(wanted):
        n_off = len(wanted) - report.samples
        report.notes.append(f"{n_off:,} samples of abandoned paths were not replayed")
    return report


def _wanted(ids: Sequence[str], sample: str | None, n: int | None) -> set[str]:
    if sample is not None:
        if sample not in ids:
            raise ConfigError(
                f"--sample {sample}: no sample has this id; `leret store export` lists the ids"
            )
        return {sample}
    if n is not None and n < len(ids):
        ids = random.Random(0).sample(ids, n)
    return set(ids)


def _machine_notes(run: Run) -> Iterator[str]:
    manifest = run.manifest
    now = {**versions(), "machine": machine() or manifest.machine}
    changes = []
    for name, before in {**manifest.versions, "machine": manifest.machine}.items():
        if before is not None and before != now.get(name):
            changes.append(f"{name} {before} then, {now.get(name)} now")
    if changes:
        yield (
            f"sampled on another machine or with other versions ({'; '.join(changes)}): "
            "log-probabilities and scores may differ in the last bits, and rarely a token"
        )


async def _replay(
    run: Run,
    environment: Environment,
    store: Store,
    wanted: set[str],
    report: ReplayReport,
    progress: Progress,
) -> None:
    tasks = {task.id: task for task in environment.tasks(check=False)}
    by_policy: dict[str, list[tuple[StateSamples, ...]]] = {}
    by_question = groupby(store.groups(), lambda group: (group.policy_digest, group.state.task_id))
    for (policy_digest, _), members in by_question:
        groups = tuple(members)
        samples = chain.from_iterable(group.samples for group in groups)
        if any(sample.id in wanted for sample in samples):
            by_policy.setdefault(policy_digest, []).append(groups)
    progress.start("replaying", sum(map(len, by_policy.values())))
    with closing(SearchBatcher(environment.retriever)) as searches:
        runner = environment.runner(searches)
        for policy_digest, questions in by_policy.items():
            policy = _policy(run, environment, policy_digest, report)
            prompts = load_bank(run) or (ZERO_SHOT,)
            plan = with_bank(sampling_plan(environment.recipe, policy), prompts, environment)
            searched = run.manifest.searched or {}
            plan = replace(plan, searched=searched, stops=environment.replay.stops)
            repeats = not isinstance(policy, _StoredPolicy)
            tolerance = _tolerance(policy) if repeats else 0.0
            replayer = _Replayer(
                tasks, runner, plan, store, wanted, report, progress, repeats, tolerance
            )
            concurrency = environment.recipe.sampling.concurrency
            try:
                await for_each(questions, replayer.question, concurrency)
            finally:
                await policy.aclose()


class _StoredPolicy:
    """Stands in for a policy that cannot repeat its completions."""

    name = "stored completions"

    def __init__(self, policy_digest: str) -> None:
        self.digest = policy_digest

    async def complete(self, request: Request) -> list[Completion]:
        raise PolicyError("the policy's completions cannot be computed again")

    async def aclose(self) -> None:
        """Do nothing."""


def _policy(run: Run, environment: Environment, policy_digest: str, report: ReplayReport) -> Policy:
    """Open the policy with this digest; a stand-in, with a note, if it cannot repeat completions."""
    rounds = {record["digest"]: record for record in run.manifest.rounds}
    try:
        record = rounds.get(policy_digest, {})
        models = record.get("models") or {"": record.get("model", "")}
        recipe = environment.recipe.with_models(models)
        for settings in recipe.by_predictor.values():
            if not settings.repeatable:
                raise PolicyError(f"{settings.model} is on a server (policy.kind: {settings.kind})")
        policy = open_policies(recipe.by_predictor, sampled_policy)
        if policy.digest != policy_digest:
            raise PolicyError(f"{policy.name} has changed since sampling")
    except LeretError as error:
        report.notes.append(f"completions were not computed again and not compared: {error}")
        return _StoredPolicy(policy_digest)
    return policy


def _tolerance(policy: Policy) -> float:
    """Return the largest difference of a log-probability that counts as rounding.

    It is the square root of the distance from 1 to the next number in the precision of the weights.
    """
    import torch

    dtype = torch.float32
    actor = policy_for(policy, "")
    if isinstance(actor, LocalPolicy):
        dtype = next(actor.model.network.parameters()).dtype
    return math.sqrt(torch.finfo(dtype).eps)


@dataclass
class _Replayer:
    """Replays the samples of one policy.

    To the sampler, it is a store without the samples to replay, which keeps no new samples.
    """

    sampler: StateSampler = field(init=False)
    tasks: Mapping[str, Task]
    runner: ProgramRunner
    plan: SamplingPlan
    store: Store
    wanted: set[str]
    report: ReplayReport
    progress: Progress
    repeats: bool  # whether the policy repeats its completions
    tolerance: float
    hidden: dict[str, list[Sample]] = field(default_factory=dict)  # samples not replayed, by state

    def __post_init__(self) -> None:
        self.sampler = StateSampler(self.runner, self, self.plan)

    def samples_at(
        self, question_id: str, step: int, state_id: str, policy_digest: str
    ) -> list[Sample]:
        return self.hidden.pop(state_id)

    def put_samples(self, samples: Iterable[Sample], origin: SamplingParams) -> None:
        """Do nothing."""

    def put_rewards(self, samples: Iterable[Sample]) -> None:
        """Do nothing."""

    async def question(self, groups: Sequence[StateSamples]) -> None:
        """Replay the samples of a question."""
        visits = self.store.visits(groups[0].policy_digest, groups[0].state.task_id)
        visited = {visit.step: visit.state_id for visit in visits}
        left = {}
        for group in groups:  # a state of an abandoned path is not replayed
            if visited.get(group.state.step, group.state.id) == group.state.id:
                left[group.state.step] = group
        if not any(map(self._of, left.values())):
            self.progress.advance(1, different=len(self.report.differences))
            return
        task = self.tasks.get(groups[0].state.task_id)
        fault: tuple[Part, str] = "question", "the run's data no longer has the question"
        if task is not None:
            fault = await self._path(task, left)
        for group in left.values():
            self._lost(group, *fault)
        self.progress.advance(1, different=len(self.report.differences))

    async def _path(self, task: Task, left: dict[int, StateSamples]) -> tuple[Part, str]:
        """Replay groups along a question's stored path; return why the path misses those left."""
        last = max(step for step, group in left.items() if self._of(group))
        visits = self.store.visits(left[last].policy_digest, task.id)
        chosen = {visit.chosen for visit in visits}

        async def visit(point: Point) -> Point | None:
            assert isinstance(point.need, NeedsCompletion)
            state = self.runner.state(task, point.need, len(point.steps), point.parent)
            group = left.pop(state.step, None)
            if group is None:
                return None
            if group.state.id != state.id:
                self._lost(group, "prompt", _prompt_difference(group.state, state))
                return None
            await self._group(point, state, group)
            for sample in group.samples:
                if sample.id in chosen and state.step < last:
                    return await self.sampler.next_point(point, sample)
            return None

        path = await walk(begin(self.runner, task), visit)
        if path.failure is not None:
            return "outage", f"not reached: {path.failure.message}"
        return "prompt", "the stored path no longer leads to this sample"

    def _of(self, group: StateSamples) -> list[Sample]:
        return [sample for sample in group.samples if sample.id in self.wanted]

    async def _group(self, point: Point, state: State, group: StateSamples) -> None:
        """Replay samples of one state."""
        wanted = self._of(group)
        hidden = [sample for sample in group.samples if sample not in wanted]
        if not self.repeats:
            hidden += map(_unscored, wanted)
        self.hidden[state.id] = hidden
        replayed = {sample.id: sample for sample in await self.sampler.sample_state(point, state)}
        for sample in wanted:
            now = replayed.get(sample.id)
            if now is None:
                detail = "the recipe or the prompt bank no longer asks for this sample"
                self._add(sample, "recipe", detail)
                continue
            if not self.repeats and now.failure is not None and now.failure.kind == "policy":
                now = await self._searched(point, sample)
            self._compare(sample, now)

    async def _searched(self, point: Point, sample: Sample) -> Sample:
        """Return a sample with new searches and its stored reward."""
        if _LATER not in self.report.notes:
            self.report.notes.append(_LATER)
        after = await self.sampler.next_point(point, sample)
        ranking = after.outcome().ranking
        scores = tuple([passage.score for passage in ranking])
        return replace(sample, doc_ids=after.outcome().doc_ids, scores=scores)

    def _compare(self, stored: Sample, now: Sample) -> None:
        report = self.report
        report.completions += self.repeats
        fault = difference(stored, now, self.tolerance)
        if fault is not None:
            return self._add(stored, *fault)
        gaps = [(part, abs(before - after)) for part, _, before, after in _numbers(stored, now)]
        is_equal = all(gap == 0 for _, gap in gaps)
        report.equal += is_equal
        report.rounded += not is_equal
        for part, gap in gaps:
            if part == "logprob" and self.repeats:
                report.largest = max(report.largest or 0.0, gap)

    def _lost(self, group: StateSamples, part: Part, detail: str) -> None:
        for sample in self._of(group):
            self._add(sample, part, detail)

    def _add(self, sample: Sample, part: Part, detail: str) -> None:
        self.report.differences.append(
            Difference(sample.id, sample.task_id, sample.step, part, detail)
        )


def _unscored(sample: Sample) -> Sample:
    """Return a sample that the sampler scores again; one without a completion stays as it is."""
    if sample.completion is None:
        return sample
    return replace(sample, failure=Failure("program", "not scored yet"))


def difference(stored: Sample, now: Sample, tolerance: float) -> tuple[Part, str] | None:
    """Return the first part of a sample that differs from the store, with both values.

    The order is completion, search, reward, log-probability. ``tolerance`` is the largest
    difference of a log-probability or Q-value that counts as rounding.
    """
    if now.failure is not None and now.failure.is_outage:
        return "outage", f"{now.failure.kind}: {now.failure.message}"
    kinds = [sample.failure and sample.failure.kind for sample in (stored, now)]
    sequences: list[tuple[Part, str, Sequence[object], Sequence[object]]] = [
        ("completion", "character", stored.completion or "", now.completion or ""),
        ("reward", "failure", [kinds[0]], [kinds[1]]),
        ("search", "character of the outputs", dump(stored.outputs), dump(now.outputs)),
        ("search", "rank", stored.doc_ids, now.doc_ids),
    ]
    if stored.token_ids and now.token_ids:
        sequences.insert(0, ("completion", "token", stored.token_ids, now.token_ids))
    for part, what, *both in sequences:
        if both[0] != both[1]:
            return part, f"{what} {_first_difference(*both)}"
    for part, name, before, after in _numbers(stored, now):
        limit = tolerance if part == "logprob" else ROUNDING * max(1.0, abs(before))
        if abs(before - after) > limit:
            return part, f"{name}: {before:.6g} in the store, {after:.6g} now"
    return None


def _first_difference(stored: Sequence[object], now: Sequence[object]) -> str:
    """Return the number of the first item that differs, from 1, and this item (or text) of both."""
    same = n_common(stored, now)
    items = slice(same, same + (_SHOWN if isinstance(stored, str) else 1))
    return f"{same + 1}: {stored[items]!r} in the store, {now[items]!r} now"


def _prompt_difference(stored: State, now: State) -> str:
    start = "the prompt differs"
    if stored.parent is not None:
        start += f" (it follows from sample {stored.parent})"
    return f"{start} at character {_first_difference(dump(stored.messages), dump(now.messages))}"


def _numbers(stored: Sample, now: Sample) -> Iterator[tuple[Part, str, float, float]]:
    """Yield part, name and both values of each number that both samples have."""
    pairs = zip(stored.doc_ids, stored.scores, now.scores, strict=True)
    for doc_id, before, after in pairs:
        yield "search", f"score of {doc_id}", before, after
    rewards = {"reward": now.reward or 0.0, **now.components}
    for name, before in {"reward": stored.reward or 0.0, **stored.components}.items():
        part: Part = "logprob" if name in ("q", "logp") else "reward"
        yield part, name, before, rewards.get(name, before)
    if stored.logprobs and now.logprobs:
        tokens = zip(stored.logprobs, array("f", now.logprobs), strict=True)
        for i, (before, after) in enumerate(tokens, 1):
            yield "logprob", f"log-probability of token {i}", before, after
