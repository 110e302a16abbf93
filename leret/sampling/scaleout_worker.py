"""A worker of a cluster: samples shards of questions into a store of its own, and hands over what it committed.

It shares nothing with the driver but what is sent: the recipe, the bank, the questions with what is known of them,
and the rows that come back. Where it can see the run's directory its store lies there, so that the driver can read it
after the worker has died.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.config import SamplingRecipe
from leret.errors import MissingDependency, RunError
from leret.runs import Run
from leret.sampling.database import STORE_SCHEMA
from leret.sampling.merge import Rows
from leret.sampling.store import Store
from leret.types import Question

if TYPE_CHECKING:
    from leret.pipelines.prompts import Prompt
    from leret.policies.base import Policy
    from leret.sampling.front import SearchFront
    from leret.sampling.scheduler import Scheduler, Tally
    from leret.sampling.workbench import Workbench

__all__ = ["TOKEN", "Batch", "Ended", "Job", "Place", "Shard", "Worker", "version"]

TOKEN = "token"
"""File of the run's workers directory by which a worker knows that it sees the same directory."""

_TAKE_S = 0.5
"""Seconds between two commits, when nothing else asks for one: what a machine that is lost takes with it."""


def version() -> tuple[str, int]:
    """What must be the same on both sides."""
    import leret

    return leret.__version__, STORE_SCHEMA


@dataclass(frozen=True)
class Job:
    """What all workers of a run do.

    Attributes:
        version: of the driver's leret.
        recipe: resolved; its paths must lead to the same files on every machine.
        run: the run's directory, which need not be visible.
        token: content of the token file in it.
        digests: of corpus, retriever, program and policy, as the driver sees them.
    """

    version: tuple[str, int]
    recipe: dict[str, Any]
    run: Path
    token: str
    prompts: tuple[Prompt, ...]
    digests: dict[str, str]


@dataclass(frozen=True)
class Shard:
    """Questions that one worker takes together.

    Attributes:
        known: what the run has of them already: of an earlier command, or of a worker that died.
    """

    number: int
    questions: tuple[Question, ...]
    known: Rows = field(default_factory=Rows)


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
        store: its file, where the driver can see it too; None where it is on a disk of the worker's machine alone.
    """

    host: str
    pid: int
    store: Path | None


@dataclass(frozen=True)
class Ended:
    """A shard that was worked through, outages included."""

    number: int
    tally: Tally


@dataclass(frozen=True)
class Batch:
    """What a worker has to tell since it was last asked, in the order of its commits."""

    rows: Rows
    ended: tuple[Ended, ...]


class Worker:
    """An actor: all methods are async, so that shards go on while it is asked.

    Args:
        job: of the run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows = Rows()
        self._ended: list[Ended] = []
        self._error: BaseException | None = None
        self._silent = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._scratch: Path | None = None
        self._store: Store | None = None
        self._policy: Policy | None = None
        self._front: SearchFront | None = None
        self._bench: Workbench | None = None
        self._scheduler: Scheduler | None = None

    async def place(self) -> tuple[str, int]:
        """Host and process id: says that the process is there."""
        return socket.gethostname(), os.getpid()

    async def start(self) -> Place:
        """Open the program, its index and the policy.

        Raises:
            RunError: this machine has another leret, or does not see what the driver sees.
            LeretError: something cannot be opened here.
        """
        if version() != self._job.version:
            raise RunError(
                f"the worker on {socket.gethostname()} has leret {version()[0]} (store schema {version()[1]}), the "
                f"driver {self._job.version[0]} ({self._job.version[1]}); install the same on all machines"
            )
        _prepare_process()
        visible = self._sees_run()
        self._scratch = None if visible else Path(tempfile.mkdtemp(prefix="leret-worker-"))
        directory = self._scratch or Run(self._job.run).workers
        path = directory / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.db"
        self._store = Store(path, on_commit=self._rows_committed)
        try:
            self._open(Run(self._job.run).cache if visible else _node_cache(self._job.digests["retriever"]))
        except MissingDependency as error:  # which cannot travel
            raise RunError(f"the worker on {socket.gethostname()}: {error}") from error
        return Place(socket.gethostname(), os.getpid(), path if visible else None)

    async def add(self, shard: Shard) -> None:
        """Begin with a shard."""
        task = asyncio.create_task(self._run(shard))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def take(self) -> Batch:
        """What is new; waits for it a while.

        Raises:
            RunError: the worker's store cannot be written.
        """
        assert self._store is not None
        until = time.monotonic() + _TAKE_S
        while not self._ended and self._error is None and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self._store.flush()
        if self._error is not None:
            raise self._error
        batch = Batch(self._rows, tuple(self._ended))
        self._rows, self._ended = Rows(), []
        return batch

    async def stop(self) -> Rows:
        """End: what is in flight is given up, what is committed is returned."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._front is not None:
            self._front.close()
        if self._policy is not None:
            with suppress(Exception):  # nothing is asked of it any more
                await self._policy.aclose()
        if self._store is not None:
            self._store.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        rows, self._rows = self._rows, Rows()
        return rows

    async def _run(self, shard: Shard) -> None:
        """Sample a shard; its rows are committed before it is told to have ended."""
        assert self._store is not None
        assert self._scheduler is not None
        try:
            self._take_over(shard.known)
            tally = await self._scheduler.run(shard.questions, len(shard.questions))
            self._ended.append(Ended(shard.number, tally))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # told at the next `take`, so that the driver stops with it
            self._error = error

    def _take_over(self, known: Rows) -> None:
        """Put what the driver has into the store, without sending it back."""
        assert self._store is not None
        self._store.flush()
        self._silent = True
        try:
            self._store.put_rows(known)
            self._store.flush()
        finally:
            self._silent = False

    def _rows_committed(self, rows: Rows) -> None:
        if not self._silent:
            self._rows.extend(rows)

    def _sees_run(self) -> bool:
        try:
            return (Run(self._job.run).workers / TOKEN).read_text(encoding="utf-8") == self._job.token
        except OSError:
            return False

    def _open(self, cache: Path) -> None:
        from leret.policies.load import policy_of
        from leret.sampling.front import SearchFront
        from leret.sampling.stage import scheduler_of
        from leret.sampling.workbench import Workbench

        assert self._store is not None
        recipe = SamplingRecipe.model_validate(self._job.recipe)
        self._bench = bench = Workbench(recipe, cache)
        self._policy = policy_of(recipe.policy, cache)
        here = {
            "corpus": bench.corpus.digest,
            "retriever": bench.retriever.digest,
            "program": bench.program_digest,
            "policy": self._policy.digest,
        }
        self._refuse_other(here)
        self._front = SearchFront(bench.retriever)
        self._scheduler = scheduler_of(bench, self._policy, self._job.prompts, self._front, self._store, None)

    def _refuse_other(self, here: dict[str, str]) -> None:
        other = [name for name, digest in here.items() if self._job.digests[name] != digest]
        if other:
            raise RunError(
                f"the worker on {socket.gethostname()} sees another {', '.join(other)} than the driver; the paths of "
                "the recipe must lead to the same files on all machines"
            )


def _prepare_process() -> None:
    from leret.allocator import keep_memory

    keep_memory()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    if "DSPY_CACHEDIR" not in os.environ:  # opened on import, and not used: leret samples without
        os.environ["DSPY_CACHEDIR"] = str(Path(tempfile.gettempdir()) / f"leret-dspy-{os.getuid()}")


def _node_cache(name: str) -> Path:
    """Where workers of this machine that do not see the run keep one index for all of them."""
    return Path(tempfile.gettempdir()) / f"leret-cache-{os.getuid()}" / name
