"""IPO on the sum of token log-probabilities, which is what the loss is defined on, through TRL's own trainer.

TRL divides each completion's log-ratio by its number of tokens, and takes that number from the sum of the completion
mask, first column included. Nothing else reads that column: position 0 has no prediction, and all else uses the mask
from position 1 on. With ``1 - n_tokens`` there the mask sums to 1, and TRL's loss is the one on sums, with its metrics
unchanged. `leret.training.preflight` compares the trainer's loss with `ipo_loss` before every training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leret.training.thrift import SHARED

if TYPE_CHECKING:
    import torch


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
            (reduction ``sequence``), or averaged (``token``).
        policy_rejected: (n_pairs,) of the rejected ones.
        reference_chosen: (n_pairs,) of the chosen ones under the reference model.
        reference_rejected: (n_pairs,) of the rejected ones under the reference model.
        beta: strength of the regularisation, tau in the paper.

    Returns:
        (n_pairs,) losses, 0 or more.

    Source:
        Azar et al. 2023, A General Theoretical Paradigm to Understand Learning from Human Preferences
        (arXiv 2310.12036), eq. 17.
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

    Source:
        Rafailov et al. 2023, Direct Preference Optimization (arXiv 2305.18290), eq. 7.
    """
    from torch.nn.functional import logsigmoid

    h = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)
    return -logsigmoid(beta * h)


class PairCollator:
    """Batches pairs for TRL's DPOTrainer from ids that it did not make itself.

    The rows' ``prompt``, ``chosen`` and ``rejected`` (text, which TRL insists on encoding) are not looked at.

    Args:
        pad: id of the padding token.
        sequence: make TRL's IPO the one on sums; leave its average over tokens otherwise.
        shared: say how long the prompts are, for a model that `leret.training.thrift.make_thrifty` has prepared.
    """

    def __init__(self, pad: int, *, sequence: bool, shared: bool = False) -> None:
        from trl.trainer.dpo_trainer import DataCollatorForPreference

        self.sequence = sequence
        self.shared = shared
        self._pad = DataCollatorForPreference(pad_token_id=pad)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of ``2 * len(rows)`` sequences, the chosen ones first."""
        batch: dict[str, Any] = self._pad([_renamed(row) for row in rows])
        if self.sequence:
            mask = batch["completion_mask"]
            mask[:, 0] = 1 - mask.sum(dim=1)
        if self.shared:
            # TRL hands the model every column that it does not know.
            batch[SHARED] = batch["input_ids"].new_tensor([len(row["prompt_tokens"]) for row in rows])
        return batch


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    names = {"prompt_ids": "prompt_tokens", "chosen_ids": "chosen_tokens", "rejected_ids": "rejected_tokens"}
    reference = {name: row[name] for name in ("ref_chosen_logps", "ref_rejected_logps") if name in row}
    return {name: row[own] for name, own in names.items()} | reference
