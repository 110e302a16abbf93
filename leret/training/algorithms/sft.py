"""Supervised fine-tuning on the best completions: LeReT's context distillation, through TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leret.config.training import TrainingRecipe
from leret.training.algorithms.arguments import sft_arguments
from leret.training.model import lora_config
from leret.training.thrift import make_thrifty
from leret.training.tokens import Encoded

IGNORED = -100
"""The label of a token that has no loss, as torch and transformers have it."""


def sft_trainer(
    recipe: TrainingRecipe,
    model: Any,
    tokenizer: Any,
    examples: Sequence[Encoded],
    directory: Path,
    device: str,
    max_steps: int | None = None,
) -> Any:
    """TRL's SFTTrainer over rows of ids; the loss is on the completion and its end token.

    Args:
        recipe: of algorithm sft.
        model: full weights, or a peft model.
        tokenizer: the policy's.
        examples: one completion each.
        directory: for checkpoints.
        device: as `leret.training.model.pick_device` gives it.
        max_steps: optimizer steps instead of ``recipe.epochs``.
    """
    from datasets import Dataset
    from trl import SFTTrainer

    if device == "cpu":
        make_thrifty(model)
    return SFTTrainer(
        model=model,
        args=sft_arguments(recipe, directory, device, max_steps),
        train_dataset=Dataset.from_dict(sft_rows(examples)),
        processing_class=tokenizer,
        peft_config=_fresh_adapter(recipe, model),
    )


def sft_rows(examples: Sequence[Encoded]) -> dict[str, list[list[int]]]:
    """Columns ``input_ids`` and ``labels``, the prompt's labels ignored."""
    return {
        "input_ids": [example.prompt + example.completions[0] for example in examples],
        "labels": [[IGNORED] * len(example.prompt) + example.completions[0] for example in examples],
    }


def _fresh_adapter(recipe: TrainingRecipe, model: Any) -> Any:
    if recipe.lora is None or hasattr(model, "peft_config"):
        return None
    return lora_config(recipe.lora)
