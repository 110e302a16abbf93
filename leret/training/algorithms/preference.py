"""DPO and IPO on the run's preferences, through TRL's DPOTrainer; the reference model is the initial policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from leret.config.training import TrainingRecipe
from leret.core.runs import Run
from leret.training.algorithms.base import Algorithm, TrainerInputs, completion_logps, new_adapter, trainer_arguments
from leret.training.data import Encoded, TrainingExample, read_preferences

if TYPE_CHECKING:
    import torch


class DPORecipe(TrainingRecipe):
    """Direct preference optimization."""

    algorithm: Literal["dpo"] = "dpo"
    beta: float = Field(0.05, gt=0, description="strength of the tie to the initial policy")
    sft_weight: float = Field(0.0, ge=0, description="weight of an added likelihood of the chosen")


class IPORecipe(TrainingRecipe):
    """Identity preference optimization."""

    algorithm: Literal["ipo"] = "ipo"
    beta: float = Field(0.05, gt=0, description="log-ratios of a pair are drawn to a difference of 1 / (2 beta)")
    reduction: Literal["sequence", "token"] = Field("sequence", description="sum (the paper) or mean of log-probs")
    sft_weight: float = Field(0.0, ge=0, description="weight of an added likelihood of the chosen")


def ipo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """IPO: the squared distance of the log-ratios' difference from 1 / (2 beta).

    Args:
        policy_chosen: (n_pairs,) log-probability of each chosen completion under the policy: summed over its tokens
            (reduction ``sequence``), or averaged (``token``); the others likewise, rejected, under the reference model.
        policy_rejected: (n_pairs,).
        reference_chosen: (n_pairs,).
        reference_rejected: (n_pairs,).
        beta: strength of the regularisation, tau in the paper.

    Returns:
        (n_pairs,) losses, 0 or more.

    Source: Azar et al. 2023, arXiv 2310.12036, eq. 17.
    """
    h = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)
    return (h - 1 / (2 * beta)) ** 2


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """DPO: the negative log-likelihood of the preference; arguments as of `ipo_loss`, on sums.

    Source: Rafailov et al. 2023, arXiv 2305.18290, eq. 7.
    """
    from torch.nn.functional import logsigmoid

    h = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)
    return -logsigmoid(beta * h)


class PairCollator:
    """Batches pairs for TRL's DPOTrainer from ids that it did not make itself.

    IPO is defined on the sum of token log-probabilities. TRL divides each completion's log-ratio by its number of
    tokens, which it takes from the sum of the completion mask, first column included. Nothing else reads that column:
    position 0 has no prediction. With ``1 - n_tokens`` there the mask sums to 1, and TRL's loss is the one on sums,
    with its metrics unchanged; `leret.training.checks.check_loss` compares the two before every training.

    Args:
        pad: id of the padding token.
        sequence: make TRL's IPO the one on sums; leave its average over tokens otherwise.
        packed: for a model that `share_prompts` has prepared.
    """

    def __init__(self, pad: int, *, sequence: bool, packed: bool = False) -> None:
        self.pad, self.sequence, self.packed = pad, sequence, packed

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of ``2 * len(rows)`` sequences, the chosen ones first."""
        import torch

        from leret.training.packing import collate

        sides = ("chosen_tokens", "rejected_tokens")
        batch = collate([(r["prompt_tokens"], r[side]) for side in sides for r in rows], self.pad, packed=self.packed)
        if self.sequence:
            mask = batch["completion_mask"]
            mask[:, 0] = 1 - mask.sum(dim=1)
        reference = [name for name in ("ref_chosen_logps", "ref_rejected_logps") if name in rows[0]]
        return batch | {name: torch.tensor([row[name] for row in rows]) for name in reference}


def read_examples(recipe: TrainingRecipe, run: Run) -> list[TrainingExample]:
    """The run's preferences."""
    return read_preferences(run.preferences)


