"""Trainings for DSPy's optimizers: `leret.training.stage.train_job` on examples in memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from leret.config.base import Settings
from leret.config.messages import describe
from leret.core.dspy_internals import TrainingJob, TrainingStatus, get_finetune_directory
from leret.core.errors import TrainingError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Task, digest
from leret.core.yaml import Placed
from leret.policies.checkpoints import find_model, model_digest
from leret.rollouts.environment import Environment, questions_digest
from leret.training.algorithms import TrainingRecipe
from leret.training.data import TrainingExample, examples_digest
from leret.training.job import CheckpointDirectory, Interrupt, TrainReport
from leret.training.job import TrainingJob as LocalTraining
from leret.training.model import InitialPolicy, training_record, with_learning_rate
from leret.training.stage import train_job

S = TypeVar("S", bound=Settings)

ONE_TRAINING = threading.Lock()
"""Held during a training, which sets threads, environment and library flags of the whole process."""

_LOG = logging.getLogger("leret")


class FinetuneJob(TrainingJob):
    """A finetuning in a thread: its status, and a way to stop it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.interrupt = Interrupt()
        self.training = False

    def status(self) -> TrainingStatus:
        """Return the status; pending while another training runs in this process."""
        if self.cancelled():
            return TrainingStatus.cancelled
        if self.done():
            return TrainingStatus.failed if isinstance(self.result(), Exception) else TrainingStatus.succeeded
        return TrainingStatus.running if self.training else TrainingStatus.pending

    def cancel(self) -> bool:
        """Stop after the current step, with a checkpoint to resume from; return False if the job is done."""
        cancelled = Future.cancel(self)  # DSPy's override returns None
        self.interrupt.requested |= cancelled
        return cancelled

    def set_result(self, result: Any) -> None:
        """Set the result. The training thread calls this after a cancel too; the result is then dropped."""
        if not self.cancelled():
            super().set_result(result)


def train_examples(
    model: str,
    examples: Sequence[TrainingExample],
    keys: Mapping[str, Any],
    run_dir: str | Path,
    *,
    job: FinetuneJob | None = None,
    progress: Progress | None = None,
    tasks: Sequence[Task] = (),
    environment: Environment | None = None,
    run: Run | None = None,
) -> Path:
    """Train a policy on examples in memory, or resume its training; do nothing if it exists.

    Args:
        model: an LM's: ``leret/DIRECTORY``, ``leret/demo``, with or without ``leret/``.
        examples: one completion each for sft and kto, chosen and rejected for ipo and dpo.
        keys: of the algorithm's recipe, with ``algorithm``, ``max_steps`` and ``enable_thinking``; see `_training`.
        run_dir: its ``policies`` folder gets the policy, whose directory is returned.
        job: gets the status, and can stop the training.
        progress: shows the steps.
        tasks: samples of an online algorithm, instead of examples.
        environment: of the tasks.
        run: of the tasks.

    Raises:
        TrainingError: a key is wrong, there is no example, no example fits, or a check refuses.
        PolicyError: the model cannot be loaded.
        RunError: the directory holds another training of this name.
    """
    training = _training(model, tasks or examples, keys, Path(run_dir).resolve(), run, environment)
    with ONE_TRAINING:
        report = _train(training, job, progress)
    if report.dropped:
        _LOG.warning("%s: %d of %d examples were too long", report.path, report.dropped, len(examples))
    return report.path


def _training(
    model: str,
    inputs: Sequence[Any],
    keys: Mapping[str, Any],
    run_dir: Path,
    run: Run | None,
    environment: Environment | None,
) -> LocalTraining:
    """Return a training that is named by a digest of data, keys and model, unless ``keys`` has a ``name``.

    ``keys`` may also have ``max_steps`` (optimizer steps instead of epochs; 0 gives the same policy) and
    ``enable_thinking`` (of the chat template).
    """
    keys, online = dict(keys), environment is not None
    max_steps, thinking = None if online else keys.pop("max_steps", None), keys.pop("enable_thinking", None)
    recipe = validated(TrainingRecipe, keys)
    if not inputs:
        raise TrainingError(
            "there is nothing to train on: no example is left; check whether the metric rejects all of them"
        )
    initial = initial_policy(model)
    recipe = with_learning_rate(recipe, initial)
    digests = {"data": questions_digest(inputs) if online else examples_digest(inputs), "parent": initial.digest}
    more = {"max_steps": max_steps, "enable_thinking": thinking}
    content = digest(recipe.model_dump(mode="json", exclude={"name", "init_from"}), digests, more)
    name = recipe.name or f"{recipe.algorithm}-{content[:12]}"
    recipe = recipe.model_copy(update={"name": name, "init_from": initial.name})
    directory = CheckpointDirectory(run_dir / "policies", name)
    key = {"recipe": recipe.model_dump(mode="json") | more, "digest": digests}
    return LocalTraining(recipe, initial, inputs, directory, key, run, environment, None, max_steps, thinking)


def _train(training: LocalTraining, job: FinetuneJob | None, progress: Progress | None) -> TrainReport:
    if job is None:
        return train_job(training, progress)[0]
    job.training = True
    try:
        if not job.cancelled():
            return train_job(training, progress, interrupt=job.interrupt)[0]
    except KeyboardInterrupt:
        if not job.cancelled():
            raise
    raise TrainingError(f"{training.directory.path}: cancelled; the same training resumes from its last checkpoint")


def validated(settings: type[S], keys: Mapping[str, Any]) -> S:
    """Make settings from a mapping; a `TrainingError` lists all wrong keys."""
    try:
        return settings.model_validate(dict(keys))
    except ValidationError as error:
        placed = Placed(dict(keys), {(): "train_kwargs"})
        raise TrainingError("; ".join(describe(fault, settings, placed) for fault in error.errors())) from None


def initial_policy(model: str) -> InitialPolicy:
    """Return the policy that a training of an LM's model starts from."""
    path = find_model(model.removeprefix("leret/")).resolve()
    steps = int(training_record(path).get("total_steps", 0))
    return InitialPolicy(model.rpartition("/")[2], path, model_digest(path), steps)


def default_run_dir() -> Path:
    """Return the directory of trainings without ``run_dir``: ``leret`` in DSPy's folder of finetuned models."""
    return Path(get_finetune_directory()) / "leret"
