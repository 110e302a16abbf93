"""Following a training: progress, a loss that is no number, and an interrupt that leaves a checkpoint behind."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from leret.core.errors import TrainingError
from leret.core.progress import Progress

_SHOWN = {"loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}


class Watch(TrainerCallback):
    """The callback that every training runs under.

    Args:
        stage: name shown with the progress.
        progress: where it is shown; None shows nothing.
    """

    def __init__(self, stage: str, progress: Progress | None) -> None:
        self.stage = stage
        self.progress = progress
        self.interrupted = False
        self._facts: dict[str, float] = {}

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the training after its current step, with a checkpoint; a second one ends it at once.

        Raises:
            KeyboardInterrupt: after the checkpoint is written.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.interrupted:
            raise KeyboardInterrupt

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Show how far a resumed training has come."""
        if self.progress is not None:
            self.progress.start(self.stage, state.max_steps)
            if state.global_step:
                self.progress.advance(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the step; on an interrupt ask for a checkpoint and an end."""
        if self.interrupted:
            control.should_save = True
            control.should_training_stop = True
        if control.should_save:
            # The log comes before the checkpoint, so that no checkpoint is written after a loss that is no number.
            control.should_log = True
        if self.progress is not None:
            self.progress.advance(1, **self._facts)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep what is shown, and stop at a loss or a gradient that is no number.

        Raises:
            TrainingError: the loss or the gradient norm is not finite.
        """
        values = logs or {}
        for name in ("loss", "grad_norm"):
            value = values.get(name)
            if value is not None and not math.isfinite(float(value)):
                raise TrainingError(
                    f"the {name} is {value} at step {state.global_step} of {state.max_steps}; "
                    "lower learning_rate or max_grad_norm, or look for a broken example"
                ).failed()
        self._facts = {shown: float(values[name]) for name, shown in _SHOWN.items() if name in values}

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the progress."""
        if self.progress is not None:
            self.progress.finish()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
