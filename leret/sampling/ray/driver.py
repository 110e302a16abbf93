"""The driver of a cluster's workers: hands out shards, takes in rows, and does again what a dead worker had.

Each worker is asked for what is new, one question at a time; what it answers is in the order of its commits, a shard's
end after the shard's rows. So a shard that has ended is in the run, whole. A worker that dies is read from its store
where that can be seen, and its shards go to others with all that is known of them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leret.config.sampling import SamplingSettings
from leret.core.errors import LeretError, RunError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Task
from leret.core.usage import UsageByPrompt
from leret.sampling.ray.accounts import Accounts
from leret.sampling.ray.wire import Batch, Job, Place, Shard
from leret.sampling.ray.worker import Worker
from leret.sampling.rollouts.scheduler import SamplingStats
from leret.sampling.store.merge import merge_file, remove_store
from leret.sampling.store.store import Store

_PLACED_S = 120.0
"""Seconds within which Ray must have started at least one worker."""

_STOP_S = 10.0
_DEATHS = 3
"""Workers that a shard may kill, and workers that may die in a row without having started."""

_SHARDS_A_WORKER = 8


@dataclass(eq=False)
class _Hand:
    """A worker as the driver sees it.

    Attributes:
        waits_for: the answer that is on its way; None where the worker has nothing to do.
        placed: its process is there. ``place`` is known once it has opened everything.
    """

    actor: Any
    waits_for: Any
    placed: bool = False
    place: Place | None = None
    shards: dict[int, Shard] = field(default_factory=dict)
    searches: Mapping[str, int] = field(default_factory=dict)


class Driver:
    """One run's samples from a cluster that is connected.

    Args:
        job: of all workers.
        run: hears of events.
        store: gets the rows.
        n_workers: to be kept alive, as long as there is work for them.
        options: what a worker asks of Ray.
        settings: of the recipe.
    """

    def __init__(
        self, job: Job, run: Run, store: Store, n_workers: int, options: dict[str, Any], settings: SamplingSettings
    ) -> None:
        self._job = job
        self._run = run
        self._store = store
        self._n_workers = n_workers
        self._options = options
        self._settings = settings
        self._policy_digest = job.digests["policy"]
        self._shards: deque[Shard] = deque()
        self._deaths: Counter[int] = Counter()
        self._in_a_row = 0
        self._hands: list[_Hand] = []
        self._at_once = 1
        self._began = time.monotonic()
        prices = job.recipe["policy"]["price_prompt"], job.recipe["policy"]["price_completion"]
        self._accounts = Accounts(UsageByPrompt(*prices), settings.max_error_rate, settings.max_unparsed_rate)

    def plan(self, questions: Sequence[Task]) -> int:
        """Cut what is not done into shards.

        Returns:
            The number of questions in them.
        """
        done = self._store.done(self._policy_digest)
        todo = [question for question in questions if question.id not in done]
        begun = self._store.begun(self._policy_digest)
        concurrency = self._settings.concurrency
        size = max(1, min(concurrency // 4, -(-len(todo) // (_SHARDS_A_WORKER * self._n_workers))))
        for number, start in enumerate(range(0, len(todo), size)):
            own = tuple(todo[start : start + size])
            known = self._store.rows(self._policy_digest, [q.id for q in own if q.id in begun])
            self._shards.append(Shard(number, own, known))
        self._at_once = max(1, min(concurrency // size, -(-len(self._shards) // (2 * self._n_workers))))
        return len(todo)

    def run(self, progress: Progress) -> SamplingStats:
        """Sample all shards.

        Raises:
            LeretError: see `leret.sampling.ray.scaleout.Cluster.sample`.
        """
        self._began = time.monotonic()
        try:
            for _ in range(min(self._n_workers, len(self._shards))):
                self._hire()
            while self._shards or any(hand.shards for hand in self._hands):
                self._turn(progress)
        finally:
            self._dismiss()
            self._run.event(
                "sample",
                "accounts",
                seconds=round(time.monotonic() - self._began, 3),
                workers=self._n_workers,
                **self._accounts.facts(),
            )
        self._accounts.refuse_failures(last=True)
        return self._accounts.total

    def _turn(self, progress: Progress) -> None:
        import ray

        busy = {hand.waits_for: hand for hand in self._hands if hand.waits_for is not None}
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=1.0)
        for answer in ready:
            self._hear(busy[answer], answer, progress)
        if not ready and not any(hand.placed for hand in self._hands):
            self._refuse_to_wait()

    def _hear(self, hand: _Hand, answer: Any, progress: Progress) -> None:
        """Take one answer of a worker, and ask for the next one."""
        import ray
        from ray.exceptions import RayActorError, RayError

        try:
            value = ray.get(answer)
        except RayActorError as error:
            self._bury(hand, error)
            return
        except LeretError as error:
            raise _plain(error) from error
        except RayError as error:
            raise RunError(f"a worker failed: {_told(error)}; see Ray's logs on its machine").failed() from error
        if not hand.placed:
            hand.placed = True
            hand.waits_for = hand.actor.start.remote()
            return
        if isinstance(value, Place):
            hand.place = value
            self._in_a_row = 0
            self._run.event("sample", "worker", host=value.host, pid=value.pid, shared=value.stores is not None)
        elif isinstance(value, Batch):
            self._take(hand, value, progress)
        self._feed(hand)

    def _take(self, hand: _Hand, batch: Batch, progress: Progress) -> None:
        self._store.put_rows(batch.rows)
        self._store.flush()  # the worker may forget what it sent as soon as it is asked again
        hand.searches = batch.searches
        for ended in batch.ended:
            del hand.shards[ended.number]
        n_ended = self._accounts.take(batch)
        if batch.rows or n_ended:
            busy = sum(bool(other.shards) for other in self._hands)
            progress.advance(n_ended, **self._accounts.progress(), workers=busy)
        self._accounts.refuse_failures()

    def _feed(self, hand: _Hand) -> None:
        """Give a worker as many shards as keep its questions in flight, and ask what comes of them."""
        while self._shards and len(hand.shards) < self._at_once:
            shard = self._shards.popleft()
            hand.shards[shard.number] = shard
            hand.actor.add.remote(shard)
        hand.waits_for = hand.actor.take.remote() if hand.shards else None

    def _hire(self) -> None:
        import ray

        actor: Any = ray.remote(Worker).options(max_restarts=0, max_task_retries=0, **self._options).remote(self._job)
        self._hands.append(_Hand(actor, actor.place.remote()))

    def _bury(self, hand: _Hand, error: Exception) -> None:
        """Save what a dead worker has committed, and put its shards back.

        Raises:
            RunError: it is not the first one that dies like this.
        """
        self._hands.remove(hand)
        told = _told(error)
        if hand.place is None:
            self._in_a_row += 1
            if self._in_a_row >= _DEATHS:
                raise RunError(f"{_DEATHS} workers in a row died before they could begin: {told}").failed()
        self._save(hand)
        place = hand.place
        self._run.event(
            "sample", "worker lost", host=place and place.host, pid=place and place.pid, shards=len(hand.shards)
        )
        for shard in hand.shards.values():
            self._deaths[shard.number] += 1
            names = [question.id for question in shard.questions]
            if self._deaths[shard.number] >= _DEATHS:
                raise RunError(
                    f"{_DEATHS} workers died while they sampled questions {names[0]} to {names[-1]}: {told}. What is "
                    "done is kept; look for what these questions do to the program or to memory"
                ).failed()
            self._shards.appendleft(Shard(shard.number, shard.questions, self._store.rows(self._policy_digest, names)))
        hand.shards.clear()
        for idle in [other for other in self._hands if other.waits_for is None]:
            self._feed(idle)
        if self._shards and len(self._hands) < self._n_workers:
            self._hire()

    def _save(self, hand: _Hand) -> None:
        """Merge the stores of a worker that is no more, where they can be seen."""
        self._note_searches(hand)
        for path in hand.place.files() if hand.place is not None else ():
            merge_file(self._store, path)
            remove_store(path)

    def _dismiss(self) -> None:
        """End all workers; what they have committed and not sent yet is taken in."""
        import ray
        from ray.exceptions import RayError

        asked = [(hand, hand.actor.stop.remote()) for hand in self._hands if hand.placed]
        until = time.monotonic() + _STOP_S
        for hand, answer in asked:
            try:
                rows = ray.get(answer, timeout=max(0.1, until - time.monotonic()))
                self._store.put_rows(rows)
                self._store.flush()
                for path in hand.place.files() if hand.place is not None else ():
                    remove_store(path)
            except (RayError, LeretError):
                pass  # its stores are read at the next start
        for hand in self._hands:
            self._note_searches(hand)
            ray.kill(hand.actor)
        self._hands.clear()

    def _note_searches(self, hand: _Hand) -> None:
        self._accounts.searched(hand.searches)
        hand.searches = {}

    def _refuse_to_wait(self) -> None:
        import ray

        if time.monotonic() - self._began > _PLACED_S:
            have, free = ray.cluster_resources(), ray.available_resources()
            wanted = {name: value for name, value in self._options.items() if name.startswith("num_")}
            raise RunError(
                f"Ray has started none of {self._n_workers} workers in {_PLACED_S:.0f} s: each asks for {wanted}, the "
                f"cluster has CPU {have.get('CPU', 0):g}, GPU {have.get('GPU', 0):g}, of which CPU "
                f"{free.get('CPU', 0):g}, GPU {free.get('GPU', 0):g} are free; wait for it, or ask for fewer workers"
            ).failed()


def _plain(error: LeretError) -> LeretError:
    """The error that a worker raised, without what Ray wraps around it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, LeretError) else error


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:600]
