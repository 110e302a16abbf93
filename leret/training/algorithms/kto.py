"""KTO on single completions, desirable or not by their group, through TRL's KTOTrainer.

The reference model is the initial policy.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.core.types import Sample
from leret.rollouts.credit import with_unparsed_reward
from leret.sampling.preferences.dataset import distinct, unparsed_reward
from leret.training.algorithms.base import (
    Algorithm,
    TrainerInputs,
    build_with_reference,
    completion_logps,
    trainer_arguments,
)
from leret.training.data import Encoded, TrainingExample, finished_states, plain

if TYPE_CHECKING:
    import torch


_ROUNDING = 1e-9
"""Relative difference below which two rewards count as equal."""


class KTORecipe(TrainingRecipe):
    """Kahneman-Tversky optimization."""

    learning_rates: ClassVar[tuple[float, float]] = (5e-4, 5e-7)

    algorithm: Literal["kto"] = "kto"
    per_device_train_batch_size: int = Field(16, ge=2, description="completions a batch and device")
    beta: float = Field(0.1, gt=0, description="strength of the tie to the initial policy")
    baseline: Literal["mean"] | float = Field(
        "mean", description="desirable above, undesirable below: the mean reward of the state, or this reward"
    )
    desirable_weight: float = Field(1.0, gt=0)
    undesirable_weight: float = Field(1.0, gt=0)


def kto_loss(
    policy: torch.Tensor,
    reference: torch.Tensor,
    desirable: torch.Tensor,
    kl: torch.Tensor,
    beta: float,
    weights: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """KTO: the weight of a completion less its value, which is counted from the reference point ``kl``.

    Args:
        policy: (n,) log-probability of each completion under the policy, summed over its tokens.
        reference: (n,) the same under the reference model.
        desirable: (n,) of bool.
        kl: () estimate of the policy's divergence from the reference, 0 or more; no gradient goes through it.
        beta: risk aversion.
        weights: of desirable and of undesirable completions.

    Returns:
        (n,) losses between 0 and the weights.

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7.
    """
    import torch

    above = torch.where(desirable, 1.0, -1.0).to(policy) * (policy - reference - kl.detach())
    return torch.where(desirable, *weights).to(policy) * (1 - torch.sigmoid(beta * above))


def scored_completions(
    samples: Sequence[Sample], baseline: Literal["mean"] | float = "mean"
) -> Iterator[tuple[Sample, float]]:
    """Yield the different completions of a state with their rewards less the baseline; at the mean they are left out.

    A mean of equal floats can differ from them in the last bit.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    for sample in distinct(samples):
        score = float(sample.reward or 0.0) - (fmean(rewards) if baseline == "mean" else baseline)
        if baseline != "mean" or abs(score) > _ROUNDING * max(1.0, *map(abs, rewards)):
            yield sample, score


def read_examples(recipe: KTORecipe, run: Run) -> list[TrainingExample]:
    """The different completions of each state, in an order drawn with the seed; those at the state's mean are left out.

    A completion that does not parse is one of them where the run's reward has a price for it, ``unparsed_reward``.
    The order is fixed here: TRL reads the rows as they come, since each one's mismatched completion is its neighbour's.
    """
    price = unparsed_reward(run)
    examples = [
        TrainingExample(group.state.task_id, plain(group.state.messages), (str(sample.completion),), (score,))
        for group in finished_states(run, recipe.predictors)
        for sample, score in scored_completions(with_unparsed_reward(group.samples, price), recipe.baseline)
    ]
    n_desirable = sum(example.scores[0] >= 0 for example in examples)
    if n_desirable in (0, len(examples)):
        raise TrainingError(
            f"the run has {n_desirable} desirable and {len(examples) - n_desirable} undesirable completions, and KTO "
            "needs both: sample more questions, prompts or samples a state, or set `baseline` between their rewards"
        )
    random.Random(recipe.seed).shuffle(examples)
    return examples


def collate_completions(rows: list[dict[str, Any]], pad: int, *, packed: bool = False) -> dict[str, Any]:
    """A batch for TRL's KTOTrainer: sequences with their own completions and, prefixed ``KL_``, the mismatched ones.

    ``packed``: for a model that `share_prompts` has prepared.
    """
    import torch

    from leret.training.packing import PACKED, collate

    batch: dict[str, Any] = {"label": torch.tensor([row["label"] for row in rows])}
    for prefix, completion in (("", "completion_tokens"), ("KL_", "mismatched_tokens")):
        side = collate([(row["prompt_tokens"], row[completion]) for row in rows], pad, packed=packed)
        if packed:  # of the two sides TRL hands on the ids alone, as they are
            setattr(side["input_ids"], PACKED, side.pop(PACKED))
        batch |= {prefix + name: value for name, value in side.items()}
    reference = [name for name in ("ref_logps", "ref_KL_logps") if name in rows[0]]
    return batch | {name: torch.tensor([row[name] for row in rows]) for name in reference}


def make_trainer(recipe: KTORecipe, inputs: TrainerInputs) -> Any:
    """TRL's KTOTrainer over rows of ids; it computes the reference's log-probabilities before it returns."""
    from trl import KTOConfig, KTOTrainer

    arguments = KTOConfig(
        **trainer_arguments(recipe, inputs),
        beta=recipe.beta,
        desirable_weight=recipe.desirable_weight,
        undesirable_weight=recipe.undesirable_weight,
        precompute_ref_log_probs=True,
    )
    pad, packed, rows = inputs.tokenizer.pad_token_id, inputs.share_prompts(), kto_rows(inputs.examples)
    collator = partial(collate_completions, pad=pad, packed=packed)
    return build_with_reference(KTOTrainer, recipe, inputs, arguments, rows, data_collator=collator)


def kto_rows(examples: Sequence[Encoded]) -> dict[str, list[Any]]:
    """Columns of ids for `collate_completions`, and the text columns that TRL encodes, which are empty.

    The reference point is estimated on prompts with the completion of the row before, cut to the longest row's length.
    """
    completions = [example.completions[0] for example in examples]
    longest = max(example.length for example in examples)
    mismatched = zip(examples, completions[-1:] + completions[:-1], strict=True)
    return {name: [""] * len(examples) for name in ("prompt", "completion")} | {
        "prompt_tokens": [example.prompt for example in examples],
        "completion_tokens": completions,
        "mismatched_tokens": [ids[: longest - len(example.prompt)] for example, ids in mismatched],
        "label": [example.scores[0] >= 0 for example in examples],
    }


def oracle_loss(recipe: KTORecipe, model: Any, rows: Sequence[Mapping[str, Any]]) -> float:
    """The mean of `kto_loss`, its reference point estimated on the mismatched completions of these rows."""
    import torch

    def sums(column: str) -> torch.Tensor:
        return torch.stack([completion_logps(model, row["prompt_tokens"], row[column]).sum() for row in rows])

    def column(name: str) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], device=next(model.parameters()).device)

    kl = (sums("mismatched_tokens") - column("ref_KL_logps")).mean().clamp(min=0)
    weights = recipe.desirable_weight, recipe.undesirable_weight
    losses = kto_loss(sums("completion_tokens"), column("ref_logps"), column("label"), kl, recipe.beta, weights)
    return float(losses.mean())


def _describe(recipe: KTORecipe) -> str:
    against = "the mean reward of their state" if recipe.baseline == "mean" else f"a reward of {recipe.baseline:g}"
    return (
        f"Kahneman-Tversky optimization (arXiv 2402.01306) on completions above and below {against}, beta {recipe.beta}"
    )


KTO = Algorithm(KTORecipe, read_examples, make_trainer, oracle_loss, _describe)
