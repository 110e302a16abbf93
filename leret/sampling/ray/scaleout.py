"""Sampling on the machines of a Ray cluster.

The driver (the command that was typed) makes the bank, cuts the questions into shards, and is the only one that writes
the run. Workers need no file system in common with it: what they commit they send. What they need is the same leret
and, under the recipe's paths, the same corpus, program and model (checked by digest), and a way to the LM servers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from leret.core.aio import suppress_threads
from leret.core.errors import ConfigError, MissingDependency, RunError
from leret.core.types import Task

if TYPE_CHECKING:
    from leret.core.progress import Progress
    from leret.core.runs import Run
    from leret.policies.base import Policy
    from leret.programs.prompts import Prompt
    from leret.sampling.rollouts.environment import Environment
    from leret.sampling.rollouts.scheduler import SamplingStats
    from leret.sampling.store.store import Store


_CPUS_SERVED = 0.5
"""Of Ray's count, a worker: completions come from elsewhere, and on two CPUs whole ones can leave no room to start."""

_CPUS_LOCAL = 1.0


class Cluster:
    """Ray, connected to while this is entered.

    Args:
        workers: processes that sample.
        address: of a running cluster (``auto``, ``host:port``, ``ray://host:port``); None starts one on this machine,
            unless the environment's ``RAY_ADDRESS`` names one.

    Raises:
        ConfigError: ``workers`` is not positive.
        MissingDependency: Ray is not installed.
    """

    def __init__(self, workers: int, address: str | None = None) -> None:
        if workers < 1:
            raise ConfigError(f"--workers {workers}: at least one worker must sample")
        if find_spec("ray") is None:
            raise MissingDependency("ray", "ray")
        self.workers = workers
        self.address = address
        self._ours = False

    def sample(
        self,
        bench: Environment,
        run: Run,
        policy: Policy,
        prompts: Sequence[Prompt],
        store: Store,
        questions: Sequence[Task],
        digests: dict[str, str],
        progress: Progress,
    ) -> SamplingStats:
        """Sample questions into a store on this cluster's workers.

        Args:
            bench: the recipe, opened here.
            run: whose directory holds the store.
            policy: that the workers open for themselves; its name and digest are read.
            prompts: the bank.
            store: gets all rows.
            questions: those that are done already cost nothing.
            digests: of corpus, retriever and program.
            progress: hears of every question that ends.

        Returns:
            The tallies of all shards in one.

        Raises:
            PolicyError, RetrievalError, ProgramError: more than ``max_error_rate`` failed.
            RunError: no worker could be started, workers die again and again, or something cannot be written.
        """
        from leret.sampling.ray.driver import Driver
        from leret.sampling.ray.wire import TOKEN, Job, version

        token = os.urandom(16).hex()
        with run.writing():
            run.workers.mkdir(exist_ok=True)
            (run.workers / TOKEN).write_text(token, encoding="utf-8")
        recipe = bench.recipe.model_dump(mode="json")
        names = {name: digests[name] for name in ("corpus", "retriever", "program")} | {"policy": policy.digest}
        job = Job(version(), recipe, Path(run.path).resolve(), token, tuple(prompts), names)
        driver = Driver(job, run, store, self.workers, self._options(bench), bench.recipe.sampling)
        progress.start("sampling", driver.plan(questions))
        try:
            with suppress_threads("ray_"):  # it prints a paragraph for every worker that dies
                return driver.run(progress)
        finally:
            progress.finish()
            _remove_if_empty(run.workers, TOKEN)

    def _options(self, bench: Environment) -> dict[str, Any]:
        """What a worker asks of Ray."""
        import ray

        from leret.config.policy import LocalPolicySettings

        policy = bench.recipe.policy
        if not isinstance(policy, LocalPolicySettings):
            return {"num_cpus": _CPUS_SERVED, "scheduling_strategy": "SPREAD"}
        gpus = ray.cluster_resources().get("GPU", 0.0) if policy.device != "cpu" else 0.0
        share = min(1.0, gpus / self.workers)
        return {"num_cpus": _CPUS_LOCAL, "num_gpus": share, "scheduling_strategy": "SPREAD"}

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # and warn about what may change in it
        import ray

        if ray.is_initialized():
            return self
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        if self.address is None and not os.environ.get("RAY_ADDRESS"):
            n_cpus = max(os.cpu_count() or 1, self.workers + 1)  # a count for placing workers, no limit
            settings |= {"num_cpus": n_cpus, "include_dashboard": False}
        else:
            settings["address"] = self.address
        try:
            ray.init(**settings)
        except Exception as error:  # a plain one, where its processes do not come up within half a minute
            ray.shutdown()
            raise RunError(_unreachable(self.address, error)).failed() from error
        self._ours = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours:
            import ray

            ray.shutdown()


def _unreachable(address: str | None, error: Exception) -> str:
    told = " ".join(str(error).split())[:300]
    if address is None:
        return f"Ray could not be started on this machine ({told}); look into its logs in {_logs()}"
    return (
        f"--address {address}: no Ray cluster can be joined there ({told}); start one with `ray start --head`, or "
        "leave --address out to start one on this machine for this command"
    )


def _logs() -> str:
    return os.environ.get("RAY_TMPDIR", "/tmp/ray") + "/session_latest/logs"


def _remove_if_empty(directory: Path, token: str) -> None:
    """The directory of the workers' stores goes with the last of them."""
    (directory / token).unlink(missing_ok=True)
    if not any(directory.iterdir()):
        directory.rmdir()
