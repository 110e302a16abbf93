"""Losses of policy gradients on sampled completions: pure functions of tensors over tokens.

Shapes: (n, width), one row a completion, padded at the end; ``mask`` is 1 on its tokens and 0 behind them. Logarithms
are natural. Positions behind a completion have no part in any result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["sequence", "token", "dapo"]


def clipped_loss(log_ratio: Tensor, advantages: Tensor, low: float, high: float | None = None) -> tuple[Tensor, Tensor]:
    """Return the negative clipped surrogate, and True where the range held a ratio back.

    Args:
        log_ratio: (n, width) log-ratios of tokens to the policy that sampled, or (n, 1) of whole completions.
        advantages: (n, width) or (n, 1).
        low: the ratio counts down to ``1 - low`` ...
        high: ... and up to ``1 + high``, if the advantage would push it out of that range; None: ``low``.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; two bounds: Yu et al. 2025, arXiv 2503.14476, eq. 8.
    """
    high = low if high is None else high
    ratio = log_ratio.exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    clipped = ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    return loss, clipped


def k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from one sample a token: unbiased, of either sign.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    return logps - reference_logps


def k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """Estimate the same KL, never below 0 and with lower variance; unbiased too.

    Source: Schulman 2020 (see `k1`); arXiv 2402.03300, eq. 4.
    """
    difference = reference_logps - logps
    return difference.exp() - difference - 1


KL = {"k1": k1, "k3": k3}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return half the squared error (n, width): the larger of the value's and of the value clipped around the old.

    Source: the code of PPO (Engstrom et al. 2020, arXiv 2005.12729, section 3, item 1).
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy (...) in nats of logits (..., n_vocabulary); minus infinity has probability 0."""
    logps = logits.log_softmax(-1)
    return -(logps.exp() * logps.clamp(min=torch.finfo(logps.dtype).min)).sum(-1)


def reduce_loss(losses: Tensor, mask: Tensor, kind: LossType, n_sequences: int, n_tokens: float) -> Tensor:
    """Reduce (n, width) losses of a micro-batch to one number; the numbers of a step's micro-batches add up.

    ``sequence`` is the mean over the step's ``n_sequences`` completions of each one's mean; ``token`` and ``dapo``
    divide by ``n_tokens``: the step's tokens, or its share of the round's, so that a step with more tokens weighs more.

    Source: ``sequence``: arXiv 2402.03300, eq. 3; ``dapo``: arXiv 2503.14476, eq. 8.
    """
    if kind == "sequence":
        return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / n_sequences
    return (losses * mask).sum() / n_tokens


@dataclass
class KLController:
    """Weight of the KL penalty, which moves to keep the KL near a target.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """

    coefficient: float
    target: float | None = None  # nats a completion; None keeps the coefficient
    horizon: float = 10_000  # completions in which an error of 20 % or more moves the coefficient by about 20 %

    def update(self, kl: float, n: int) -> None:
        """Move the weight after ``n`` completions with mean KL ``kl``."""
        if self.target is not None and math.isfinite(kl):
            error = min(0.2, max(-0.2, kl / self.target - 1))
            self.coefficient *= 1 + error * n / self.horizon
