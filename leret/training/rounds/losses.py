"""Policy gradient losses on sampled completions: pure functions of tensors over tokens.

Tensors are (n, width), with one row per completion and padding at the end. ``mask`` is 1 at tokens
and 0 at padding. Padding affects no result. Logarithms are natural.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]
LossType = Literal["sequence", "token", "dapo"]


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the negative clipped surrogate, and a mask that is True where clipping takes effect.

    Args:
        log_ratio: log-ratios to the sampling policy: (n, width) of tokens, or (n, 1) of whole
            completions.
        advantages: (n, width) or (n, 1).
        low: the ratio is clipped at ``1 - low`` if the advantage is negative.
        high: the ratio is clipped at ``1 + high`` if the advantage is positive; None means ``low``.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; two bounds: Yu et al. 2025, arXiv
        2503.14476, eq. 8.
    """
    high = low if high is None else high
    ratio = log_ratio.exp()
    near = ratio.clamp(1 - low, 1 + high)
    loss = -torch.min(ratio * advantages, near * advantages)
    too_low = (ratio < 1 - low) & (advantages < 0)
    too_high = (ratio > 1 + high) & (advantages > 0)
    return loss, too_low | too_high


def importance_weights(difference: Tensor, mask: Tensor, clip: float, level: Level) -> Tensor:
    """Return ``min(p_trainer / p_sampler, clip)``: (n, width) of tokens, or (n, 1) of completions.

    Args:
        difference: (n, width) trainer's minus sampler's token log-probability, at the same weights.
        mask: (n, width).
        clip: largest weight; it bounds the variance and biases the estimate where it takes effect.
        level: ``token`` weights each token by its ratio, ``sequence`` each completion by the
            product of its ratios.

    Source: Ionides 2008, doi 10.1198/106186008X320456; per token: Espeholt et al. 2018, arXiv
        1802.01561, eq. 1.
    """
    log_ratio = difference * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    return log_ratio.exp().clamp(max=clip)


def k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from one sample per token; unbiased, may be negative.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    return logps - reference_logps


def k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from one sample per token.

    The estimate is unbiased and never negative, with lower variance than `k1`.

    Source: Schulman 2020 (see `k1`); arXiv 2402.03300, eq. 4.
    """
    difference = reference_logps - logps
    return difference.exp() - difference - 1


KL = {"k1": k1, "k3": k3}


def divergence(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence (n, width) of two distributions over tokens.

    Args:
        logits: (n, width, n_vocabulary) of the student.
        teacher_logits: the same shape. Only the student's logits should have a gradient.
        beta: 0: forward KL(teacher || student), 1: reverse KL(student || teacher); between:
            ``beta KL(teacher || m) + (1 - beta) KL(student || m)``, where ``m`` is
            ``beta teacher + (1 - beta) student``.

    Source: Agarwal et al. 2023, arXiv 2306.13649, eq. 1; the limits 0 and 1 as in TRL, without the
        division that makes them limits.
    """
    student = _finite_logps(logits)
    teacher = _finite_logps(teacher_logits)
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    shares = torch.stack([student + math.log1p(-beta), teacher + math.log(beta)])
    mixture = shares.logsumexp(0)
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(logps: Tensor, other_logps: Tensor) -> Tensor:
    return (logps.exp() * (logps - other_logps)).sum(-1)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return half the larger squared error (n, width): of the value, or of the clipped value.

    Source: PPO's code (Engstrom et al. 2020, arXiv 2005.12729, section 3, item 1).
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy (...) in nats of logits (..., n_vocabulary).

    A logit may be minus infinity.
    """
    logps = _finite_logps(logits)
    return -(logps.exp() * logps).sum(-1)


def _finite_logps(logits: Tensor) -> Tensor:
    """Return log-probabilities, with the lowest number of the dtype for probability 0."""
    logps = logits.log_softmax(-1)
    return logps.clamp(min=torch.finfo(logps.dtype).min / 2)


def reduce_loss(
    losses: Tensor, mask: Tensor, kind: LossType, n_sequences: int, n_tokens: float
) -> Tensor:
    """Reduce a micro-batch's losses (n, width) to its share of the step's loss.

    Shares add up to the step's loss.

    ``sequence`` averages over tokens and then over the step's ``n_sequences`` completions.
    ``token`` and ``dapo`` divide the sum by ``n_tokens``: for ``token``, the step's token count;
    for ``dapo``, the round's token count divided by the number of steps, so that steps with more
    tokens weigh more.

    Source: ``sequence``: arXiv 2402.03300, eq. 3; ``dapo``: arXiv 2503.14476, eq. 8.
    """
    masked = losses * mask
    if kind == "sequence":
        means = masked.sum(1) / mask.sum(1).clamp(min=1)
        return means.sum() / n_sequences
    return masked.sum() / n_tokens
