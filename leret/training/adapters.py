"""Low-rank adapters: making, loading, and merging them into full weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leret.config import LoraSettings
from leret.errors import PolicyError, TrainingError

__all__ = ["adapter_base", "attach", "lora_config"]


def lora_config(settings: LoraSettings) -> Any:
    """The recipe's ``lora`` section as peft's configuration."""
    from peft import LoraConfig

    targets = settings.target_modules
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


def adapter_base(directory: Path) -> Path | None:
    """The model that an adapter directory was trained on; None where the directory holds full weights.

    Raises:
        PolicyError: ``adapter_config.json`` cannot be read, or names no base.
    """
    path = directory / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise PolicyError(f"{path} cannot be read ({error}); train the adapter again") from error
    if not base:
        raise PolicyError(f"{path} names no base model; set base_model_name_or_path to the directory it was trained on")
    beside = directory / str(base)
    return beside if beside.is_dir() else Path(str(base))


def attach(model: Any, directory: Path, settings: LoraSettings | None) -> Any:
    """Put a saved adapter on its base model: trained on where the recipe asks for LoRA too, merged where not.

    Raises:
        TrainingError: the recipe's adapter is of another shape than the saved one.
    """
    from peft import PeftModel

    if settings is None:
        return PeftModel.from_pretrained(model, str(directory)).merge_and_unload().requires_grad_(True)
    loaded = PeftModel.from_pretrained(model, str(directory), is_trainable=True)
    saved: Any = loaded.peft_config["default"]
    if (saved.r, saved.lora_alpha) != (settings.r, settings.alpha):
        raise TrainingError(
            f"{directory} is an adapter with r {saved.r} and alpha {saved.lora_alpha}, the recipe asks for r "
            f"{settings.r} and alpha {settings.alpha}; set lora.r and lora.alpha to the adapter's, or leave lora out "
            "to merge it first"
        )
    return loaded
