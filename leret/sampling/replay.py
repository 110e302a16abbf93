"""`leret replay`: compute stored samples again with the run's own environment, and compare them with the store.

The sampler walks each question along its stored path. At each state, the store hides the samples to
replay, so the sampler makes them again from their seeds, exactly as `leret sample` did. Completions
of a server cannot be made again; they are searched and scored again as they are stored.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Literal

from leret.config.policy import LocalPolicySettings, PickerSettings, PolicySettings
from leret.core.aio import for_each
from leret.core.classes import is_path
from leret.core.errors import ConfigError, LeretError, PolicyError
from leret.core.progress import Progress
from leret.core.runs import Run, machine, versions
from leret.core.types import Failure, Sample, SamplingParams, State, Task
from leret.policies.base import Completion, Policy, Request
from leret.policies.load import PolicySet, open_policies, sampled_policy
from leret.policies.local.chat_template import dated
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
from leret.sampling.stage import sampling_plan
from leret.sampling.store.store import StateSamples, Store, dump

ROUNDING = 1e-5
"""Largest relative difference of a reward or a retriever's score that counts as rounding."""
_BEFORE, _AFTER = 10, 40  # characters shown of a text before and after its first difference

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
    log-probability; None if the store has none. ``different`` counts ``differences`` by part.
    """

    samples: int = 0
    equal: int = 0
    rounded: int = 0
    different: dict[str, int] = field(default_factory=dict)
    completions: int = 0
    largest: float | None = None
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def replay(
    run: Run,
    sample: str | None = None,
    *,
    n_random: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> ReplayReport:
    """Compute a run's samples again and compare them with the store, which does not change.

    Args:
        run: a run of `leret sample`.
        sample: id of the only sample to replay, or the beginning of its id.
        n_random: number of samples to draw; None means all.
        seed: seed of the draw.
        progress: shows how many samples are done.

    Raises:
        ConfigError: no sample, or more than one, has that id.
        RunError: the run was not made by `leret sample`.
    """
    began = time.monotonic()
    progress = progress or Progress()
    report = ReplayReport()
    with (
        dated(run.manifest.date),
        Environment.open(run) as environment,
        Store(run.store, read_only=True) as store,
    ):
        wanted = _wanted(store.sample_ids(), sample, n_random, seed)
        for name in changed_inputs(run, environment):
            report.notes.append(f"{name}: its content has changed since sampling")
        progress.start("replaying", len(wanted))
        asyncio.run(_replay(run, environment, store, wanted, report, progress))
        progress.finish()
    report.notes += _machine_notes(run)
    parts = Counter(difference.part for difference in report.differences)
    report.different = {str(part): n for part, n in parts.items()}
    report.samples = report.equal + report.rounded + len(report.differences)
    report.seconds = round(time.monotonic() - began, 3)
    return report


def _wanted(ids: Sequence[str], sample: str | None, n: int | None, seed: int) -> set[str]:
    if sample is not None:
        ids = [id for id in ids if id.startswith(sample)]
        if len(ids) != 1:
            raise ConfigError(
                f"--sample {sample}: {len(ids)} samples have this id; "
                "`leret store export` lists the ids"
            )
    if n is not None and n < len(ids):
        ids = random.Random(seed).sample(ids, n)
    return set(ids)


def _machine_notes(run: Run) -> Iterator[str]:
    manifest = run.manifest
    now: dict[str, Any] = {**versions(), **machine()}
    changes = []
    for name, value in {**manifest.versions, **manifest.machine}.items():
        if name in now and now[name] != value:
            changes.append(f"{name} {value} then, {now[name]} now")
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
    with closing(SearchBatcher(environment.retriever)) as searches:
        runner = environment.runner(searches)
        for policy_digest, groups in groupby(store.groups(), lambda group: group.policy_digest):
            questions = _questions(groups, wanted)
            first = next(questions, None)
            if first is None:
                continue
            policy = _policy(run, environment, policy_digest, report)
            try:
                plan = _plan(run, environment, policy)
                replayer = _Replayer(tasks, runner, plan, policy, store, wanted, report, progress)
                concurrency = environment.recipe.sampling.concurrency
                await for_each(chain([first], questions), replayer.question, concurrency)
            finally:
                await policy.aclose()


def _questions(
    groups: Iterable[StateSamples], wanted: set[str]
) -> Iterator[tuple[StateSamples, ...]]:
    """Yield the groups of each question that has samples to replay."""
    for _, members in groupby(groups, lambda group: group.state.task_id):
        question = tuple(members)
        samples = chain.from_iterable(group.samples for group in question)
        if any(sample.id in wanted for sample in samples):
            yield question


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
    try:
        policy = open_policies(_settings(run, environment, policy_digest), sampled_policy)
        if policy.digest != policy_digest:
            raise PolicyError(f"{policy.name} has changed since sampling")
    except LeretError as error:
        report.notes.append(f"completions were not computed again and not compared: {error}")
        return _StoredPolicy(policy_digest)
    return policy


def _settings(run: Run, environment: Environment, policy_digest: str) -> dict[str, PolicySettings]:
    """Return the settings of the policies of a sampling round, by predictor."""
    rounds = {record["digest"]: record for record in run.manifest.rounds}
    record = rounds.get(policy_digest)
    if record is None:
        raise PolicyError(f"run.yaml does not name the policy with digest {policy_digest[:8]}")
    models = record.get("models") or {"": record["model"]}
    settings = {}
    for name, policy in environment.recipe.by_predictor.items():
        in_process = isinstance(policy, LocalPolicySettings | PickerSettings)
        if not in_process and not is_path(policy.kind):
            raise PolicyError(f"{policy.model} is on a server (policy.kind: {policy.kind})")
        settings[name] = policy.model_copy(update={"model": models.get(name, policy.model)})
    return settings


def _plan(run: Run, environment: Environment, policy: Policy) -> SamplingPlan:
    return replace(
        sampling_plan(environment.recipe, policy),
        prompts=tuple(load_bank(run) or (ZERO_SHOT,)),
        searched=run.manifest.searched or {},
        stops=environment.replay.stops,
    )


def _tolerance(policy: Policy) -> float:
    """Return the largest difference of a log-probability that counts as rounding.

    It is the square root of the spacing of numbers near 1 in the coarsest precision of the weights.
    """
    import torch

    members = policy.by_predictor.values() if isinstance(policy, PolicySet) else [policy]
    spacings = [torch.finfo(torch.float32).eps]
    for member in members:
        if isinstance(member, LocalPolicy):
            weights = next(member.model.network.parameters())
            spacings.append(torch.finfo(weights.dtype).eps)
    return math.sqrt(max(spacings))


class _Hidden:
    """The store as the sampler sees it: without the samples to replay. New samples are not kept."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], list[Sample]] = {}

    def samples_at(
        self, question_id: str, step: int, state_id: str, policy_digest: str
    ) -> list[Sample]:
        return self.samples.pop((question_id, step))

    def put_samples(self, samples: Iterable[Sample], origin: SamplingParams) -> None:
        """Do nothing."""

    def put_rewards(self, samples: Iterable[Sample]) -> None:
        """Do nothing."""


