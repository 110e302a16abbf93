"""Low-rank adapters: making, loading, and merging them into full weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leret.config.training import LoraSettings, TrainingRecipe
from leret.core.errors import PolicyError, TrainingError
from leret.training.initial import Initial


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


pass


def load_tokenizer(initial: Initial) -> Any:
    """The policy's tokenizer; an adapter without one has its base's.

    Raises:
        PolicyError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    source = initial.directory
    if not any((source / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        source = adapter_base(source) or source
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"{source} has no tokenizer that can be read ({_line(error)}); copy its files there"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    return tokenizer


def load_model(initial: Initial, recipe: TrainingRecipe, device: str) -> Any:
    """The policy's weights, in training mode.

    Weights are float32 and autocast does bfloat16, since an update at a small learning rate is lost in bfloat16
    weights; only the frozen base of an adapter is loaded in bfloat16.

    Raises:
        PolicyError: the directory cannot be read as a causal LM.
        TrainingError: an adapter does not fit the recipe.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    frozen = recipe.lora is not None and recipe.dtype == "bfloat16"
    base = adapter_base(initial.directory)
    source = base or initial.directory
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.bfloat16 if frozen else torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, told = loaded
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise PolicyError(
            f"{source} cannot be loaded as a causal language model ({_line(error)}); restore it, or name another with "
            "init"
        ) from error
    absent = sorted(str(key) for key in [*told["missing_keys"], *told["mismatched_keys"]])
    if absent:
        # transformers fills them with random numbers and goes on.
        raise PolicyError(
            f"{source} lacks {len(absent)} of its weights ({', '.join(absent[:3])}); save the whole model again"
        )
    if base is not None:
        model = attach(model, initial.directory, recipe.lora)
    model.train()
    return model


def pick_device(device: str) -> str:
    """``auto`` is the first GPU where there is one, and the CPU where not.

    Raises:
        TrainingError: the device is not there.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise TrainingError(f"device: {device} is not available here; use auto or cpu")
    return device


def positions(model: Any) -> int | None:
    """Tokens that the model can take at most; None where its configuration does not say."""
    value = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(value) if value else None


def stop_ids(model: Any) -> tuple[int, ...]:
    """The ids at which generation stops."""
    value = getattr(model.generation_config, "eos_token_id", None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
