"""The process of a training: threads, full disks, and interrupts that leave a checkpoint."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from unittest.mock import patch

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError

_DISK = ("No space left", "PytorchStreamWriter", "unexpected pos", "iostream error", "File too large", "os error 28")


@contextmanager
def training_process(threads: int | None) -> Iterator[None]:
    """Set the number of threads (1 for equal bits) and silence libraries; restore both afterwards.

    A full disk, which each library reports in another way, raises an OSError.
    """
    import datasets
    import torch
    import transformers

    n_threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    shown = not datasets.are_progress_bars_disabled(), transformers.logging.is_progress_bar_enabled()
    state = random.getstate()  # trainers seed it, and others draw ids from it
    bars = patch.dict(os.environ, TQDM_DISABLE="1")  # TRL reads it for its bar of reference log-probabilities
    with warnings.catch_warnings(), _disk_errors(), bars:
        warnings.simplefilter("ignore", FutureWarning)
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            random.setstate(state)
            torch.set_num_threads(n_threads)
            transformers.logging.set_verbosity(verbosity)
            if shown[0]:
                datasets.enable_progress_bars()
            if shown[1]:
                transformers.logging.enable_progress_bar()


@contextmanager
def _disk_errors() -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if any(sign in str(error) for sign in _DISK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


class Interrupt:
    """SIGINT and SIGTERM end a training after its current step, with a checkpoint; a second one ends it at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Catch the signals inside the block; raise KeyboardInterrupt at its end if one came."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()  # only this one gets signals
        before = {number: signal.signal(number, self._stop) for number in numbers if main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.requested:
            raise KeyboardInterrupt

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def n_processes() -> int:
    """Return the number of processes of this training."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_processes(recipe: TrainingRecipe) -> None:
    """Refuse several processes for an algorithm of our loop, which samples and trains in one."""
    if recipe.samples_in_process:
        other = ", or set engine: trl and states: stored" if "engine" in type(recipe).model_fields else ""
        raise TrainingError(
            f"algorithm: {recipe.algorithm} samples and trains in one process: start it without --launch{other}"
        )
