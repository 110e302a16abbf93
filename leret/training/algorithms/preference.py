"""DPO and IPO on the run's preferences, through TRL's DPOTrainer; the reference model is the initial policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from leret.config.training import TrainingRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.training.algorithms.base import (
    Algorithm,
    TrainerInputs,
    build_with_reference,
    completion_logps,
    trainer_arguments,
)
from leret.training.data import Encoded, TrainingExample, check_predictors, plain

if TYPE_CHECKING:
    import torch


Weight = Annotated[float, Field(gt=0)]


_COLUMNS = ("prompt", "chosen", "rejected", "question_id", "predictor", "score_chosen", "score_rejected")


class PairRecipe(TrainingRecipe):
    """What the algorithms on pairs share."""

    learning_rates: ClassVar[tuple[float, float]] = (5e-4, 5e-7)

    beta: float = Field(0.05, gt=0, description="strength of the tie to the initial policy")
    reward_margin: float = Field(0.0, ge=0, description="nats that a pair must differ by for 1 of reward between them")

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights by loss; the algorithm's own has 1 unless the recipe says otherwise."""
        return {self.algorithm: 1.0, **getattr(self, "losses", {})}


class DPORecipe(PairRecipe):
    """Direct preference optimization."""

    algorithm: Literal["dpo"] = "dpo"
    losses: dict[Literal["dpo", "sft"], Weight] = Field({}, description="weights; sft: likelihood of the chosen")


class IPORecipe(PairRecipe):
    """Identity preference optimization: log-ratios of a pair are drawn to a difference of 1 / (2 beta)."""

    algorithm: Literal["ipo"] = "ipo"
    reduction: Literal["sequence", "token"] = Field("sequence", description="sum (the paper) or mean of log-probs")
    losses: dict[Literal["ipo", "dpo", "sft"], Weight] = Field({}, description="weights; sft: likelihood of the chosen")


