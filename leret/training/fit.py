"""One training from its inputs to the finished directory: encode, check, step, save."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.files import write_atomically
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.training.algorithms.preference import preference_trainer
from leret.training.algorithms.sft import sft_trainer
from leret.training.callbacks import Watch
from leret.training.checkpoints import Workplace
from leret.training.data import Example
from leret.training.initial import Initial
from leret.training.model import load_model, load_tokenizer, pick_device, positions, stop_ids
from leret.training.parity import check_parity
from leret.training.preflight import check_loss
from leret.training.process import storing, surroundings
from leret.training.record import Record, model_card
from leret.training.tokens import Encoded, Encoder, end_token


@dataclass(frozen=True, slots=True)
class Fitted:
    """A finished training.

    Attributes:
        resumed_from: step of the checkpoint that it went on from.
        main: this process is the one that writes, where several train together.
    """

    record: Record
    resumed_from: int
    main: bool


def fit(
    recipe: TrainingRecipe,
    run: Run,
    initial: Initial,
    examples: Sequence[Example],
    workplace: Workplace,
    *,
    max_steps: int | None,
    key: Mapping[str, Any],
    progress: Progress | None,
) -> Fitted:
    """Train and publish one policy.

    Raises:
        TrainingError: no example fits, the pre-flight refuses, or the loss is no number.
        PolicyError: the initial policy cannot be loaded.
        RunError: the run cannot be written.
        KeyboardInterrupt: after a checkpoint was written.
    """
    began = time.monotonic()
    device = pick_device(recipe.device)
    watch = Watch(f"train {recipe.policy_name}", progress)
    with ExitStack() as stack:
        stack.enter_context(surroundings(workplace.path, recipe.threads if device == "cpu" else None))
        stack.enter_context(run.writing())
        stack.enter_context(storing())
        model, tokenizer = load_model(initial, recipe, device), load_tokenizer(initial)
        kept = _encode(recipe, model, tokenizer, examples, run, initial)
        trainer = _trainer(recipe, model, tokenizer, kept, workplace.path, device, max_steps)
        difference = check_loss(trainer, recipe)
        resumed_from = _step(trainer, watch, workplace)
        steps = int(trainer.state.global_step)
        record = Record(
            name=recipe.policy_name,
            algorithm=recipe.algorithm,
            key=key,
            parent=recipe.init,
            examples=len(kept),
            dropped=len(examples) - len(kept),
            steps=steps,
            total_steps=initial.total_steps + steps,
            seconds=round(time.monotonic() - began, 3),
            preflight=difference,
            versions=dict(run.manifest().get("versions") or {}),
            log_history=[entry for entry in trainer.state.log_history if "train_runtime" not in entry],
        )
        _save(trainer, tokenizer, record, initial, workplace)
    return Fitted(record, resumed_from, bool(trainer.is_world_process_zero()))


def _encode(
    recipe: TrainingRecipe, model: Any, tokenizer: Any, examples: Sequence[Example], run: Run, initial: Initial
) -> list[Encoded]:
    policy = run.section("sampling", "leret sample RECIPE").get("policy", {})
    encoder = Encoder(tokenizer, end_token(tokenizer, stop_ids(model)), policy.get("enable_thinking"))
    encoded = encoder.encode(examples)
    check_parity(run, initial, encoder, examples, encoded)
    limit = min(recipe.max_length, positions(model) or recipe.max_length)
    kept = [example for example in encoded if example.length <= limit]
    if not kept:
        shortest = min(example.length for example in encoded)
        raise TrainingError(
            f"none of {len(encoded)} examples fits into {limit} tokens (the shortest has {shortest}); raise max_length "
            f"({recipe.max_length}), up to the policy's {positions(model)}, or shorten the prompts of the program"
        )
    return kept


def _trainer(
    recipe: TrainingRecipe,
    model: Any,
    tokenizer: Any,
    examples: Sequence[Encoded],
    directory: Path,
    device: str,
    max_steps: int | None,
) -> Any:
    from transformers import PrinterCallback

    if recipe.algorithm == "sft":
        trainer = sft_trainer(recipe, model, tokenizer, examples, directory, device, max_steps)
    else:
        trainer = preference_trainer(recipe, model, tokenizer, examples, directory, device)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _step(trainer: Any, watch: Watch, workplace: Workplace) -> int:
    """All steps that are left; the step that they went on from."""
    workplace.drop_broken()
    checkpoint = workplace.checkpoint()
    if checkpoint is not None and _take_finished(trainer, checkpoint):
        return int(trainer.state.global_step)
    trainer.add_callback(watch)
    with watch.interruptible():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0


def _take_finished(trainer: Any, checkpoint: Path) -> bool:
    """Load a checkpoint of the last step: the trainer, asked to go on from one, takes a step too many."""
    from transformers import TrainerState

    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if state.global_step < state.max_steps:
        return False
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    return True


def _save(trainer: Any, tokenizer: Any, record: Record, initial: Initial, workplace: Workplace) -> None:
    """Write the policy whole and publish it; nothing in it is a pickle."""
    accelerator = trainer.accelerator
    model = accelerator.unwrap_model(trainer.model)
    state = accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        peft = hasattr(model, "peft_config")
        only = {"selected_adapters": ["default"]} if peft else {}
        model.save_pretrained(workplace.final, state_dict=state, safe_serialization=True, **only)
        tokenizer.save_pretrained(workplace.final)
        if not peft and model.can_generate():
            model.generation_config.save_pretrained(workplace.final)
        trainer.state.save_to_json(str(workplace.final / "trainer_state.json"))
        write_atomically(workplace.final / "README.md", model_card(record, _base_model(initial), peft))
        write_atomically(workplace.final / "training.json", json.dumps(record.value(), indent=1, ensure_ascii=False))
        workplace.publish()
    accelerator.wait_for_everyone()


def _base_model(initial: Initial) -> str:
    """The name of a model of the hub, whose snapshot lies in ``models--OWNER--NAME``; else that of the directory."""
    of_hub = [part for part in initial.directory.parts if part.startswith("models--")]
    return of_hub[-1].removeprefix("models--").replace("--", "/", 1) if of_hub else initial.directory.name
