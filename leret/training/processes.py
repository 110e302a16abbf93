"""Processes of one training, as started by `leret train --launch`.

A launcher sets WORLD_SIZE and RANK before a process starts. In leret's own loop, every process
holds the whole policy and computes the gradients of its share of a step's completions. Only the
main process (rank 0) samples, validates and writes files. TRL's trainers use accelerate themselves.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

# the other processes wait while the main process samples a round
_LONGEST_ROUND = timedelta(days=1)
_SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")

N_PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
IS_MAIN = RANK == 0
"""Whether this process samples, validates and writes files."""


def is_sharded() -> bool:
    """Return True if accelerate shards the model over the processes (FSDP or DeepSpeed)."""
    return any(os.environ.get(name) == "true" for name in _SHARDED)


def refuse_processes(recipe: TrainingRecipe) -> None:
    """Raise `TrainingError` if the algorithm cannot use several processes."""
    if recipe.in_one_process:
        raise TrainingError(
            f"algorithm: {recipe.algorithm} trains {recipe.trains} in one process; remove --launch"
        )


def start_processes(device: str) -> None:
    """Connect the processes of leret's own loop.

    Raise `TrainingError` if accelerate would shard the model.
    """
    from accelerate import PartialState

    if is_sharded():
        raise TrainingError(
            "leret's own loop copies the whole policy to each process, but fsdp and zero3 shard "
            "it; use --launch multi, or, for grpo and rloo, set engine: trl"
        )
    PartialState(cpu=device == "cpu", timeout=_LONGEST_ROUND)


def share(n: int) -> range:
    """Return this process's share of ``n`` indices.

    The shares of all processes cover each index once.
    """
    return range(n * RANK // N_PROCESSES, n * (RANK + 1) // N_PROCESSES)


def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the processes."""
    import torch

    for tensor in tensors:
        torch.distributed.all_reduce(tensor)


def add_up_gradients(weights: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by its sum over the processes.

    A process without completions has no gradients.
    """
    for weight in weights:
        if weight.grad is None:
            weight.grad = weight.new_zeros(weight.shape)
        add_up([weight.grad])


def add_up_figures(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of each figure over the processes; a process may lack figures."""
    parts = gather(dict(figures))
    names: dict[str, None] = {}
    for part in parts:
        names |= dict.fromkeys(part)
    sums = {}
    for name in names:
        sums[name] = sum(part.get(name, 0.0) for part in parts)
    return sums


def gather(value: T) -> Sequence[T]:
    """Return the values of all processes, ordered by rank."""
    if N_PROCESSES == 1:
        return [value]
    import torch

    values: list[Any] = [None] * N_PROCESSES
    torch.distributed.all_gather_object(values, value)
    return values


def from_main(make: Callable[[], T]) -> T:
    """Call ``make`` in the main process and return its result in all processes.

    If ``make`` raises an exception, the main process raises and reports it, and the other processes
    exit.
    """
    if N_PROCESSES == 1:
        return make()
    import torch

    outcome: list[Any] = [None, False]
    try:
        if IS_MAIN:
            outcome = [make(), True]
    finally:
        torch.distributed.broadcast_object_list(outcome)
    if not outcome[1]:
        raise SystemExit(1)
    return outcome[0]  # type: ignore[no-any-return]


def launch() -> None:
    """Run ``accelerate launch``, without its traceback if a process ends with a printed error."""
    from accelerate.commands.launch import main
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        main()
    except (ChildFailedError, subprocess.CalledProcessError):
        raise SystemExit(1) from None


if __name__ == "__main__":
    launch()