class _Replayer:
    """Replays the samples of one policy."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        runner: ProgramRunner,
        plan: SamplingPlan,
        policy: Policy,
        store: Store,
        wanted: set[str],
        report: ReplayReport,
        progress: Progress,
    ) -> None:
        self._tasks = tasks
        self._progress = progress
        self._hidden = _Hidden()
        self._sampler = StateSampler(runner, self._hidden, plan)
        self._runner = runner
        self._store = store
        self._wanted = wanted
        self._report = report
        self._repeats = not isinstance(policy, _StoredPolicy)
        self._tolerance = _tolerance(policy) if self._repeats else 0.0

    async def question(self, groups: Sequence[StateSamples]) -> None:
        """Replay the samples of a question."""
        task = self._tasks.get(groups[0].state.task_id)
        if task is None:
            self._lost(groups, "question", "the run's data no longer has the question")
        else:
            await self._path(task, groups)
        n = sum(len(self._of_group(group)) for group in groups)
        self._progress.advance(n, different=len(self._report.differences))

    async def _path(self, task: Task, groups: Sequence[StateSamples]) -> None:
        """Replay the samples along a question's stored path."""
        stored = {(group.state.step, group.state.id): group for group in groups}
        left = {key: group for key, group in stored.items() if self._of_group(group)}
        policy_digest = groups[0].policy_digest
        visits = self._store.visits(policy_digest, task.id)
        chosen = {visit.step: visit.chosen for visit in visits}
        states: dict[int, State] = {}

        async def visit(point: Point) -> Point | None:
            assert isinstance(point.need, NeedsCompletion)
            step = len(point.steps)
            state = self._runner.state(point.task, point.need, step, point.parent)
            states[step] = state
            group = stored.get((step, state.id))
            if group is None:
                return None
            if left.pop((step, state.id), None) is not None:
                await self._group(point, state, group)
            following = None
            for sample in group.samples:
                if left and sample.id == chosen.get(step):
                    following = await self._sampler.next_point(point, sample)
            return following

        path = await walk(begin(self._runner, task), visit)
        for group in left.values():
            state = states.get(group.state.step)
            if path.failure is not None:
                self._lost([group], "outage", f"not reached: {path.failure.message}")
            elif state is None:
                self._lost([group], "prompt", "the stored path no longer leads to its state")
            else:
                self._lost([group], "prompt", _prompt_difference(group.state, state))

    def _of_group(self, group: StateSamples) -> list[Sample]:
        return [sample for sample in group.samples if sample.id in self._wanted]

    async def _group(self, point: Point, state: State, group: StateSamples) -> None:
        """Replay samples of one state."""
        hidden = []
        for sample in group.samples:
            if sample.id not in self._wanted:
                hidden.append(sample)
            elif not self._repeats:
                hidden.append(_unscored(sample))
        self._hidden.samples[state.task_id, state.step] = hidden
        replayed = {sample.id: sample for sample in await self._sampler.sample_state(point, state)}
        for sample in self._of_group(group):
            again = replayed.get(sample.id)
            if again is None:
                detail = "the recipe or the prompt bank no longer asks for this sample"
                self._add(sample, "recipe", detail)
                continue
            if not self._repeats and again.failure is not None and again.failure.kind == "policy":
                again = await self._searched(point, sample)
            self._compare(sample, again)

    async def _searched(self, point: Point, sample: Sample) -> Sample:
        """Return a sample with new searches and its stored reward."""
        note = (
            "rewards that depend on later completions were not compared, "
            "because these completions are not stored"
        )
        if note not in self._report.notes:
            self._report.notes.append(note)
        after = await self._sampler.next_point(point, sample)
        ranking = after.outcome().ranking
        return replace(
            sample,
            doc_ids=tuple([passage.doc_id for passage in ranking]),
            scores=tuple([passage.score for passage in ranking]),
        )

    def _compare(self, stored: Sample, now: Sample) -> None:
        report = self._report
        report.completions += self._repeats
        now = _as_stored(now)
        fault = difference(stored, now, self._tolerance)
        if fault is not None:
            part, detail = fault
            return self._add(stored, part, detail)
        gaps = [abs(before - after) for _, _, before, after in _numbers(stored, now)]
        if max(gaps, default=0.0) == 0:
            report.equal += 1
        else:
            report.rounded += 1
        if stored.logprobs and now.logprobs and self._repeats:
            pairs = zip(stored.logprobs, now.logprobs, strict=True)
            largest = max(abs(before - after) for before, after in pairs)
            report.largest = max(report.largest or 0.0, largest)

    def _lost(self, groups: Iterable[StateSamples], part: Part, detail: str) -> None:
        for group in groups:
            for sample in self._of_group(group):
                self._add(sample, part, detail)

    def _add(self, sample: Sample, part: Part, detail: str) -> None:
        self._report.differences.append(
            Difference(sample.id, sample.task_id, sample.step, part, detail)
        )


