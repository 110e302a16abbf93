"""DPO and IPO: preference optimization with TRL's DPOTrainer.

The reference model is the initial policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from leret.config.training import ExampleRecipe
from leret.training.data import Encoded, Samples, TrainingExample
from leret.training.stored.trainer import (
    StoredAlgorithm,
    TrainerInputs,
    stored_trainer,
)

if TYPE_CHECKING:
    import torch

Weight = Annotated[float, Field(gt=0)]


class PairRecipe(ExampleRecipe):
    """Keys for algorithms that train on pairs."""

    learning_rates: ClassVar[Mapping[float, float]] = {1.5e6: 5e-4, 135e6: 2e-5, 1e9: 5e-7}

    engine: Literal["trl"] = "trl"
    beta: float = Field(
        0.05, gt=0, description="strength of the regularization toward the initial policy"
    )
    reward_margin: float = Field(
        0.0, ge=0, description="margin in nats per unit of reward difference in a pair"
    )

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weight of each loss; the algorithm's loss has weight 1 by default."""
        return {self.algorithm: 1.0, **getattr(self, "losses", {})}


class DPORecipe(PairRecipe):
    """Direct preference optimization."""

    algorithm: Literal["dpo"] = "dpo"
    losses: dict[Literal["dpo", "sft"], Weight] = Field(
        {}, description="weights; sft: likelihood of chosen"
    )


class IPORecipe(PairRecipe):
    """Identity preference optimization: pulls the difference of a pair's log-ratios to 1 / (2 beta)."""

    algorithm: Literal["ipo"] = "ipo"
    reduction: Literal["sequence", "token"] = Field(
        "sequence", description="sum (the paper) or mean of log-probs"
    )
    losses: dict[Literal["ipo", "dpo", "sft"], Weight] = Field(
        {}, description="weights; sft: likelihood of chosen"
    )


def pair_loss(kind: Literal["dpo", "ipo"], margins: torch.Tensor, beta: float) -> torch.Tensor:
    """Return each pair's loss, (n_pairs,), from the margin of chosen over rejected.

    Args:
        kind: ``dpo``: the negative log-likelihood of the preference; ``ipo``: the squared distance
            from 1 / (2 beta).
        margins: (n_pairs,) chosen minus rejected log-ratio to the reference model. A completion's
            log-probability is a sum over tokens, or their mean for ipo with reduction ``token``.
        beta: strength of the regularization toward the reference; tau in the IPO paper.

    Source: ``dpo``: Rafailov et al. 2023, arXiv 2305.18290, eq. 7; ``ipo``: Azar et al. 2023, arXiv
        2310.12036, eq. 17.
    """
    from torch.nn.functional import logsigmoid

    if kind == "dpo":
        return -logsigmoid(beta * margins)
    return (margins - 1 / (2 * beta)) ** 2


def collate_pairs(
    rows: list[dict[str, Any]],
    pad: int,
    *,
    sequence: bool,
    packed: bool = False,
    margin: float = 0.0,
) -> dict[str, Any]:
    """Return a batch of ids for TRL's DPOTrainer: ``2 * len(rows)`` sequences, chosen ones first.

    With ``sequence``, IPO is computed on sums of token log-probabilities, as in the paper. TRL
    divides a completion's log-ratio by the sum of its completion mask. Nothing else reads the
    mask's first column, so this function sets the column to ``1 - n_tokens``: the mask then sums to
    1, TRL's loss uses sums, and its metrics stay the same.

    ``margin`` (nats per unit of reward difference in a pair) is added to the reference's
    log-probability of the chosen completion. For DPO it is the offset of arXiv 2402.10571. IPO with
    reduction ``token`` divides the margin by the chosen completion's number of tokens. TRL logs
    rewards and accuracies with the margin subtracted.
    """
    import torch

    from leret.policies.local.packing import collate

    chosen = [(row["prompt_tokens"], row["chosen_tokens"]) for row in rows]
    rejected = [(row["prompt_tokens"], row["rejected_tokens"]) for row in rows]
    batch = collate(chosen + rejected, pad, packed=packed)
    if sequence:
        mask = batch["completion_mask"]
        mask[:, 0] = 1 - mask.sum(dim=1)
    if "ref_chosen_logps" in rows[0]:
        chosen_logps = [row["ref_chosen_logps"] + margin * row["gain"] for row in rows]
        rejected_logps = [row["ref_rejected_logps"] for row in rows]
        batch["ref_chosen_logps"] = torch.tensor(chosen_logps)
        batch["ref_rejected_logps"] = torch.tensor(rejected_logps)
    return batch


