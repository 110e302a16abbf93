"""Sampling on several machines, with one process and one store per shard of the tasks.

`RayCluster` splits the tasks into many small shards. If a process dies, it loses the samples of the
last 0.2 seconds and Ray restarts the shard on any machine. Seeds depend only on the request, so
sharding does not change the result.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, cast

from leret.config.base import resolve_paths
from leret.config.policy import LocalPolicySettings
from leret.config.sampling import SamplingRecipe
from leret.core.dspy_internals import muted
from leret.core.errors import ConfigError, LeretError, MissingDependency, RunError
from leret.core.memory import tune_malloc
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Task
from leret.rollouts.environment import Environment
from leret.rollouts.failures import SamplingStats, refuse_failures
from leret.sampling.stage import begin, open_recipe, sample_session
from leret.sampling.store.store import Store

_OpenRecipe = tuple[Environment, list[Task], dict[str, str]]
_RETRIES = 5
_SHARDS_A_WORKER = 8
_IDLE_S = 120.0  # maximum seconds until Ray starts a shard


@dataclass(frozen=True)
class Shard:
    """Every ``count``-th task, starting at ``index`` (from 0)."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ConfigError(
                f"--shard {text} is not I/N with I from 0 to N - 1; write it like --shard 0/8"
            )
        return cls(int(index), int(count))

    def store(self, run: Run) -> Path:
        return run.shards / f"{self.index}-of-{self.count}.db"


def sample_shard(
    recipe: SamplingRecipe, run: Run, shard: Shard, *, progress: Progress | None = None
) -> SamplingStats:
    """Sample one shard into its store in R/shards.

    The first shard builds index and prompt bank; other shards wait.
    """
    progress = progress or Progress()
    with open_recipe(resolve_paths(recipe, Path.cwd()), run, progress) as parts:
        return _sample(parts, run, shard, progress)


