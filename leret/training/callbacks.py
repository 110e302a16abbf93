"""What watches a training: alarms, trackers, progress, interrupts, validation, for TRL's trainers and our own loop."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leret.config.training import TrainingRecipe
from leret.core.errors import MissingDependency, TrainingError
from leret.core.progress import Progress
from leret.training.alarms import Log, alarms, best_step, first_alarms
from leret.training.process import Interrupt

_LOG = logging.getLogger("leret")
_SHOWN = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "reward": "reward",
    "objective/rlhf_reward": "reward",
}

Validate = Callable[[int], Mapping[str, float]]
"""Takes the step; gives ``eval_MEASURE`` and ``eval_unparsed``."""


@dataclass
class Monitor:
    """Reads a training's log as it grows: refuses what is no number, raises alarms, fills the trackers."""

    recipe: TrainingRecipe
    event: Callable[..., None] | None = None  # of `Run.event` without its stage; None where nobody keeps events
    trackers: Sequence[Any] = ()  # of accelerate, started
    alarm: str | None = None  # what the training is to be stopped for
    _raised: set[str] = field(default_factory=set)

    def begin(self, log: Log) -> None:
        """Start with the log of a checkpoint; TrainingError where an alarm in it is to stop the training."""
        before = first_alarms(log, self.recipe.metric_for_best_model)
        self._raised = {alarm.name for alarm in before}
        if before and self.recipe.on_alarm == "stop":
            self.alarm = f"step {before[0].step}: {before[0].message}"
            self.check()

    def see(self, log: Log) -> bool:
        """Look at a log whose last entry is new: whether to save and stop, and then to `check`."""
        from transformers.integrations import rewrite_logs

        entry = log[-1]
        for name in ("loss", "grad_norm"):
            if (value := entry.get(name)) is not None and not math.isfinite(float(value)):
                raise TrainingError(
                    f"the {name} is {value} at step {entry['step']}; "
                    "lower learning_rate or max_grad_norm, or look for a broken example"
                ).failed()
        values = {n: float(v) for n, v in entry.items() if isinstance(v, int | float) and n not in ("step", "epoch")}
        for tracker in self.trackers:
            tracker.log(rewrite_logs(values), step=int(entry["step"]))  # train/loss, eval/recall
        for alarm in alarms(log, self.recipe.metric_for_best_model):
            if alarm.name in self._raised:
                continue
            self._raised.add(alarm.name)
            text = f"step {alarm.step}: {alarm.message}"
            _LOG.warning("%s, %s", self.recipe.policy_name, text)
            if self.event is not None:
                facts = {"alarm": alarm.name, "step": alarm.step, "message": alarm.message}
                self.event("alarm", policy=self.recipe.policy_name, **facts)
            if self.recipe.on_alarm == "stop":
                self.alarm = self.alarm or text
        return self.alarm is not None

    def check(self) -> None:
        """TrainingError where an alarm stopped the training."""
        if self.alarm is not None:
            raise TrainingError(
                f"stopped at an alarm of {self.alarm}. A checkpoint was kept: --set on_alarm=warn goes on from it; "
                "with other values, give the policy another name"
            ).failed()


@contextmanager
def monitored(
    recipe: TrainingRecipe, directory: Path, event: Callable[..., None] | None = None, *, writes: bool = True
) -> Iterator[Monitor]:
    """A monitor with the trackers of ``report_to``, which are finished afterwards.

    Where the environment does not say otherwise, TensorBoard and W&B write in ``directory/logs``; trackio has a place
    of its own for all projects. ``writes`` is of the process that does, where several train together.
    """
    trackers: list[Any] = []
    try:
        for name in recipe.report_to if writes else ():
            trackers.append(_tracker(name, recipe, directory / "logs"))
        yield Monitor(recipe, event if writes else None, trackers)
    finally:
        for tracker in trackers:
            tracker.finish()


def check_trackers(recipe: TrainingRecipe) -> None:
    """Refuse trackers that are not installed."""
    for package in recipe.report_to:
        if find_spec(package) is None:
            raise MissingDependency(package, package)


def _tracker(name: str, recipe: TrainingRecipe, logs: Path) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # for accelerate's log
    run_name, config = recipe.run_name or recipe.policy_name, recipe.model_dump(mode="json")
    logs.mkdir(parents=True, exist_ok=True)  # W&B would write elsewhere
    if name == "tensorboard":
        tracker = LOGGER_TYPE_TO_CLASS[name](run_name, os.environ.get("TENSORBOARD_LOGGING_DIR", str(logs)))
    else:
        keys = {"resume": "allow"} if name == "trackio" else {"dir": os.environ.get("WANDB_DIR", str(logs))}
        tracker = LOGGER_TYPE_TO_CLASS[name](recipe.project, name=run_name, config=config, **keys)
    tracker.start()
    return tracker


def training_callback(
    trainer: Any,
    monitor: Monitor,
    stage: str,
    progress: Progress,
    interrupt: Interrupt,
    validate: Validate | None = None,
) -> Any:
    """A trainer's callback: progress, the monitor, validation, and a stop at an interrupt."""
    from transformers import Trainer, TrainerCallback

    facts: dict[str, float] = {}
    recipe = monitor.recipe

    def validated(state: Any, control: Any) -> None:
        """Log a validation; a better one than all before it is saved, and kept by the trainer's rotation."""
        made = _of_main(trainer, lambda: validate(state.global_step) if validate else {})
        Trainer.log(trainer, made)  # TRL's own would add the means of its training to this entry
        if state.global_step and best_step(state.log_history, recipe.metric_for_best_model) == state.global_step:
            state.best_global_step = state.global_step
            control.should_save = True

    class Callback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.start(stage, state.max_steps)
            monitor.begin(state.log_history)
            if state.global_step:
                progress.advance(state.global_step)
            elif validate:
                validated(state, control)
            if state.best_global_step:  # a run may have been moved
                state.best_model_checkpoint = os.path.join(args.output_dir, f"checkpoint-{state.best_global_step}")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if interrupt.requested:
                control.should_save = control.should_training_stop = True
            last = state.global_step == state.max_steps
            if validate and recipe.eval_steps and (last or state.global_step % recipe.eval_steps == 0):
                validated(state, control)
            if control.should_save:
                control.should_log = True  # before it, so that no checkpoint is written after a loss that is no number
            progress.advance(1, **facts)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            entry = state.log_history[-1]
            if "train_runtime" in entry:
                return
            if monitor.see(state.log_history):
                control.should_save = control.should_training_stop = True
            facts.update({shown: float(entry[name]) for name, shown in _SHOWN.items() if entry.get(name) is not None})

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.finish()

    return Callback()


def _of_main(trainer: Any, make: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """What the main process makes, in all processes."""
    from accelerate.utils import broadcast_object_list

    made = [dict(make()) if trainer.is_world_process_zero() else None]
    return dict(broadcast_object_list(made)[0] or {})