def make_trainer(recipe: DPORecipe | IPORecipe, inputs: TrainerInputs) -> Any:
    """TRL's DPOTrainer over pairs of ids; it computes the reference's log-probabilities before it returns."""
    from trl import DPOConfig, DPOTrainer

    from leret.training.packing import share_prompts

    losses = {"ipo" if recipe.algorithm == "ipo" else "sigmoid": 1.0}
    if recipe.sft_weight:
        losses["sft"] = recipe.sft_weight
    arguments = DPOConfig(
        **trainer_arguments(recipe, inputs),
        beta=recipe.beta,
        loss_type=list(losses),
        loss_weights=list(losses.values()),
        precompute_ref_log_probs=True,
    )
    packed = inputs.device == "cpu" and share_prompts(inputs.model)
    sequence = isinstance(recipe, IPORecipe) and recipe.reduction == "sequence"
    return DPOTrainer(
        model=inputs.model,
        args=arguments,
        data_collator=PairCollator(inputs.tokenizer.pad_token_id, sequence=sequence, packed=packed),
        train_dataset=_dataset(inputs.examples, inputs.directory, arguments),
        processing_class=inputs.tokenizer,
        peft_config=new_adapter(recipe.lora, inputs.model),
    )


def preference_rows(examples: Sequence[Encoded]) -> dict[str, list[Any]]:
    """Columns of ids for `PairCollator`, and the text columns that TRL insists on.

    TRL 1.16's DPOTrainer takes no ids: it encodes ``prompt``, ``chosen`` and ``rejected`` whatever else a row holds.
    They are empty here, so that this costs nothing; the collator reads the ids.
    """
    return {name: [""] * len(examples) for name in ("prompt", "chosen", "rejected")} | {
        "prompt_tokens": [example.prompt for example in examples],
        "chosen_tokens": [example.completions[0] for example in examples],
        "rejected_tokens": [example.completions[1] for example in examples],
    }


def _dataset(examples: Sequence[Encoded], directory: Path, arguments: Any) -> Any:
    """The rows; on disk where several processes train: TRL shares the reference's values in a file beside them."""
    from datasets import Dataset, load_from_disk

    if arguments.world_size == 1:
        return Dataset.from_dict(preference_rows(examples))
    path = directory / "pairs"
    with arguments.main_process_first():
        if arguments.process_index == 0:
            Dataset.from_dict(preference_rows(examples)).save_to_disk(path)
        return load_from_disk(str(path))


def oracle_loss(recipe: DPORecipe | IPORecipe, model: Any, rows: Sequence[Mapping[str, Any]]) -> float:
    """The recipe's loss on sums, or on means over tokens where the recipe says so."""
    import torch

    by_side = [
        [completion_logps(model, row["prompt_tokens"], row[f"{side}_tokens"]) for row in rows] for side in _SIDES
    ]
    chosen, rejected = (torch.stack([logps.sum() for logps in side]) for side in by_side)
    ref_chosen, ref_rejected = (
        torch.tensor([row[f"ref_{side}_logps"] for row in rows], device=chosen.device) for side in _SIDES
    )
    n_chosen, n_rejected = (torch.tensor([len(logps) for logps in side], device=chosen.device) for side in by_side)
    if isinstance(recipe, DPORecipe):
        losses = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, recipe.beta)
    elif recipe.reduction == "sequence":
        losses = ipo_loss(chosen, rejected, ref_chosen, ref_rejected, recipe.beta)
    else:
        means = (chosen / n_chosen, rejected / n_rejected, ref_chosen / n_chosen, ref_rejected / n_rejected)
        losses = ipo_loss(*means, recipe.beta)
    return float(losses.mean() - recipe.sft_weight * chosen.sum() / n_chosen.sum())


_SIDES = ("chosen", "rejected")


def describe(recipe: DPORecipe | IPORecipe) -> str:
    """For the model card."""
    if isinstance(recipe, DPORecipe):
        return f"direct preference optimization (arXiv 2305.18290), beta {recipe.beta}"
    how = "summed over" if recipe.reduction == "sequence" else "averaged over"
    return (
        "identity preference optimization (arXiv 2310.12036) on log-probabilities "
        f"{how} a completion's tokens, beta {recipe.beta}"
    )


DPO = Algorithm(DPORecipe, read_examples, make_trainer, oracle_loss, describe)
IPO = Algorithm(IPORecipe, read_examples, make_trainer, oracle_loss, describe)
