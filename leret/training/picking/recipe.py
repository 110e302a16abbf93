"""Keys of the trainings of pickers: `pqn`, by values of trajectories, and `pick`, by groups of picks at a state."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from leret.config.training import RoundRecipe


class PickingRecipe(RoundRecipe):
    """What trainings of pickers share; the initial picker is the run's, or one that was trained before."""

    learning_rate: float = Field(1e-3, gt=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    questions_per_round: PositiveInt = Field(64, description="tasks; each pick of a program is a state of its own")
    per_device_train_batch_size: PositiveInt = Field(256, description="states that are in memory at once")

    @model_validator(mode="after")
    def _is_of_a_picker(self) -> PickingRecipe:
        if self.lora is not None or self.dtype != "float32":
            raise ValueError("lora and dtype are of policies that write; remove them")
        return self


class PickRecipe(PickingRecipe):
    """Several picks at each state, told apart by their rewards."""

    algorithm: Literal["pick"] = "pick"
    loss: Literal["grpo", "dpo", "ipo", "sft"] = Field(
        "grpo", description="group-relative advantages; the best of a group over the others; the best of a group alone"
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "none", description="of grpo: what advantages are divided by: the deviation of a group, of the round, nothing"
    )
    epsilon: float = Field(0.2, gt=0, description="of grpo: range of the ratio to the picker that sampled")
    entropy_coef: float = Field(0.0, ge=0, description="of grpo")
    beta: float = Field(0.1, gt=0, description="of dpo and ipo: strength of the tie to the initial picker")

    @model_validator(mode="after")
    def _has_a_reference(self) -> PickRecipe:
        if self._given(["beta"]) and self.loss in {"grpo", "sft"}:
            raise ValueError(f"beta is of loss dpo and ipo, and loss is {self.loss}; remove it, or set another loss")
        return self


class PQNRecipe(PickingRecipe):
    """Q-RAG's training; defaults are those of its table for E5 on HotpotQA.

    Its 12 environments and 8 accumulated gradients are ``questions_per_round: 96`` here.
    """

    algorithm: Literal["pqn"] = "pqn"
    learning_rate: float = Field(1.5e-5, gt=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "cosine"
    min_lr_rate: float = Field(0.1, ge=0, le=1, description="of cosine: what the rate ends at, a share of it")
    weight_decay: float = Field(5e-4, ge=0)
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    adam_epsilon: float = Field(1e-6, gt=0)
    max_grad_norm: float = Field(2.0, gt=0)
    questions_per_round: PositiveInt = Field(96, description="tasks, one trajectory each")
    num_generations: Literal[1] = 1
    temperature: float | None = Field(0.05, gt=0, description="alpha, of draws and values; falls as the rate does")
    top_k: PositiveInt | None = Field(5, description="candidates that are drawn from, and that a value is made of")
    learning_starts: int = Field(10, ge=0, description="rounds of picks at random, at first")
    gamma: float = Field(0.99, gt=0, le=1, description="discount a pick")
    lam: float = Field(0.5, ge=0, le=1, description="lambda of the returns: 0 trusts the values, 1 the rewards")
    tau: float = Field(0.02, gt=0, le=1, description="share that the target network takes of each step; 1: no target")
    soft_value: bool = Field(True, description="a state is worth its soft maximum; if not, its largest value")
    twin: bool = Field(True, description="two halves of the network estimate the value each")

    @model_validator(mode="after")
    def _falls_to_a_share(self) -> PQNRecipe:
        if self.min_lr_rate and self.lr_scheduler_type != "cosine":
            raise ValueError("min_lr_rate is of lr_scheduler_type cosine; set min_lr_rate: 0")
        return self
