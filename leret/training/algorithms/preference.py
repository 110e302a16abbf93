"""DPO and IPO on the run's preferences, through TRL's DPOTrainer; the reference model is the initial policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leret.config.training import TrainingRecipe
from leret.training.algorithms.arguments import dpo_arguments
from leret.training.algorithms.losses import PairCollator
from leret.training.model import lora_config
from leret.training.thrift import make_thrifty
from leret.training.tokens import Encoded


def preference_trainer(
    recipe: TrainingRecipe, model: Any, tokenizer: Any, examples: Sequence[Encoded], directory: Path, device: str
) -> Any:
    """TRL's DPOTrainer over pairs of ids; it computes the reference's log-probabilities before it returns.

    Args:
        recipe: of algorithm dpo or ipo.
        model: full weights, or a peft model.
        tokenizer: the policy's.
        examples: the chosen and the rejected completion each.
        directory: for checkpoints.
        device: as `leret.training.model.pick_device` gives it.
    """
    from trl import DPOTrainer

    arguments = dpo_arguments(recipe, directory, device)
    shared = device == "cpu" and make_thrifty(model)
    sequence = recipe.algorithm == "ipo" and recipe.reduction == "sequence"
    fresh = recipe.lora is not None and not hasattr(model, "peft_config")
    return DPOTrainer(
        model=model,
        args=arguments,
        data_collator=PairCollator(tokenizer.pad_token_id, sequence=sequence, shared=shared),
        train_dataset=_dataset(examples, directory, arguments),
        processing_class=tokenizer,
        peft_config=lora_config(recipe.lora) if fresh and recipe.lora else None,
    )


def preference_rows(examples: Sequence[Encoded]) -> dict[str, list[Any]]:
    """Columns of ids for `leret.training.algorithms.losses.PairCollator`, and the text columns that TRL insists on.

    TRL 1.16's DPOTrainer takes no ids: it encodes ``prompt``, ``chosen`` and ``rejected`` whatever else a row holds.
    They are empty here, so that this costs nothing; the collator reads the ids.
    """
    blank = [""] * len(examples)
    return {
        "prompt": blank,
        "chosen": blank,
        "rejected": blank,
        "prompt_tokens": [example.prompt for example in examples],
        "chosen_tokens": [example.completions[0] for example in examples],
        "rejected_tokens": [example.completions[1] for example in examples],
    }


def _dataset(examples: Sequence[Encoded], directory: Path, arguments: Any) -> Any:
    """The rows; on disk where several processes train: TRL shares the reference's values in a file beside them."""
    from datasets import Dataset, load_from_disk

    if arguments.world_size == 1:
        return Dataset.from_dict(preference_rows(examples))
    path = directory / "pairs"
    with arguments.main_process_first():
        if arguments.process_index == 0:
            Dataset.from_dict(preference_rows(examples)).save_to_disk(path)
        return load_from_disk(str(path))
