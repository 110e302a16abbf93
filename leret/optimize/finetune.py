"""Training jobs for DSPy's optimizers: `leret.training.stage.train_job` on examples in memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from leret.config.messages import validated
from leret.core.dspy_internals import TrainingJob, TrainingStatus, get_finetune_directory
from leret.core.errors import TrainingError
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import Task, digest
from leret.policies.checkpoints import find_model, model_digest
from leret.rollouts.environment import Environment, questions_digest
from leret.training.algorithms import TrainingRecipe
from leret.training.data import TrainingExample, examples_digest
from leret.training.job import CheckpointDirectory, Interrupt, TrainReport
from leret.training.job import TrainingJob as LocalTraining
from leret.training.model import InitialPolicy, training_record, with_learning_rate
from leret.training.stage import train_job

ONE_TRAINING = threading.Lock()
"""Lock held during training, which sets threads, environment variables and library flags of the
process."""

_LOG = logging.getLogger("leret")


class FinetuneJob(TrainingJob):
    """A finetuning job in a thread, with a status and a way to stop the training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.interrupt = Interrupt()
        self.training = False

    def status(self) -> TrainingStatus:
        """Return the status; it is pending while another training runs in this process."""
        if self.cancelled():
            return TrainingStatus.cancelled
        if self.done():
            return (
                TrainingStatus.failed
                if isinstance(self.result(), Exception)
                else TrainingStatus.succeeded
            )
        return TrainingStatus.running if self.training else TrainingStatus.pending

    def cancel(self) -> bool:
        """Stop after the current step and keep a checkpoint to resume from.

        Return False if the job is done.
        """
        cancelled = Future.cancel(self)  # DSPy's `cancel` returns None
        self.interrupt.requested |= cancelled
        return cancelled

    def set_result(self, result: Any) -> None:
        """Set the result unless the job was cancelled.

        The training thread calls this method in both cases.
        """
        if not self.cancelled():
            super().set_result(result)


def train_examples(
    model: str,
    inputs: Sequence[TrainingExample] | Sequence[Task],
    keys: Mapping[str, Any],
    run_dir: str | Path,
    *,
    job: FinetuneJob | None = None,
    progress: Progress | None = None,
    environment: Environment | None = None,
    run: Run | None = None,
) -> Path:
    """Train a policy, or resume its training, and return its directory.

    Do nothing if the policy exists.

    Args:
        model: model name of an LM, such as ``leret/DIRECTORY`` or ``leret/demo``; the prefix
            ``leret/`` is optional.
        inputs: examples with one completion (sft, kto), or with a chosen and a rejected completion
            (ipo, dpo); for an online algorithm, tasks to sample.
        keys: ``algorithm``, keys from the algorithm's recipe, and optionally the keys described in
            `_training`.
        run_dir: run directory; the policy is written to its ``policies`` folder.
        job: job that receives the training's status and can stop the training.
        progress: shows the training steps.
        environment: environment for the tasks.
        run: run that the tasks belong to.

    Raises:
        ConfigError: a key is invalid.
        TrainingError: there are no examples, all examples are too long, or a check fails.
        PolicyError: the model cannot be loaded.
        RunError: the directory holds a different training with this name.
    """
    training = _training(model, inputs, keys, Path(run_dir).resolve(), run, environment)
    with ONE_TRAINING:
        report = _train(training, job, progress)
    if report.dropped:
        _LOG.warning(
            "%s: %d of %d examples were too long and were dropped",
            report.path,
            report.dropped,
            len(inputs),
        )
    return report.path


def _training(
    model: str,
    inputs: Sequence[Any],
    keys: Mapping[str, Any],
    run_dir: Path,
    run: Run | None,
    environment: Environment | None,
) -> LocalTraining:
    """Return a training job.

    Its name is a digest of the data, keys and model unless ``keys`` has a ``name``.

    ``keys`` may also have ``max_steps`` (optimizer steps instead of epochs; 0 keeps the policy
    unchanged) and ``enable_thinking`` (for the chat template).
    """
    keys = dict(keys)
    online = environment is not None
    max_steps = None if online else keys.pop("max_steps", None)
    thinking = keys.pop("enable_thinking", None)
    recipe = validated(TrainingRecipe, keys, "train_kwargs")
    if not online and recipe.find_algorithm().is_online:
        raise TrainingError(
            f"algorithm: {recipe.algorithm} needs a run's tasks to sample; for stored examples use "
            "sft, dpo or ipo"
        )
    if not inputs:
        raise TrainingError(
            "there are no examples to train on; check whether the metric rejects every example"
        )
    initial = initial_policy(model)
    recipe = with_learning_rate(recipe, initial)
    digests = {
        "data": questions_digest(inputs) if online else examples_digest(inputs),
        "parent": initial.digest,
    }
    more = {"max_steps": max_steps, "enable_thinking": thinking}
    content = digest(recipe.model_dump(mode="json", exclude={"name", "init_from"}), digests, more)
    name = recipe.name or f"{recipe.algorithm_name}-{content[:12]}"
    recipe = recipe.model_copy(update={"name": name, "init_from": initial.name})
    directory = CheckpointDirectory(run_dir / "policies", name)
    key = {"recipe": recipe.model_dump(mode="json") | more, "digest": digests}
    return LocalTraining(
        recipe, initial, inputs, directory, key, run, environment, None, max_steps, thinking
    )


def _train(
    training: LocalTraining, job: FinetuneJob | None, progress: Progress | None
) -> TrainReport:
    if job is None:
        return train_job(training, progress)
    job.training = True
    try:
        if not job.cancelled():
            return train_job(training, progress, interrupt=job.interrupt)
    except KeyboardInterrupt:
        if not job.cancelled():
            raise
    raise TrainingError(
        f"{training.directory.path}: cancelled; train again to resume from the last checkpoint"
    )


def initial_policy(model: str) -> InitialPolicy:
    """Return the initial policy for training an LM's model."""
    path = find_model(model.removeprefix("leret/")).resolve()
    steps = int(training_record(path).get("total_steps", 0))
    return InitialPolicy(model.rpartition("/")[2], path, model_digest(path), steps)


def default_run_dir() -> Path:
    """Return the default ``run_dir``: ``leret`` in DSPy's folder for finetuned models."""
    return Path(get_finetune_directory()) / "leret"
