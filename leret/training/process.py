"""Around a training: threads, environment, full disks, progress, and an interrupt that leaves a checkpoint."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from leret.core.errors import TrainingError
from leret.core.progress import Progress

_DISK = ("No space left", "PytorchStreamWriter", "unexpected pos", "iostream error", "File too large", "os error 28")
_SHOWN = {"loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}


@contextmanager
def training_process(directory: Path, threads: int | None) -> Iterator[None]:
    """One thread for equal bits, logs beside the checkpoints, and quiet libraries; all is put back afterwards.

    TensorBoard and W&B write in ``directory/logs`` unless the environment says otherwise. A full disk, which each
    library reports in its own way, is an OSError.
    """
    import datasets
    import torch
    import transformers

    n_threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    shown = not datasets.are_progress_bars_disabled(), transformers.logging.is_progress_bar_enabled()
    logs = str(directory / "logs")
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TENSORBOARD_LOGGING_DIR": logs, "WANDB_DIR": logs}
    with _environment(quiet), warnings.catch_warnings(), _disk_errors():
        warnings.simplefilter("ignore", FutureWarning)
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
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


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class Interrupt:
    """SIGINT and SIGTERM end a training after its current step, with a checkpoint; a second one ends it at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Catches the signals inside; raises KeyboardInterrupt after the checkpoint was written."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()  # signals go to no other
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


def training_callback(stage: str, progress: Progress, interrupt: Interrupt) -> Any:
    """A trainer's callback: progress, a stop at a loss that is not finite, and at an interrupt."""
    from transformers import TrainerCallback

    facts: dict[str, float] = {}

    class Callback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.start(stage, state.max_steps)
            if state.global_step:
                progress.advance(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if interrupt.requested:
                control.should_save = control.should_training_stop = True
            if control.should_save:
                control.should_log = True  # before it, so that no checkpoint is written after a loss that is no number
            progress.advance(1, **facts)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            values = logs or {}
            for name in ("loss", "grad_norm"):
                value = values.get(name)
                if value is not None and not math.isfinite(float(value)):
                    raise TrainingError(
                        f"the {name} is {value} at step {state.global_step} of {state.max_steps}; "
                        "lower learning_rate or max_grad_norm, or look for a broken example"
                    ).failed()
            facts.update({shown: float(values[name]) for name, shown in _SHOWN.items() if name in values})

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.finish()

    return Callback()
