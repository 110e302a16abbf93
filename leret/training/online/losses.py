"""Losses of policy gradients on sampled completions: pure functions of tensors over tokens.

Shapes: (n, width), one row a completion, padded at the end; ``mask`` is 1 on its tokens and 0 behind them. Logarithms
are natural. What stands behind a completion has no part in any result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["sequence", "token", "dapo"]


def clipped_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, *, sequence: bool
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, negative, a token; of the ratio of whole completions where ``sequence``.

    Args:
        logps: under the policy that is trained.
        old_logps: under the policy that sampled; without gradients.
        advantages: (n, width); where ``sequence``, the same at all tokens of a completion.
        mask: (n, width).
        low: the ratio counts down to ``1 - low`` ...
        high: ... and up to ``1 + high``, where the advantage would have it leave that range.
        sequence: the ratio is that of the completion, the product of its tokens' ratios.

    Returns:
        Losses, and where the range held a ratio back (bool); both (n, width), or (n, 1) where ``sequence``.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; two bounds: Yu et al. 2025, arXiv 2503.14476, eq. 8; whole
    completions: Ahmadian et al. 2024, arXiv 2402.14740, section 3.
    """
    difference = (logps - old_logps) * mask
    if sequence:
        difference, advantages = difference.sum(1, keepdim=True), advantages[:, :1]
    ratio = difference.exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    clipped = ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    return loss, clipped


def k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """The estimate of KL(policy || reference) by one sample a token: unbiased, of either sign.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    return logps - reference_logps


def k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """Estimate the same KL, never below 0 and with lower variance; unbiased too.

    Source: Schulman 2020 (see `k1`). GRPO's paper, arXiv 2402.03300, eq. 4, has it alone in the loss; leret's loss
    multiplies it by the ratio to the sampling policy, see `leret.training.online.update.Update`.
    """
    difference = reference_logps - logps
    return difference.exp() - difference - 1


KL = {"k1": k1, "k3": k3}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the squared error of a value, (n, width): the larger one of the value and of the value held near the old.

    Source: as in the code of PPO (Engstrom et al. 2020, arXiv 2005.12729, section 3, item 1).
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)


def entropy(logits: Tensor) -> Tensor:
    """Of the distribution that logits (..., n_vocabulary) give, in nats: (...); minus infinity is of no chance."""
    logps = logits.log_softmax(-1)
    return -(logps.exp() * logps.clamp(min=torch.finfo(logps.dtype).min)).sum(-1)


def total(values: Tensor, mask: Tensor, kind: LossType, n_sequences: int, n_tokens: float) -> Tensor:
    """One number of (n, width) losses, or of (n, 1) losses of whole completions; parts of a batch add up.

    Args:
        values: of a part of the batch.
        mask: (n, width), or (n, 1) of ones.
        kind: ``sequence``: the mean over completions of each one's mean; ``token`` and ``dapo``: over ``n_tokens``.
        n_sequences: completions of the whole batch.
        n_tokens: of the whole batch (``token``), or of all that was sampled, a share of a batch (``dapo``): a batch
            with more tokens then weighs more.

    Source: ``sequence``: arXiv 2402.03300, eq. 3; ``dapo``: arXiv 2503.14476, eq. 8.
    """
    if kind == "sequence":
        return ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / n_sequences
    return (values * mask).sum() / n_tokens


@dataclass
class KLController:
    """The weight of the KL penalty, moved so that the KL stays near a target.

    Attributes:
        coefficient: as it is now.
        target: nats a completion; None leaves the coefficient as it is.
        horizon: completions in which an error of 20 % and more moves the coefficient by about 20 %.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """

    coefficient: float
    target: float | None = None
    horizon: float = 10_000

    def update(self, kl: float, n: int) -> None:
        """After ``n`` completions of mean divergence ``kl``."""
        if self.target is not None and math.isfinite(kl):
            error = min(0.2, max(-0.2, kl / self.target - 1))
            self.coefficient *= 1 + error * n / self.horizon
