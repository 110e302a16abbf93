"""What a training needs of memory, against what the device has left: said before the first step, not by a crash.

The estimate is of the weights' gradients, the optimizer's states, and the activations of the largest batch. It is right
to a factor of `FACTOR` (a test compares it with what a training takes on a CPU).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.training.data import Encoded

FACTOR = 1.5
"""A training is refused where it needs so many times what is there; between 1 and this it is a warning."""

_STATES = {"adamw_torch_fused": 2, "adamw_torch": 2, "rmsprop": 1, "adafactor": 0, "sgd": 0}
"""Numbers that an optimizer keeps of a weight."""
_LOG = logging.getLogger("leret")


def estimate_memory(model: Any, recipe: TrainingRecipe, examples: Sequence[Encoded], device: str) -> dict[str, int]:
    """Bytes that a training of a loaded model needs, by what for; its weights only where they are yet to be moved.

    A layer keeps about ``16 h + 6 i`` numbers a token for the backward pass (h wide, its MLP i; as Korthikanti et al.
    2022, arXiv 2205.05198, section 4, without the attention's probabilities); with gradient checkpointing, as on a GPU,
    only h, and all of one layer; the output layer three times the vocabulary for each token of a completion.

    The longest examples make the largest batch; the model's weights are in the memory of the CPU.
    """
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    if recipe.lora is not None and not hasattr(model, "peft_config"):  # the trainer makes it, of all linear layers
        sizes = (m.in_features + m.out_features for m in model.modules() if hasattr(m, "in_features"))
        trained = recipe.lora.r * sum(sizes)
    config = model.config.get_text_config()
    h, layers = config.hidden_size, config.num_hidden_layers
    width = 16 * h + 6 * (getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", 4 * h))
    batch = sorted(examples, key=lambda example: -example.length)[: recipe.per_device_train_batch_size]
    n_written = sum(len(ids) for example in batch for ids in example.completions)
    if device == "cpu":  # a prompt runs once for its completions, see `packing`
        n_tokens = len(batch) * max(len(one.prompt) + sum(map(len, one.completions)) for one in batch)
        kept = n_tokens * layers * width
    else:
        n_tokens = len(batch) * len(batch[0].completions) * batch[0].length
        kept = n_tokens * (layers * h + width)
    size = 2 if recipe.dtype == "bfloat16" else 4
    to_move = (weight for weight in model.parameters() if not device.startswith(weight.device.type))
    return {
        "weights": sum(weight.numel() * weight.element_size() for weight in to_move),
        "gradients": 4 * trained,
        "optimizer": 4 * trained * _STATES[recipe.optim],
        "activations": kept * size + n_written * 3 * config.vocab_size * 4,
    }


def check_memory(estimate: Mapping[str, int], recipe: TrainingRecipe, device: str) -> None:
    """Warn, or refuse, where the device has less than a training needs; says which key to lower."""
    needed, available = sum(estimate.values()), _available(device)
    if needed <= available:
        return
    mend = f"{'lower lora.r' if recipe.lora else 'set lora'}, or set optim: adafactor"
    if max(estimate.values()) == estimate["activations"]:
        mend = "lower per_device_train_batch_size (and raise gradient_accumulation_steps), or max_length"
    parts = ", ".join(f"{name} {size / 2**30:.3g}" for name, size in estimate.items() if size)
    text = f"needs about {needed / 2**30:.3g} GiB ({parts}); {device} has {available / 2**30:.3g} left: {mend}"
    if needed > FACTOR * available:
        raise TrainingError(f"{recipe.policy_name} {text}")
    _LOG.warning("%s %s", recipe.policy_name, text)


def _available(device: str) -> int:
    if device == "cpu":
        import psutil  # type: ignore[import-untyped]

        return int(psutil.virtual_memory().available)
    import torch

    return int(torch.cuda.mem_get_info(device)[0])
