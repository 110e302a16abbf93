"""A training recipe as the arguments of TRL's trainers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leret.config.training import TrainingRecipe
from leret.core.errors import MissingDependency


def sft_arguments(recipe: TrainingRecipe, directory: Path, device: str, max_steps: int | None) -> Any:
    """TRL's ``SFTConfig``: the rows come as ids and labels, so it prepares nothing.

    Args:
        recipe: of algorithm sft.
        directory: for the trainer's checkpoints.
        device: as `leret.training.model.pick_device` gives it.
        max_steps: optimizer steps instead of ``recipe.epochs``.

    Raises:
        MissingDependency: the recipe reports to what is not installed.
    """
    from trl import SFTConfig

    return SFTConfig(
        **_shared(recipe, directory, device),
        max_steps=max_steps or -1,
        max_length=None,
        completion_only_loss=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )


def dpo_arguments(recipe: TrainingRecipe, directory: Path, device: str) -> Any:
    """TRL's ``DPOConfig``. The reference's log-probabilities are computed once, before the first step.

    Raises:
        MissingDependency: the recipe reports to what is not installed.
    """
    from trl import DPOConfig

    types, weights = loss_types(recipe)
    return DPOConfig(
        **_shared(recipe, directory, device),
        max_length=None,
        beta=recipe.beta,
        loss_type=types,
        loss_weights=weights,
        precompute_ref_log_probs=True,
        remove_unused_columns=False,
    )


def loss_types(recipe: TrainingRecipe) -> tuple[list[str], list[float]]:
    """TRL's names of the losses that a preference recipe adds up, with their weights."""
    types = ["ipo" if recipe.algorithm == "ipo" else "sigmoid"]
    weights = [1.0]
    if recipe.sft_weight:
        types.append("sft")
        weights.append(recipe.sft_weight)
    return types, weights


def _shared(recipe: TrainingRecipe, directory: Path, device: str) -> dict[str, Any]:
    for package in recipe.report_to:
        if find_spec(package) is None:
            raise MissingDependency(package, package)
    cpu = device == "cpu"
    return {
        "output_dir": str(directory),
        "num_train_epochs": recipe.epochs,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.schedule,
        "warmup_steps": recipe.warmup_steps or recipe.warmup_ratio,  # below 1 it is a share, in transformers 5
        "optim": recipe.optim,
        "weight_decay": recipe.weight_decay,
        "per_device_train_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.accumulate,
        "max_grad_norm": recipe.max_grad_norm,
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "use_cpu": cpu,
        "bf16": recipe.dtype == "bfloat16",
        "gradient_checkpointing": not cpu,
        "dataloader_pin_memory": not cpu,
        "save_strategy": "steps",
        "save_steps": recipe.save_steps,
        "save_total_limit": 2,
        "logging_strategy": "steps",
        "logging_steps": recipe.log_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "report_to": list(recipe.report_to),
        "disable_tqdm": True,
    }