def _unscored(sample: Sample) -> Sample:
    """Return a sample that the sampler scores again; one without a completion stays as it is."""
    if sample.completion is None:
        return sample
    return replace(sample, failure=Failure("program", "not scored yet"))


def _as_stored(sample: Sample) -> Sample:
    """Return a new sample as it would be read from the store."""
    logprobs = None if sample.logprobs is None else tuple(array("f", sample.logprobs))
    return replace(sample, outputs=json.loads(dump(sample.outputs)), logprobs=logprobs)


def difference(stored: Sample, now: Sample, tolerance: float) -> tuple[Part, str] | None:
    """Return the first part of a sample that differs from the store, with both values.

    The order is completion, search, reward, log-probability. ``tolerance`` is the largest
    difference of a log-probability or Q-value that counts as rounding.
    """
    if now.failure is not None and now.failure.is_outage:
        return "outage", f"{now.failure.kind}: {now.failure.message}"
    fault = _completion_difference(stored, now)
    if fault is not None:
        return "completion", f"the completion differs at {fault}"
    kinds = [sample.failure and sample.failure.kind for sample in (stored, now)]
    if kinds[0] != kinds[1]:
        return "reward", f"failure: {kinds[0]} in the store, {kinds[1]} now"
    if stored.outputs != now.outputs:
        return "search", "the outputs differ at " + _text_difference(
            dump(stored.outputs), dump(now.outputs)
        )
    fault = _item_difference(stored.doc_ids, now.doc_ids)
    if fault is not None:
        return "search", f"the ranking differs at rank {fault}"
    for part, name, before, after in _numbers(stored, now):
        limit = tolerance if part == "logprob" else ROUNDING * max(1.0, abs(before))
        if not abs(before - after) <= limit:
            return part, f"{name}: {before:.6g} in the store, {after:.6g} now"
    return None