def _sample(
    parts: _OpenRecipe, run: Run, shard: Shard, progress: Progress, policy_digest: str | None = None
) -> SamplingStats:
    environment, tasks, digests = parts
    left = tasks[shard.index :: shard.count]
    with run.writing():
        run.shards.mkdir(exist_ok=True)
    with Store(shard.store(run)) as store:
        policy = begin(run, environment, left, digests, policy_digest)
        run.event(
            "sample",
            "shard",
            shard=f"{shard.index}/{shard.count}",
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        if run.store.is_file():  # samples of earlier commands
            with Store(run.store, read_only=True) as merged:
                done = merged.done(policy.digest)
            left = [task for task in left if task.id not in done]
            store.merge(run.store, [task.id for task in left])
        _, stats, _ = asyncio.run(
            sample_session(environment, run, policy, store, tasks, progress, only=left)
        )
        return stats


class RayCluster:
    """Connects to Ray as a context manager.

    Calling it samples tasks (see `leret.sampling.stage.Distribute`).

    Workers need the same leret version, and must find the run, corpus, program and model at the
    same paths. ``address`` is ``auto``, ``host:port`` or ``ray://host:port``; without it or
    ``RAY_ADDRESS``, a cluster starts on this machine.
    """

    def __init__(self, workers: int, address: str | None = None) -> None:
        if find_spec("ray") is None:
            raise MissingDependency("ray", "ray")
        self.workers = workers
        self.address = address
        self._exit = ExitStack()

    def __call__(
        self,
        recipe: SamplingRecipe,
        run: Run,
        policy_digest: str,
        tasks: Sequence[Task],
        progress: Progress,
    ) -> SamplingStats:
        """Sample tasks into R/shards.

        Raises:
            LeretError: a worker raises it, no worker starts, or a shard keeps dying.
        """
        import ray

        settings = recipe.sampling
        total = SamplingStats()
        rates = settings.max_error_rate, settings.max_unparsed_rate
        share = {"concurrency": -(-settings.concurrency // self.workers)}
        recipe = recipe.model_copy(update={"sampling": settings.model_copy(update=share)})
        task: Any = ray.remote(_ray_task).options(max_retries=_RETRIES, **self._resources(recipe))
        n = min(len(tasks), _SHARDS_A_WORKER * self.workers)
        left = [Shard(i, n) for i in reversed(range(n))]
        running: dict[Any, Shard] = {}
        progress.start("sampling", len(tasks))
        try:
            threads = threading.enumerate()
            ray_threads = [
                thread.ident or 0 for thread in threads if thread.name.startswith("ray_")
            ]
            with muted(ray_threads):  # Ray prints a paragraph per dead worker
                while left or running:
                    while left and len(running) < self.workers:
                        shard = left.pop()
                        running[
                            task.remote(
                                recipe.model_dump_json(), run.path.resolve(), shard, policy_digest
                            )
                        ] = shard
                    ended, _ = ray.wait(list(running), timeout=_IDLE_S)
                    if not ended and not any(run.shards.glob("*.db")):
                        free = f"{ray.available_resources()} of {ray.cluster_resources()} are free"
                        idle = f"Ray started no shard within {_IDLE_S:.0f} s ({free}); use fewer workers"
                        raise RunError(idle).failed()
                    for reference in ended:
                        shard = running.pop(reference)
                        total.add(_result(reference))
                        refuse_failures(total, *rates)
                        n_ended = len(range(shard.index, len(tasks), shard.count))
                        progress.advance(
                            n_ended, samples=total.samples, mean_reward=total.mean_reward
                        )
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            progress.finish()
        refuse_failures(total, *rates, last=True)
        return total

    def _resources(self, recipe: SamplingRecipe) -> dict[str, Any]:
        """Return the Ray resources per worker: half a CPU if the policy runs on a server."""
        import ray

        policy = recipe.policy
        if not isinstance(policy, LocalPolicySettings):
            return {"num_cpus": 0.5, "scheduling_strategy": "SPREAD"}
        gpus = ray.cluster_resources().get("GPU", 0.0) if policy.device != "cpu" else 0.0
        return {
            "num_cpus": 1.0,
            "num_gpus": min(1.0, gpus / self.workers),
            "scheduling_strategy": "SPREAD",
        }

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # no deprecation warnings
        import ray

        if ray.is_initialized():
            return self
        settings: dict[str, Any] = {"address": self.address}
        if self.address is None and not os.environ.get("RAY_ADDRESS"):
            # only for placing workers, not a limit
            n_cpus = max(os.cpu_count() or 1, self.workers + 1)
            settings = {"num_cpus": n_cpus, "include_dashboard": False}
        try:
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **settings)
        except Exception as error:  # Ray raises a plain Exception if it does not start within 30 s
            ray.shutdown()
            raise RunError(
                f"--address {self.address}: cannot join or start a Ray cluster "
                f"({' '.join(str(error).split())[:300]}); run `ray start --head` first, or omit --address"
            ).failed() from error
        self._exit.callback(ray.shutdown)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()


def _result(reference: Any) -> SamplingStats:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return cast("SamplingStats", ray.get(reference))
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, LeretError) else error from None
    except RayError as error:
        raise RunError(
            f"{_RETRIES + 1} workers died on the same shard ({' '.join(str(error).split())[:300]}). Finished samples "
            "are kept; check whether the program crashes or runs out of memory on the shard's questions"
        ).failed() from error


def _ray_task(recipe: str, run: Path, shard: Shard, policy_digest: str) -> SamplingStats:
    try:
        return _sample(_open_once(recipe, run), Run(run), shard, Progress(), policy_digest)
    except MissingDependency as error:  # MissingDependency cannot be pickled
        raise RunError(f"worker on {socket.gethostname()}: {error}") from error


_OPEN = ExitStack()


@cache
def _open_once(recipe: str, run: Path) -> _OpenRecipe:
    tune_malloc()
    if not Run(run).manifest_path.is_file():
        raise RunError(
            f"the worker on {socket.gethostname()} cannot find {run}; put the run on a file system shared by all "
            "machines, or sample with --shard on each machine and merge with `leret sample --merge`"
        )
    return _OPEN.enter_context(
        open_recipe(SamplingRecipe.model_validate_json(recipe), Run(run), Progress())
    )
