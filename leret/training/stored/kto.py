"""KTO: Kahneman-Tversky optimization on single completions, with TRL's KTOTrainer.

A completion is desirable if its reward is at least the baseline. The reference model is the initial
policy.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar, Literal

from pydantic import Field

from leret.config.training import ExampleRecipe
from leret.core.errors import TrainingError
from leret.core.types import Sample
from leret.rollouts.credit import with_unparsed_reward
from leret.sampling.preferences.dataset import distinct
from leret.training.data import Encoded, Samples, TrainingExample
from leret.training.stored.trainer import (
    StoredAlgorithm,
    TrainerInputs,
    stored_trainer,
)

_ROUNDING = 1e-9


class KTORecipe(ExampleRecipe):
    """Kahneman-Tversky optimization."""

    learning_rates: ClassVar[Mapping[float, float]] = {1.5e6: 5e-4, 1e9: 5e-7}

    algorithm: Literal["kto"] = "kto"
    per_device_train_batch_size: int = Field(
        16, ge=2, description="completions per batch and device"
    )
    beta: float = Field(
        0.1, gt=0, description="strength of the regularization toward the initial policy"
    )
    baseline: Literal["mean"] | float = Field(
        "mean",
        description="reward that separates desirable from undesirable: the state's mean, or a number",
    )
    desirable_weight: float = Field(1.0, gt=0)
    undesirable_weight: float = Field(1.0, gt=0)


def scored_completions(
    samples: Sequence[Sample], baseline: Literal["mean"] | float = "mean"
) -> Iterator[tuple[Sample, float]]:
    """Yield distinct samples of a state with their rewards minus the baseline.

    A score of 0 is skipped if the baseline is the mean.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    for sample in distinct(samples):
        reward = float(sample.reward or 0.0)
        if baseline != "mean":
            yield sample, reward - baseline
            continue
        score = reward - fmean(rewards)
        # The mean of identical floats can differ from the floats in the last bit.
        if abs(score) > _ROUNDING * max(1.0, *map(abs, rewards)):
            yield sample, score


def examples(recipe: KTORecipe, samples: Samples) -> list[TrainingExample]:
    """Return the distinct completions of each state, except those that `scored_completions` skips.

    The order is shuffled once, because TRL pairs each prompt with the completion of a neighbouring
    row as its mismatch.
    """
    completions = []
    for group in samples.groups():
        rewarded = with_unparsed_reward(group.samples, samples.unparsed_reward)
        for sample, score in scored_completions(rewarded, recipe.baseline):
            completions.append(TrainingExample.of(group.state, (sample,), (score,)))
    n_desirable = sum(example.scores[0] >= 0 for example in completions)
    n_undesirable = len(completions) - n_desirable
    if n_desirable == 0 or n_undesirable == 0:
        raise TrainingError(
            f"the run has {n_desirable} desirable and {n_undesirable} undesirable completions, and "
            "KTO needs both kinds; sample more questions, prompts or samples per state, or change "
            "`baseline`"
        )
    random.Random(recipe.seed).shuffle(completions)
    return completions


def collate_completions(
    rows: list[dict[str, Any]], pad: int, *, packed: bool = False
) -> dict[str, Any]:
    """Return a batch for TRL's KTOTrainer.

    Keys that start with ``KL_`` hold mismatched completions.
    """
    import torch

    from leret.policies.local.packing import collate

    batch: dict[str, Any] = {"label": torch.tensor([row["label"] for row in rows])}
    for prefix, column in (("", "completion_tokens"), ("KL_", "mismatched_tokens")):
        sequences = [(row["prompt_tokens"], row[column]) for row in rows]
        for name, value in collate(sequences, pad, packed=packed).items():
            batch[prefix + name] = value
    for name in ("ref_logps", "ref_KL_logps"):
        if name in rows[0]:
            batch[name] = torch.tensor([row[name] for row in rows])
    return batch


def make_trainer(recipe: KTORecipe, inputs: TrainerInputs) -> Any:
    """Return TRL's KTOTrainer.

    Its rows hold token ids and the reference model's log-probabilities.
    """
    keys = {
        "beta": recipe.beta,
        "desirable_weight": recipe.desirable_weight,
        "undesirable_weight": recipe.undesirable_weight,
        "precompute_ref_log_probs": True,
    }
    rows = kto_rows(inputs.examples)
    return stored_trainer("KTO", recipe, inputs, rows, collate_completions, **keys)


def kto_rows(encoded: Sequence[Encoded]) -> dict[str, list[Any]]:
    """Return columns of token ids for `collate_completions`, and empty text columns for TRL.

    KTO estimates its reference point on mismatched rows, which join a prompt to the previous
    completion (cut to fit).
    """
    completions = [example.completions[0] for example in encoded]
    longest = max(example.length for example in encoded)
    previous = completions[-1:] + completions[:-1]
    mismatched = []
    for example, ids in zip(encoded, previous, strict=True):
        room = longest - len(example.prompt)
        mismatched.append(ids[:room])
    empty = [""] * len(encoded)
    return {
        "prompt": empty,
        "completion": empty,
        "prompt_tokens": [example.prompt for example in encoded],
        "completion_tokens": completions,
        "mismatched_tokens": mismatched,
        "label": [example.scores[0] >= 0 for example in encoded],
    }


def _describe(recipe: KTORecipe) -> str:
    against = "the mean reward of their state"
    if recipe.baseline != "mean":
        against = f"a reward of {recipe.baseline:g}"
    return (
        "Kahneman-Tversky optimization (arXiv 2402.01306) on completions above and below "
        f"{against}, beta {recipe.beta}"
    )


KTO = StoredAlgorithm(KTORecipe, examples, make_trainer, _describe)