def _completion_difference(stored: Sample, now: Sample) -> str | None:
    token = None
    if stored.token_ids is not None and now.token_ids is not None:
        token = _item_difference(stored.token_ids, now.token_ids)
    if stored.completion == now.completion:
        return None if token is None else f"token {token}"
    text = _text_difference(stored.completion or "", now.completion or "")
    return text if token is None else f"token {token}, {text}"


def _item_difference(stored: Sequence[object], now: Sequence[object]) -> str | None:
    """Return the number, from 1, of the first item that differs, with both items."""
    if tuple(stored) == tuple(now):
        return None
    same = _n_same(stored, now)
    items = [repr(items[same]) if same < len(items) else "none" for items in (stored, now)]
    return f"{same + 1}: {items[0]} in the store, {items[1]} now"


def _text_difference(stored: str, now: str) -> str:
    same = _n_same(stored, now)
    start = max(0, same - _BEFORE)
    texts = [repr(text[start : same + _AFTER]) for text in (stored, now)]
    return f"character {same + 1}: {texts[0]} in the store, {texts[1]} now"


def _n_same(stored: Sequence[object], now: Sequence[object]) -> int:
    for i, (before, after) in enumerate(zip(stored, now, strict=False)):
        if before != after:
            return i
    return min(len(stored), len(now))


def _prompt_difference(stored: State, now: State) -> str:
    start = "the prompt differs"
    if stored.parent is not None:
        start += f" (it follows from sample {stored.parent})"
    texts = [dump(state.messages) for state in (stored, now)]
    return f"{start} at {_text_difference(*texts)}"


def _numbers(stored: Sample, now: Sample) -> Iterator[tuple[Part, str, float, float]]:
    """Yield part, name and both values of each number that both samples have."""
    pairs = zip(stored.doc_ids, stored.scores, now.scores, strict=False)
    for doc_id, before, after in pairs:
        yield "search", f"the score of {doc_id}", before, after
    if stored.reward is not None and now.reward is not None:
        yield "reward", "reward", stored.reward, now.reward
    for name, before in stored.components.items():
        if name in now.components:
            part: Part = "logprob" if name in ("q", "logp") else "reward"
            yield part, f"reward part {name}", before, now.components[name]
    tokens = zip(stored.logprobs or (), now.logprobs or (), strict=False)
    for i, (before, after) in enumerate(tokens, 1):
        yield "logprob", f"log-probability of token {i}", before, after
