"""Driver for all training.

Handles progress, validation, alarms, interrupts, checkpoints and publication.

The driver is a transformers callback. It runs with TRL's trainers and with rounds
(`leret.training.rounds.loop`). The Trainer class calls callbacks itself; `StepLoop` calls them in
the same order for the engines that are not a Trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transformers import (
    DefaultFlowCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import rotate_checkpoints

from leret.core.progress import Progress
from leret.core.runs import versions
from leret.training.job import Interrupt, TrainingJob, TrainingRecord, checkpoint_step
from leret.training.model import SavedPolicy
from leret.training.processes import IS_MAIN
from leret.training.validation import Validation
from leret.training.watch import PEAK, RATE, Monitor, best_step, first_alarms, monitored, peak_gib

N_CHECKPOINTS = 2
"""Number of checkpoints that stay on disk, including the best checkpoint."""

_SHOWN = {
    "reward": "reward",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "loss": "loss",
}
"""Logged metrics that the progress line shows, with their labels. A narrow terminal cuts the last
ones."""


class Engine(Protocol):
    """Trains a policy and calls the methods of a `Driver`, its callback.

    Attributes:
        state: step, log and best step, as in transformers.
        steps: optimizer steps so far.
        preflight: relative error of TRL's log-probabilities
            (`leret.training.stored.trainer.check_logps`); None if unknown.
    """

    state: TrainerState
    examples: int
    dropped: int
    preflight: float | None

    @property
    def steps(self) -> int: ...

    def add_callback(self, callback: TrainerCallback) -> None: ...

    def train(self, checkpoint: Path | None) -> None:
        """Train to the last step; continue from the checkpoint if one is given."""
        ...

    def log(self, figures: dict[str, float]) -> None: ...

    def validate(self, validation: Validation) -> dict[str, float]: ...

    def load(self, checkpoint: Path) -> None: ...

    def save(self, directory: Path) -> SavedPolicy:
        """Write the trained policy; return what its model card says of the files."""
        ...


@dataclass(eq=False)
class Driver(TrainerCallback):
    """Callback that shows progress, feeds the monitor, validates, and stops at interrupts or alarms."""

    log: Callable[[dict[str, float]], None]
    monitor: Monitor
    stage: str
    progress: Progress
    interrupt: Interrupt
    validate: Callable[[], dict[str, float]] | None = None
    eval_steps: int | None = None
    _shown: dict[str, float] = field(default_factory=dict, init=False)
    _logged_step: int = field(default=0, init=False)
    _since: float = field(default=0.0, init=False)
    """Time of the last log entry; validations move it forward."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.start(self.stage, state.max_steps)
        self.monitor.begin(state.log_history)
        self._logged_step = state.global_step
        self._since = time.monotonic()
        if state.global_step:
            self.progress.advance(state.global_step)
        elif self.validate is not None:
            self._validate(self.validate, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.interrupt.agree():
            control.should_save = control.should_training_stop = True
        is_last = state.global_step == state.max_steps
        is_due = self.eval_steps and state.global_step % self.eval_steps == 0
        if self.validate is not None and (is_last or is_due):
            self._validate(self.validate, state, control)
        if control.should_save:
            # The monitor then checks the loss before the checkpoint is written.
            control.should_log = True
        self.progress.advance(1, **self._shown)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        figures = state.log_history[-1]
        if "train_runtime" in figures:
            return
        if not any(name.startswith("eval_") for name in figures):
            figures |= self._costs(args, state, figures)
        if self.monitor.see(state.log_history):
            control.should_save = control.should_training_stop = True
        for name, label in _SHOWN.items():
            if figures.get(name) is not None:
                self._shown[label] = float(figures[name])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.finish()

    def _costs(self, args: Any, state: Any, figures: Mapping[str, float]) -> dict[str, float]:
        """Return peak memory, and completions per second since the last log entry."""
        now = time.monotonic()
        n_steps = state.global_step - self._logged_step
        per_step = figures.get("num_completions")
        if per_step is None:  # transformers' Trainer
            per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            if "rewards/accuracies" in figures:  # of pairs
                per_step *= 2
        rate = per_step * n_steps / (now - self._since)
        self._logged_step = state.global_step
        self._since = now
        return {PEAK: peak_gib(), RATE: rate}

    def _validate(self, validate: Callable[[], dict[str, float]], state: Any, control: Any) -> None:
        """Validate and log.

        Save a checkpoint if the step is the best so far (rotation keeps the best checkpoint).
        """
        should_log = control.should_log  # logging the validation resets this flag
        began = time.monotonic()
        self.log(validate())
        self._since += time.monotonic() - began
        control.should_log = should_log
        step = state.global_step
        if step and best_step(state.log_history, self.monitor.measure) == step:
            state.best_global_step = step
            control.should_save = True


class StepLoop:
    """State and callbacks of an engine that is not a `transformers.Trainer`.

    Events come in Trainer's order.
    """

    def __init__(
        self, directory: Path, logging_steps: int, save_steps: int, max_steps: int
    ) -> None:
        self.args = TrainingArguments(
            output_dir=str(directory),
            save_strategy="steps",
            use_cpu=True,
            report_to=[],
            logging_first_step=True,
        )
        self.state = TrainerState(
            max_steps=max_steps, logging_steps=logging_steps, save_steps=save_steps
        )
        self.control = TrainerControl()
        self._handler: Any = CallbackHandler([DefaultFlowCallback()], None, None, None, None)
        self._figures: list[Mapping[str, float]] = []

    @property
    def is_over(self) -> bool:
        if self.control.should_training_stop:
            return True
        return bool(self.state.global_step >= self.state.max_steps)

    def add_callback(self, callback: TrainerCallback) -> None:
        self._handler.add_callback(callback)

    def begin(self) -> None:
        self._handler.on_train_begin(self.args, self.state, self.control)

    def end_step(self, figures: Mapping[str, float], epoch: float = 0.0) -> bool:
        """Count a step, and log if logging is due; return True if a checkpoint is due."""
        self._handler.on_step_begin(self.args, self.state, self.control)
        self._figures.append(figures)
        self.state.global_step += 1
        self.state.epoch = epoch
        self._handler.on_step_end(self.args, self.state, self.control)
        if self.control.should_log:
            self.log(means(self._figures))
            self._figures = []
        return bool(self.control.should_save)

    def log(self, figures: dict[str, float]) -> None:
        position = {"epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append({**figures, **position})
        self._handler.on_log(self.args, self.state, self.control, figures)

    def save_state(self, checkpoint: Path) -> None:
        """Complete a checkpoint by writing the trainer state, and remove older checkpoints."""
        state = self.state
        state.best_model_checkpoint = None
        if state.best_global_step is not None:
            best = checkpoint.parent / f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = str(best)
        state.save_to_json(str(checkpoint / "trainer_state.json"))
        rotate_checkpoints(str(checkpoint.parent), N_CHECKPOINTS, state.best_model_checkpoint)


def drive(engine: Engine, job: TrainingJob, progress: Progress, interrupt: Interrupt) -> int:
    """Train from the last checkpoint to the end, and load the weights with the best score.

    Returns:
        Step of the checkpoint at which training resumed; 0 for a fresh start.
    """
    recipe = job.recipe
    directory = job.directory
    if IS_MAIN:
        directory.drop_broken()
    checkpoint = directory.checkpoint()
    state = checkpoint and TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    # Trainer would take one more step
    if checkpoint and state and state.global_step >= state.max_steps:
        engine.load(checkpoint)
        engine.state = state
    else:
        event = None if job.run is None else partial(job.run.event, "train")
        with monitored(recipe, directory.path, event) as monitor, interrupt.handled():
            stage = f"train {recipe.policy_name}"
            validation = job.validation
            if recipe.progress_unit == "round":
                stage = f"{stage}, rounds"
            validate = None if validation is None else partial(engine.validate, validation)
            driver = Driver(
                engine.log, monitor, stage, progress, interrupt, validate, recipe.eval_steps
            )
            engine.add_callback(driver)
            engine.train(checkpoint)
            monitor.check()
    best = best_step(engine.state.log_history, recipe.metric_for_best_model)
    if best not in (None, engine.state.global_step):
        engine.load(directory.path / f"checkpoint-{best}")
    return checkpoint_step(checkpoint)


def publish(engine: Engine, job: TrainingJob, method: str, seconds: float) -> TrainingRecord:
    """Write the trained policy with record and model card, and move it into the run.

    Return the record.
    """
    recipe = job.recipe
    measure = recipe.metric_for_best_model
    final = job.directory.final
    log = [figures for figures in engine.state.log_history if "train_runtime" not in figures]
    record = TrainingRecord(
        name=recipe.policy_name,
        algorithm=recipe.algorithm_name,
        key=job.key,
        parent=job.initial.name if job.initial.actors else recipe.init_from,
        examples=engine.examples,
        dropped=engine.dropped,
        steps=engine.steps,
        rounds=engine.state.global_step if recipe.progress_unit == "round" else None,
        total_steps=job.initial.total_steps + engine.steps,
        seconds=round(seconds, 3),
        preflight=engine.preflight,
        versions=versions(),
        log_history=log,
        best_step=best_step(log, measure),
        alarms=[asdict(alarm) for alarm in first_alarms(log, measure)],
        validation=sorted(job.validation.ids) if job.validation else (),
    )
    saved = engine.save(final)
    if IS_MAIN:
        engine.state.save_to_json(str(final / "trainer_state.json"))
        record.write(final, method, saved)
        job.directory.publish()
    return record


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over the steps that have it."""
    columns: dict[str, list[float]] = {}
    for figures in steps:
        for name, value in figures.items():
            columns.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in columns.items()}
