"""What is checked before the first step, because it would be trained wrongly without a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.training.algorithms.losses import dpo_loss, ipo_loss

_ROWS = 4
_SMALL = 1 << 20


def check_loss(trainer: Any, recipe: TrainingRecipe) -> float:
    """The trainer's loss must be the model's own, on weights that have been moved away from the reference.

    TRL multiplies the last hidden state by the output matrix itself. For a model whose head is more than that, its
    log-probabilities are wrong, and the loss of DPO and IPO is still right at the first step.

    Args:
        trainer: TRL's, before its first step; left as it was.
        recipe: that it was built from.

    Returns:
        The difference, as a fraction of the loss or of 1, whichever is larger.

    Raises:
        TrainingError: the two differ.
    """
    model = trainer.model
    rows = sorted(range(len(trainer.train_dataset)), key=lambda index: _length(trainer.train_dataset[index]))[:_ROWS]
    device = next(model.parameters()).device
    batch = trainer.data_collator([_kept(trainer, trainer.train_dataset[index]) for index in rows])
    batch = {name: value.to(device) for name, value in batch.items()}
    model.eval()
    try:
        with torch.no_grad(), _moved(model):
            found = float(trainer.compute_loss(model, dict(batch)))
            expected = _sft_loss(model, batch) if recipe.algorithm == "sft" else _pair_loss(model, batch, recipe)
    finally:
        model.train()
    difference = abs(found - expected) / max(1.0, abs(expected))
    if not difference <= (1e-4 if recipe.dtype == "float32" else 5e-2):
        raise TrainingError(
            f"TRL computes a loss of {found:.6g} for {type(model).__name__} where the model itself gives "
            f"{expected:.6g}: its log-probabilities are not the last hidden state times one output matrix, and it "
            "would be trained on the wrong loss. Use an architecture with such a head (Llama, Qwen, OPT ...)"
        )
    return difference


def completion_logps(model: Any, batch: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the marked tokens, from the model's plain forward, one sequence at a time.

    Args:
        model: a causal language model.
        batch: ``input_ids`` and ``attention_mask``, (n, length), right-padded.
        mask: (n, length), true where a token counts; the first column has no prediction and is left out.

    Returns:
        (n, length - 1) float32, 0 where a token does not count.
    """
    rows = []
    for ids, attended in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        sequence = ids[: int(attended.sum())]
        logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
        logps = torch.log_softmax(logits.float(), dim=-1).gather(-1, sequence[1:, None])[:, 0]
        rows.append(torch.nn.functional.pad(logps, (0, len(ids) - len(sequence))))
    return torch.stack(rows) * mask[:, 1:]


def _sft_loss(model: Any, batch: dict[str, torch.Tensor]) -> float:
    mask = batch["labels"] >= 0
    return float(-completion_logps(model, batch, mask).sum() / mask[:, 1:].sum())


def _pair_loss(model: Any, batch: dict[str, torch.Tensor], recipe: TrainingRecipe) -> float:
    mask = batch["completion_mask"][:, 1:].bool()
    mask = torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1)
    logps = completion_logps(model, batch, mask)
    chosen, rejected = logps.sum(dim=1).chunk(2)
    reference = (batch["ref_chosen_logps"], batch["ref_rejected_logps"])
    n_chosen, n_rejected = mask.sum(dim=1).chunk(2)
    if recipe.algorithm == "dpo":
        losses = dpo_loss(chosen, rejected, *reference, recipe.beta)
    elif recipe.reduction == "sequence":
        losses = ipo_loss(chosen, rejected, *reference, recipe.beta)
    else:
        means = (reference[0] / n_chosen, reference[1] / n_rejected)
        losses = ipo_loss(chosen / n_chosen, rejected / n_rejected, *means, recipe.beta)
    return float(losses.mean() - recipe.sft_weight * chosen.sum() / n_chosen.sum())


@contextmanager
def _moved(model: Any) -> Iterator[None]:
    """Weights with noise added for a while: all that are small, and all outside the backbone."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    backbone = {id(parameter) for parameter in inner.base_model.parameters()}
    noise = torch.Generator().manual_seed(0)
    before: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    for parameter in model.parameters():
        if parameter.numel() > _SMALL and id(parameter) in backbone:
            continue
        before.append((parameter, parameter.detach().clone()))
        scale = 0.05 + 0.1 * float(parameter.detach().float().abs().mean())
        step = torch.randn(parameter.shape, generator=noise) * scale
        parameter.data.add_(step.to(parameter.device, parameter.dtype))
    try:
        yield
    finally:
        for parameter, value in before:
            parameter.data.copy_(value)


def _length(row: dict[str, Any]) -> int:
    return len(row["input_ids"]) if "input_ids" in row else len(row["prompt_tokens"]) + len(row["chosen_tokens"])


def _kept(trainer: Any, row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, str)}
