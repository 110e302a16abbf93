"""A worker of a cluster: samples shards of questions into stores of its own, and hands over what it committed.

It shares nothing with the driver but what is sent: the recipe, the bank, the questions with what is known of them,
and the rows that come back. Where it can see the run's directory its stores lie there, so that the driver can read them
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
from pathlib import Path
from typing import TYPE_CHECKING

from leret.config.sampling import SamplingRecipe
from leret.core.errors import MissingDependency, RunError
from leret.core.runs import Run
from leret.sampling.ray.wire import TOKEN, Batch, Ended, Job, Place, Shard, version
from leret.sampling.store.merge import Rows, remove_store
from leret.sampling.store.store import Store

if TYPE_CHECKING:
    from leret.core.usage import UsageByPrompt
    from leret.policies.base import Policy
    from leret.retrieval.batching import SearchBatcher
    from leret.sampling.rollouts.environment import Environment
    from leret.sampling.rollouts.scheduler import SamplingStats


_TAKE_S = 0.5
"""Seconds between two commits, when nothing else asks for one: what a machine that is lost takes with it."""


class Worker:
    """An actor: all methods are async, so that shards go on while it is asked.

    Every shard has a store of its own, which is removed when the driver, by asking again, has shown that it has taken
    in what was sent.

    Args:
        job: of the run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows = Rows()
        self._ended: list[Ended] = []
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open_stores: set[Store] = set()
        self._sent: list[Path] = []
        self._scratch: Path | None = None
        self._prefix = Path()
        self._policy: Policy | None = None
        self._front: SearchBatcher | None = None
        self._bench: Environment | None = None

    async def place(self) -> tuple[str, int]:
        """Host and process id: says that the process is there."""
        return socket.gethostname(), os.getpid()

    async def start(self) -> Place:
        """Open the program, its index and the policy.

        Raises:
            RunError: this machine has another leret, or does not see what the driver sees.
            LeretError: something cannot be opened here.
        """
        host = socket.gethostname()
        if version() != self._job.version:
            raise RunError(
                f"the worker on {host} has leret {version()[0]} (store schema {version()[1]}), the driver "
                f"{self._job.version[0]} ({self._job.version[1]}); install the same on all machines"
            )
        _prepare_process()
        visible = self._sees_run()
        self._scratch = None if visible else Path(tempfile.mkdtemp(prefix="leret-worker-"))
        directory = self._scratch or Run(self._job.run).workers
        self._prefix = directory / f"{host}-{os.getpid()}-{time.time_ns()}-"
        try:
            self._open(Run(self._job.run).cache if visible else _node_cache(self._job.digests["retriever"]))
        except MissingDependency as error:  # which cannot travel
            raise RunError(f"the worker on {host}: {error}") from error
        return Place(host, os.getpid(), self._prefix if visible else None)

    async def add(self, shard: Shard) -> None:
        """Begin with a shard."""
        task = asyncio.create_task(self._run(shard))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def take(self) -> Batch:
        """What is new; waits for it a while.

        Raises:
            LeretError: what ended a shard, and is no outage.
        """
        assert self._front is not None
        for path in self._sent:
            remove_store(path)
        self._sent = []
        until = time.monotonic() + _TAKE_S
        while not self._ended and self._error is None and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for store in self._open_stores:
            store.flush()
        if self._error is not None:
            raise self._error
        batch = Batch(self._rows, tuple(self._ended), self._front.counts())
        self._sent = [self._path(ended.number) for ended in self._ended]
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
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        rows, self._rows = self._rows, Rows()
        return rows

    async def _run(self, shard: Shard) -> None:
        """Sample a shard; its rows are committed before it is told to have ended."""
        try:
            tally, ledger = await self._sample(shard)
            self._ended.append(Ended(shard.number, tally, ledger))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # told at the next `take`, so that the driver stops with it
            self._error = error

    async def _sample(self, shard: Shard) -> tuple[SamplingStats, UsageByPrompt]:
        from leret.core.usage import UsageByPrompt
        from leret.sampling.stage import scheduler_of

        assert self._bench is not None
        assert self._policy is not None
        assert self._front is not None
        known = True

        def committed(rows: Rows) -> None:
            if not known:
                self._rows.extend(rows)

        settings = self._bench.recipe.policy
        ledger = UsageByPrompt(settings.price_prompt, settings.price_completion)
        with Store(self._path(shard.number), on_commit=committed) as store:
            self._open_stores.add(store)
            try:
                store.put_rows(shard.known)
                store.flush()
                known = False
                parts = (self._bench, self._policy, self._job.prompts, self._front, store, ledger)
                scheduler = scheduler_of(*parts, max_error_rate=None)
                return await scheduler.run(shard.questions, len(shard.questions)), ledger
            finally:
                self._open_stores.discard(store)

    def _path(self, number: int) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}{number}.db")

    def _sees_run(self) -> bool:
        try:
            return (Run(self._job.run).workers / TOKEN).read_text(encoding="utf-8") == self._job.token
        except OSError:
            return False

    def _open(self, cache: Path) -> None:
        from leret.policies.load import policy_of
        from leret.retrieval.batching import SearchBatcher
        from leret.sampling.rollouts.environment import Environment

        recipe = SamplingRecipe.model_validate(self._job.recipe)
        self._bench = bench = Environment(recipe, cache)
        self._policy = policy_of(recipe.policy)
        here = {
            "corpus": bench.corpus.digest,
            "retriever": bench.retriever.digest,
            "program": bench.program_digest,
            "policy": self._policy.digest,
        }
        self._refuse_other(here)
        self._front = SearchBatcher(bench.retriever)

    def _refuse_other(self, here: dict[str, str]) -> None:
        other = [name for name, digest in here.items() if self._job.digests[name] != digest]
        if other:
            raise RunError(
                f"the worker on {socket.gethostname()} sees another {', '.join(other)} than the driver; the paths of "
                "the recipe must lead to the same files on all machines"
            )


def _prepare_process() -> None:
    from leret.core.memory import tune_malloc

    tune_malloc()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    if "DSPY_CACHEDIR" not in os.environ:  # opened on import, and not used: leret samples without
        os.environ["DSPY_CACHEDIR"] = str(Path(tempfile.gettempdir()) / f"leret-dspy-{os.getuid()}")


def _node_cache(name: str) -> Path:
    """Where workers of this machine that do not see the run keep one index for all of them."""
    return Path(tempfile.gettempdir()) / f"leret-cache-{os.getuid()}" / name
