"""One training from its objects to the finished directory: encode, check, step, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.progress import Progress, Silent
from leret.training.algorithms import ALGORITHMS
from leret.training.algorithms.base import TrainerInputs
from leret.training.checkpoints import CheckpointDirectory, TrainingRecord, TrainReport, checkpoint_step
from leret.training.checks import check_loss
from leret.training.data import Encoded, TokenEncoder, TrainingExample, end_token
from leret.training.model import InitialPolicy, load_for_training, pick_device, positions, stop_ids
from leret.training.process import Interrupt, training_callback, training_process

CheckEncoded = Callable[[TokenEncoder, Sequence[Encoded]], None]
"""Refuses examples that are not what was sent to the policy when it was sampled."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training with its inputs: what a recipe and a run make, or other code.

    Attributes:
        key: what the result follows from; stands in training.json.
        max_steps: optimizer steps instead of the recipe's epochs.
        enable_thinking: of the chat template, as the examples were sampled.
        check: refuses examples that were not sampled so; None compares nothing.
        versions: of packages, for the record.
    """

    recipe: TrainingRecipe
    initial: InitialPolicy
    examples: Sequence[TrainingExample]
    directory: CheckpointDirectory
    key: Mapping[str, Any]
    max_steps: int | None = None
    enable_thinking: bool | None = None
    check: CheckEncoded | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)


def fit(job: TrainingJob, progress: Progress | None = None) -> tuple[TrainReport, bool]:
    """Train and publish one policy, or go on with it from its last checkpoint.

    Returns:
        The report, and whether this process is the one that writes, where several train together.
    """
    began = time.monotonic()
    recipe, directory = job.recipe, job.directory
    algorithm, device = ALGORITHMS[recipe.algorithm], pick_device(recipe.device)
    with training_process(directory.path, recipe.threads if device == "cpu" else None):
        model, tokenizer = load_for_training(job.initial, recipe)
        examples = _encode(job, model, tokenizer)
        inputs = TrainerInputs(model, tokenizer, examples, directory.path, device, job.max_steps)
        trainer = algorithm.make_trainer(recipe, inputs)
        difference = check_loss(trainer, recipe, algorithm)
        resumed_from = _step(trainer, directory, f"train {recipe.policy_name}", progress or Silent())
        steps, seconds = int(trainer.state.global_step), time.monotonic() - began
        record = TrainingRecord(
            name=recipe.policy_name,
            algorithm=recipe.algorithm,
            key=job.key,
            parent=recipe.init_from,
            examples=len(examples),
            dropped=len(job.examples) - len(examples),
            steps=steps,
            total_steps=job.initial.total_steps + steps,
            seconds=round(seconds, 3),
            preflight=difference,
            versions=job.versions,
            log_history=[entry for entry in trainer.state.log_history if "train_runtime" not in entry],
        )
        _save(trainer, tokenizer, record, algorithm.describe(recipe), job)
    report = record.report(directory.policy, time.monotonic() - began, resumed_from=resumed_from)
    return report, bool(trainer.is_world_process_zero())


def _encode(job: TrainingJob, model: Any, tokenizer: Any) -> list[Encoded]:
    encoder = TokenEncoder(tokenizer, end_token(tokenizer, stop_ids(model)), job.enable_thinking)
    encoded = encoder.encode(job.examples)
    if job.check is not None:
        job.check(encoder, encoded)
    limit = min(job.recipe.max_length, positions(model) or job.recipe.max_length)
    fitting = [example for example in encoded if example.length <= limit]
    if not fitting:
        shortest = min(example.length for example in encoded)
        raise TrainingError(
            f"none of {len(encoded)} examples fits into {limit} tokens (the shortest has {shortest}); raise max_length "
            f"({job.recipe.max_length}), up to the policy's {positions(model)}, or shorten the prompts of the program"
        )
    return fitting


def _step(trainer: Any, directory: CheckpointDirectory, stage: str, progress: Progress) -> int:
    from transformers import PrinterCallback

    directory.drop_broken()
    checkpoint = directory.checkpoint()
    if checkpoint is not None and _take_finished(trainer, checkpoint):
        return int(trainer.state.global_step)
    interrupt = Interrupt()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(training_callback(stage, progress, interrupt))
    with interrupt.handled():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return checkpoint_step(checkpoint)


def _take_finished(trainer: Any, checkpoint: Path) -> bool:
    """Load a checkpoint of the last step: the trainer, asked to go on from one, takes a step too many."""
    from transformers import TrainerState

    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if state.global_step < state.max_steps:
        return False
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    return True


def _save(trainer: Any, tokenizer: Any, record: TrainingRecord, method: str, job: TrainingJob) -> None:
    """Write the policy whole and publish it; nothing in it is a pickle."""
    accelerator, final = trainer.accelerator, job.directory.final
    model = accelerator.unwrap_model(trainer.model)
    state = accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        peft = hasattr(model, "peft_config")
        only = {"selected_adapters": ["default"]} if peft else {}
        model.save_pretrained(final, state_dict=state, safe_serialization=True, **only)
        tokenizer.save_pretrained(final)
        if not peft and model.can_generate():
            model.generation_config.save_pretrained(final)
        trainer.state.save_to_json(str(final / "trainer_state.json"))
        record.write(final, method, job.initial.base_model, peft)
        job.directory.publish()
    accelerator.wait_for_everyone()