def examples(recipe: PairRecipe, samples: Samples) -> list[TrainingExample]:
    """Return the pairs of chosen and rejected completions."""
    return list(samples.pairs())


def make_trainer(recipe: DPORecipe | IPORecipe, inputs: TrainerInputs) -> Any:
    """Return TRL's DPOTrainer.

    Its rows hold the pairs' token ids and the reference model's log-probabilities.
    """
    keys = {
        "beta": recipe.beta,
        "loss_type": [_TRL_NAMES[name] for name in recipe.loss_weights],
        "loss_weights": list(recipe.loss_weights.values()),
        "precompute_ref_log_probs": True,
    }
    sequence = isinstance(recipe, IPORecipe) and recipe.reduction == "sequence"
    collate = partial(collate_pairs, sequence=sequence, margin=recipe.reward_margin)
    rows = preference_rows(inputs.examples)
    return stored_trainer("DPO", recipe, inputs, rows, collate, **keys)


_TRL_NAMES = {"dpo": "sigmoid", "ipo": "ipo", "sft": "sft"}


def preference_rows(encoded: Sequence[Encoded]) -> dict[str, list[Any]]:
    """Return columns of token ids for `collate_pairs`, and empty text columns for TRL."""
    empty = [""] * len(encoded)
    return {
        "prompt": empty,
        "chosen": empty,
        "rejected": empty,
        "prompt_tokens": [example.prompt for example in encoded],
        "chosen_tokens": [example.completions[0] for example in encoded],
        "rejected_tokens": [example.completions[1] for example in encoded],
        "gain": [example.gain for example in encoded],
    }


def pair_terms(
    recipe: DPORecipe | IPORecipe,
    logps: Sequence[Sequence[torch.Tensor]],
    references: torch.Tensor,
    gains: Sequence[float],
) -> dict[str, torch.Tensor]:
    """Return the recipe's weighted loss, and the implicit rewards of the pairs under TRL's names.

    ``logps`` holds the token log-probabilities of the chosen completions, then of the rejected
    ones. ``references``, (2, n_pairs), holds their sums under the reference model, and ``gains``
    the difference of rewards in each pair.
    """
    import torch

    chosen, rejected = logps
    chosen_sums = torch.stack([row.sum() for row in chosen])
    rejected_sums = torch.stack([row.sum() for row in rejected])
    sums = torch.stack([chosen_sums, rejected_sums])
    lengths = torch.tensor([list(map(len, chosen)), list(map(len, rejected))], device=sums.device)
    rewards_ahead = torch.tensor([gains, [0.0] * len(gains)], device=sums.device)
    ratios = sums - references.to(sums.device) - recipe.reward_margin * rewards_ahead
    margins = ratios[0] - ratios[1]
    ipo_margins = margins
    if isinstance(recipe, IPORecipe) and recipe.reduction == "token":
        means = ratios / lengths
        ipo_margins = means[0] - means[1]
    losses = {
        "dpo": pair_loss("dpo", margins, recipe.beta).mean(),
        "ipo": pair_loss("ipo", ipo_margins, recipe.beta).mean(),
        "sft": -chosen_sums.sum() / lengths[0].sum(),
    }
    weighted = [weight * losses[name] for name, weight in recipe.loss_weights.items()]
    chosen_rewards, rejected_rewards = recipe.beta * ratios.detach()
    return {
        "loss": torch.stack(weighted).sum(),
        "rewards/chosen": chosen_rewards.mean(),
        "rewards/rejected": rejected_rewards.mean(),
        "rewards/accuracies": (chosen_rewards > rejected_rewards).float().mean(),
        "rewards/margins": (chosen_rewards - rejected_rewards).mean(),
    }


def _describe(recipe: DPORecipe | IPORecipe) -> str:
    if isinstance(recipe, DPORecipe):
        text = f"direct preference optimization (arXiv 2305.18290), beta {recipe.beta}"
    else:
        how = "summed over" if recipe.reduction == "sequence" else "averaged over"
        text = (
            "identity preference optimization (arXiv 2310.12036) on log-probabilities "
            f"{how} a completion's tokens, beta {recipe.beta}"
        )
    if not recipe.losses:
        return text
    mixture = ", ".join(f"{weight:g} {name}" for name, weight in recipe.loss_weights.items())
    return f"{text}, with losses {mixture}"


DPO = StoredAlgorithm(DPORecipe, examples, make_trainer, _describe)
IPO = StoredAlgorithm(IPORecipe, examples, make_trainer, _describe)
