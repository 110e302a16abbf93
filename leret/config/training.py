"""The recipe of `leret train`."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from leret.config.base import Settings


class LoraSettings(Settings):
    """A low-rank adapter instead of full weights."""

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: str | tuple[str, ...] = "all-linear"


class TrainingRecipe(Settings):
    """`leret train`. Knows no data set: it reads the run's preferences."""

    algorithm: Literal["sft", "dpo", "ipo"]
    name: str | None = Field(None, description="of the policy in R/policies; the algorithm's name when absent")
    init: str = Field("base", description="base, the name of a policy of the run, a model directory, or demo")
    targets: Literal["best", "random"] = Field("best", description="sft: the best sample of a state, or any (control)")
    only_spread: bool = Field(True, description="sft: only states whose samples differ in reward")
    max_targets: PositiveInt = Field(1, description="sft: completions a state at most")
    match_steps_of: str | None = Field(None, description="sft: train as many steps as this policy took in all")
    epochs: float = Field(1.0, gt=0)
    learning_rate: float = Field(1e-5, gt=0)
    schedule: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="share of the steps")
    warmup_steps: NonNegativeInt = Field(0, description="their number, instead of warmup_ratio")
    optim: Literal["adamw_torch_fused", "adamw_torch", "rmsprop", "adafactor", "sgd"] = "adamw_torch_fused"
    weight_decay: float = Field(0.0, ge=0)
    batch_size: PositiveInt = Field(16, description="examples a step and device")
    accumulate: PositiveInt = Field(1, description="batches a step")
    max_grad_norm: float = Field(1.0, gt=0)
    max_length: PositiveInt = Field(
        2048, description="prompt and completion tokens; longer examples are dropped, counted"
    )
    beta: float = Field(0.05, gt=0, description="dpo, ipo")
    reduction: Literal["sequence", "token"] = Field("sequence", description="ipo: sum (the paper) or mean of log-probs")
    sft_weight: float = Field(0.0, ge=0, description="dpo, ipo: weight of an added likelihood of the chosen")
    lora: LoraSettings | None = None
    seed: int = 0
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: PositiveInt | None = Field(1, description="CPU threads; 1 makes a resumed run bit-equal")
    save_steps: PositiveInt = 50
    log_steps: PositiveInt = 5
    report_to: tuple[Literal["wandb", "tensorboard"], ...] = ()

    @property
    def policy_name(self) -> str:
        """The directory under R/policies."""
        return self.name or self.algorithm

    @model_validator(mode="after")
    def _fits(self) -> TrainingRecipe:
        name = self.policy_name
        if name in {"base", ""} or "/" in name or name.startswith("."):
            raise ValueError(f"name: {name!r} cannot name a policy; use letters, digits, - and _")
        if self.algorithm == "sft" and (self.sft_weight or self.reduction != "sequence"):
            raise ValueError("sft_weight and reduction belong to dpo and ipo, not to sft")
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("warmup_ratio and warmup_steps exclude each other; remove one")
        if self.algorithm != "sft" and (self.match_steps_of or self.targets != "best"):
            raise ValueError("match_steps_of and targets belong to sft")
        return self