def pair_loss(kind: Literal["dpo", "ipo"], margins: torch.Tensor, beta: float) -> torch.Tensor:
    """Losses (n_pairs,) of pairs by how far the chosen one is ahead of the rejected one.

    Args:
        kind: ``dpo``: the negative log-likelihood of the preference; ``ipo``: the squared distance from 1 / (2 beta).
        margins: (n_pairs,) differences of the two log-ratios to the reference model: of log-probabilities that are
            summed over a completion's tokens, or, for ipo of reduction ``token``, averaged; for picks, of one each.
        beta: strength of the tie to the reference, tau in IPO's paper.

    Source: ``dpo``: Rafailov et al. 2023, arXiv 2305.18290, eq. 7; ``ipo``: Azar et al. 2023, arXiv 2310.12036, eq. 17.
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * margins) if kind == "dpo" else (margins - 1 / (2 * beta)) ** 2


def collate_pairs(
    rows: list[dict[str, Any]], pad: int, *, sequence: bool, packed: bool = False, margin: float = 0.0
) -> dict[str, Any]:
    """A batch for TRL's DPOTrainer from ids that it did not make itself.

    IPO is defined on the sum of token log-probabilities. TRL divides each completion's log-ratio by its number of
    tokens, which it takes from the sum of the completion mask, first column included. Nothing else reads that column:
    position 0 has no prediction. With ``1 - n_tokens`` there the mask sums to 1, and TRL's loss is the one on sums,
    with its metrics unchanged; `leret.training.checks.check_loss` compares the two before every training.

    A reward margin is added to the reference's log-probability of the chosen, which every loss subtracts: of DPO this
    is the offset of arXiv 2402.10571. TRL's logged rewards and accuracies are less the margin then.

    Args:
        rows: of `preference_rows`.
        pad: id of the padding token.
        sequence: make TRL's IPO the one on sums; leave its average over tokens otherwise.
        packed: for a model that `share_prompts` has prepared.
        margin: nats for a difference of 1 between a pair's rewards; IPO's mean over tokens divides them by the tokens
            of the chosen completion.

    Returns:
        ``2 * len(rows)`` sequences, the chosen ones first.
    """
    import torch

    from leret.training.packing import collate

    sides = ("chosen_tokens", "rejected_tokens")
    batch = collate([(r["prompt_tokens"], r[side]) for side in sides for r in rows], pad, packed=packed)
    if sequence:
        mask = batch["completion_mask"]
        mask[:, 0] = 1 - mask.sum(dim=1)
    if "ref_chosen_logps" in rows[0]:
        batch["ref_chosen_logps"] = torch.tensor([r["ref_chosen_logps"] + margin * r["gain"] for r in rows])
        batch["ref_rejected_logps"] = torch.tensor([r["ref_rejected_logps"] for r in rows])
    return batch


def read_examples(recipe: PairRecipe, run: Run) -> list[TrainingExample]:
    """The pairs of ``R/preferences/train.parquet`` in its order, of some predictors, or of all.

    Raises:
        TrainingError: there is none, or none of one of the predictors.
    """
    import pyarrow
    import pyarrow.parquet

    path, predictors = run.preferences / "train.parquet", recipe.predictors
    if not path.is_file():
        raise TrainingError(f"{path} is missing; `leret sample` writes it, `leret pairs` rebuilds it")
    try:
        table = pyarrow.parquet.ParquetFile(path).read()  # read_table imports pandas, which takes a second
    except (OSError, pyarrow.ArrowException) as error:
        raise TrainingError(f"{path} cannot be read ({error}); `leret pairs` rebuilds it without sampling") from error
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise TrainingError(
            f"{path} has no column {', '.join(missing)} (it has {', '.join(table.column_names)}); "
            "`leret pairs` rebuilds it"
        )
    rows = table.select(list(_COLUMNS)).to_pylist()
    if not rows:
        raise TrainingError(
            f"{path} holds no pair: at no state did two different completions differ in reward. Sample more "
            "questions, more prompts or samples a state, or at a higher temperature"
        )
    check_predictors(predictors, {str(row["predictor"]) for row in rows})
    examples = []
    for row in rows:
        if predictors is not None and row["predictor"] not in predictors:
            continue
        prompt = plain(row["prompt"])
        completions = (str(row["chosen"][0]["content"]), str(row["rejected"][0]["content"]))
        scores = (float(row["score_chosen"]), float(row["score_rejected"]))
        examples.append(TrainingExample(str(row["question_id"]), prompt, completions, scores))
    return examples


def make_trainer(recipe: DPORecipe | IPORecipe, inputs: TrainerInputs) -> Any:
    """TRL's DPOTrainer over pairs of ids; it computes the reference's log-probabilities before it returns."""
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(
        **trainer_arguments(recipe, inputs),
        beta=recipe.beta,
        loss_type=[_TRL_NAMES[name] for name in recipe.loss_weights],
        loss_weights=list(recipe.loss_weights.values()),
        precompute_ref_log_probs=True,
    )
    packed = inputs.share_prompts()
    sequence = isinstance(recipe, IPORecipe) and recipe.reduction == "sequence"
    rows, pad = preference_rows(inputs.examples), inputs.tokenizer.pad_token_id
    collator = partial(collate_pairs, pad=pad, sequence=sequence, packed=packed, margin=recipe.reward_margin)
    return build_with_reference(DPOTrainer, recipe, inputs, arguments, rows, data_collator=collator)


_TRL_NAMES = {"dpo": "sigmoid", "ipo": "ipo", "sft": "sft"}


def preference_rows(examples: Sequence[Encoded]) -> dict[str, list[Any]]:
    """Columns of ids for `collate_pairs`, and the text columns that TRL insists on.

    TRL 1.16's DPOTrainer takes no ids: it encodes ``prompt``, ``chosen`` and ``rejected`` whatever else a row holds.
    They are empty here, so that this costs nothing; the collator reads the ids.
    """
    return {name: [""] * len(examples) for name in ("prompt", "chosen", "rejected")} | {
        "prompt_tokens": [example.prompt for example in examples],
        "chosen_tokens": [example.completions[0] for example in examples],
        "rejected_tokens": [example.completions[1] for example in examples],
        "gain": [example.scores[0] - example.scores[1] if example.scores else 0.0 for example in examples],
    }


def oracle_loss(recipe: DPORecipe | IPORecipe, model: Any, rows: Sequence[Mapping[str, Any]]) -> float:
    """The recipe's losses on sums of log-probabilities; IPO on means over tokens where the recipe says so."""
    import torch

    device = next(model.parameters()).device
    by_side = [
        [completion_logps(model, row["prompt_tokens"], row[f"{side}_tokens"]) for row in rows] for side in _SIDES
    ]
    chosen, rejected = (torch.stack([logps.sum() for logps in side]) for side in by_side)
    ref_chosen, ref_rejected = (
        torch.tensor([row[f"ref_{side}_logps"] for row in rows], device=device) for side in _SIDES
    )
    ref_chosen = ref_chosen + recipe.reward_margin * torch.tensor([row["gain"] for row in rows], device=device)
    n_chosen, n_rejected = (torch.tensor([len(logps) for logps in side], device=device) for side in by_side)
    ahead, behind = chosen - ref_chosen, rejected - ref_rejected
    margins = ahead - behind
    by_token = isinstance(recipe, IPORecipe) and recipe.reduction == "token"
    losses = {
        "dpo": lambda: pair_loss("dpo", margins, recipe.beta).mean(),
        "ipo": lambda: pair_loss(
            "ipo", ahead / n_chosen - behind / n_rejected if by_token else margins, recipe.beta
        ).mean(),
        "sft": lambda: -chosen.sum() / n_chosen.sum(),
    }
    return float(sum(weight * losses[name]() for name, weight in recipe.loss_weights.items()))


_SIDES = ("chosen", "rejected")


def _describe(recipe: DPORecipe | IPORecipe) -> str:
    if isinstance(recipe, DPORecipe):
        text = f"direct preference optimization (arXiv 2305.18290), beta {recipe.beta}"
    else:
        how = "summed over" if recipe.reduction == "sequence" else "averaged over"
        text = (
            "identity preference optimization (arXiv 2310.12036) on log-probabilities "
            f"{how} a completion's tokens, beta {recipe.beta}"
        )
    mixture = ", ".join(f"{weight:g} {name}" for name, weight in recipe.loss_weights.items())
    return f"{text}, with losses {mixture}" if recipe.losses else text


DPO = Algorithm(DPORecipe, read_examples, make_trainer, oracle_loss, _describe)
IPO = Algorithm(IPORecipe, read_examples, make_trainer, oracle_loss, _describe)
