"""`pqn`: train a picker's values on trajectories, as in Q-RAG and PQN (arXiv 2407.04811)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt, model_validator

from leret.config.training import PickingRecipe
from leret.training.model import find_picker
from leret.training.picks.pick import picker
from leret.training.rounds.algorithm import RoundAlgorithm

if TYPE_CHECKING:
    from torch import Tensor

    from leret.policies.pickers.picker import Picker
    from leret.training.picks.picking import PickBatch

_UNIFORM = 1e9
"""Temperature at which all candidates are about equally likely."""


class PQNRecipe(PickingRecipe):
    """Parallel Q-learning with Q-RAG's settings for E5 on HotpotQA (12 environments x 8 steps = 96 tasks a round)."""

    sums_steps = True

    algorithm: Literal["pqn"] = "pqn"
    learning_rate: float = Field(1.5e-5, gt=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "cosine"
    min_lr_rate: float = Field(
        0.1, ge=0, le=1, description="for cosine: final fraction of the learning rate"
    )
    weight_decay: float = Field(5e-4, ge=0)
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    adam_epsilon: float = Field(1e-6, gt=0)
    max_grad_norm: float = Field(2.0, gt=0)
    questions_per_round: PositiveInt = Field(
        96, description="tasks per round, with one trajectory each"
    )
    num_generations: Literal[1] = 1
    groups: Literal["state"] = "state"
    temperature: float | None = Field(
        0.05, gt=0, description="alpha; decays with the learning rate"
    )
    top_k: PositiveInt | None = Field(
        5, description="number of best candidates for sampling and for a state's value"
    )
    learning_starts: int = Field(10, ge=0, description="number of initial rounds with random picks")
    gamma: float = Field(0.99, gt=0, le=1, description="discount per pick")
    lam: float = Field(
        0.5, ge=0, le=1, description="lambda of the returns: 0 trusts the values, 1 the rewards"
    )
    tau: float = Field(
        0.02,
        gt=0,
        le=1,
        description="interpolation factor of the target network per step; 1: no target network",
    )
    soft_value: bool = Field(
        True, description="true: a state's value is the soft maximum; false: the maximum"
    )
    twin: bool = Field(
        True, description="estimate values with two heads, one per half of the network"
    )

    @model_validator(mode="after")
    def _falls_to_a_share(self) -> PQNRecipe:
        if self.min_lr_rate and self.lr_scheduler_type != "cosine":
            raise ValueError(
                "min_lr_rate applies only to lr_scheduler_type: cosine; set min_lr_rate: 0"
            )
        return self


class ValueMethod:
    """Losses on values of picks (`leret.training.picks.picking.Method`).

    The reference is the target network.
    """

    def __init__(self, recipe: PQNRecipe, temperature: float) -> None:
        self.recipe = recipe
        self.temperature = temperature
        self.reference: Picker | None = None

    def begin(self, picker: Picker) -> None:
        """Copy the picker as the target network, unless tau is 1."""
        self.reference = picker.clone() if self.recipe.tau < 1 else None

    def sampling(self, number: int, share: float) -> tuple[float, int | None]:
        random = number < self.recipe.learning_starts
        return (_UNIFORM, None) if random else (self.temperature * share, self.recipe.top_k)

    def prepare(
        self, picker: Picker, batch: PickBatch, share: float
    ) -> tuple[PickBatch, dict[str, float]]:
        import torch

        from leret.training.picks.picking import as_table, values_of
        from leret.training.rounds.advantages import lambda_returns

        recipe = self.recipe
        with torch.no_grad():
            q = values_of(self.reference or picker, batch.choices, self.recipe.twin)
        values = soft_value(q, self.temperature * share * recipe.soft_value, recipe.top_k).mean(1)
        rewards, mask = as_table(batch.step_rewards, batch.rollouts)
        returns = lambda_returns(
            rewards, as_table(values, batch.rollouts)[0], mask.float(), recipe.gamma, recipe.lam
        )
        last = as_table(batch.rewards, batch.rollouts)[0].gather(1, mask.sum(1, keepdim=True) - 1)
        figures = {
            "reward": float(last.mean()),
            "value": float(values.mean()),
            "alpha": self.temperature * share,
        }
        return replace(batch, targets=returns[mask]), figures

    def losses(self, picker: Picker, batch: PickBatch) -> dict[str, Tensor]:
        """Return each state's squared error as ``loss``, averaged over heads.

        Only picked candidates are encoded.
        """
        import torch

        rows = picker.q(batch.choices, self.recipe.twin, batch.actions.tolist())
        q = torch.stack(rows).flatten(1).cpu()
        errors = q - batch.targets[:, None]
        return {"loss": (errors**2).mean(1)}

    def after_step(self, picker: Picker) -> None:
        import torch

        if self.reference is not None:
            with torch.no_grad():
                for target, weight in zip(
                    self.reference.model.parameters(), picker.model.parameters(), strict=True
                ):
                    target.lerp_(weight, self.recipe.tau)
            self.reference.renew(picker.digest)


def soft_value(q: Tensor, temperature: float, k: int | None = None) -> Tensor:
    """Return each state's value: ``temperature * log(sum(exp(q / temperature)))`` over its k best.

    ``q`` is (..., n_candidates), and the result is (...). Temperature 0 gives the maximum.
    Source: Q-RAG, arXiv 2511.07328, section 3 (Haarnoja et al. 2017, arXiv 1702.08165, eq. 3).
    """
    if temperature == 0:
        return q.amax(-1)
    best = q if k is None else q.topk(min(k, q.shape[-1]), -1).values
    return temperature * (best / temperature).logsumexp(-1)


def _describe(recipe: PQNRecipe) -> str:
    return f"parallel Q-learning of a picker (Q-RAG, arXiv 2511.07328), lambda {recipe.lam}, alpha {recipe.temperature}"


PQN = RoundAlgorithm(PQNRecipe, ValueMethod, picker, _describe, find_picker)
