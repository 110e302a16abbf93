"""What every recipe of `leret train` has; each algorithm adds its own keys in `leret.training.algorithms`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from leret.config.base import Free, KindSettings, Settings
from leret.config.sampling import RewardKey


class LoraSettings(Settings):
    """A low-rank adapter instead of full weights."""

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    quantization: Literal["nf4"] | None = Field(None, description="of the frozen base (QLoRA); CUDA alone")


class TrainingRecipe(KindSettings):
    """`leret train`. Knows no data set: it reads the run's samples. Keys as in TRL and transformers."""

    tag = "algorithm"

    learning_rates: ClassVar[tuple[float, float]] = (1e-3, 1e-5)
    """Default rates for 1.5 million and for a billion parameters, full weights."""

    algorithm: str
    name: str | None = Field(None, description="of the policy in R/policies; the algorithm's name when absent")
    init_from: str = Field("base", description="base, the name of a policy of the run, a directory, demo or agent")
    predictors: tuple[str, ...] | None = Field(None, description="train on samples of these predictors alone")
    match_steps_of: str | None = Field(None, description="a control: train as many steps as this policy took in all")
    max_steps: PositiveInt | None = Field(None, description="optimizer steps, instead of num_train_epochs")
    num_train_epochs: float = Field(1.0, gt=0)
    learning_rate: float | None = Field(None, gt=0, description="chosen by the size of the model when absent")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="share of the steps")
    warmup_steps: NonNegativeInt = Field(0, description="their number, instead of warmup_ratio")
    optim: Literal["adamw_torch_fused", "adamw_torch", "rmsprop", "adafactor", "sgd"] = "adamw_torch_fused"
    weight_decay: float = Field(0.0, ge=0)
    per_device_train_batch_size: PositiveInt = Field(16, description="examples a batch and device")
    gradient_accumulation_steps: PositiveInt = Field(1, description="batches a step")
    max_grad_norm: float = Field(1.0, gt=0)
    max_length: PositiveInt = Field(2048, description="prompt and completion tokens; longer examples are dropped")
    lora: LoraSettings | None = None
    seed: int = 0
    device: Annotated[str, Free()] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: PositiveInt | None = Field(1, description="CPU threads; 1 makes a resumed run bit-equal")
    save_steps: Annotated[PositiveInt, Free()] = 50
    logging_steps: Annotated[PositiveInt, Free()] = 5
    report_to: Annotated[tuple[Literal["wandb", "tensorboard", "trackio"], ...], Free()] = ()
    project: Annotated[str, Free()] = Field("leret", description="of wandb and trackio")
    run_name: Annotated[str | None, Free()] = Field(None, description="there; the policy's name when absent")
    on_alarm: Annotated[Literal["warn", "stop"], Free()] = Field("warn", description="stop leaves a checkpoint")
    eval_steps: PositiveInt | None = Field(None, description="validate every so many steps, and keep the best")
    eval_tasks: PositiveInt = Field(64, description="that the validation runs the program on, at most")
    eval_split: Literal["dev", "train"] = Field("dev", description="of the run's data; train: left out of training")
    metric_for_best_model: str = Field("recall", description="a measure; of all that was retrieved, or the answer")

    def learning_rate_for(self, n_parameters: int) -> float:
        """Return the default rate for a model: a power law through `learning_rates`.

        An adapter takes ten times the rate of a billion parameters at least.

        Args:
            n_parameters: of the whole model.
        """
        small, large = self.learning_rates
        size = min(max(n_parameters / 1.5e6, 1.0), 1e9 / 1.5e6)
        rate = small * size ** (math.log(large / small) / math.log(1e9 / 1.5e6))
        return float(f"{max(rate, 10 * large) if self.lora else rate:.1e}")

    @property
    def policy_name(self) -> str:
        """The directory under R/policies."""
        return self.name or self.algorithm

    @property
    def is_control(self) -> bool:
        """Whether the policy is only there to be compared with: no later round goes on from it."""
        return self.match_steps_of is not None

    @field_validator("name")
    @classmethod
    def _names_a_directory(cls, name: str | None) -> str | None:
        if name is not None and (name in {"base", ""} or "/" in name or name.startswith(".")):
            raise ValueError(f"{name!r} cannot name a policy; use letters, digits, - and _")
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingRecipe:
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("warmup_ratio and warmup_steps exclude each other; remove one")
        if self.max_steps and self.match_steps_of:
            raise ValueError("max_steps and match_steps_of exclude each other; remove one")
        if self.lora and self.lora.quantization and self.dtype != "bfloat16":
            raise ValueError("lora.quantization: nf4 computes in bfloat16; set dtype: bfloat16 too")
        return self


class RoundRecipe(TrainingRecipe):
    """Rounds: sample the run's tasks with the policy as it is, score, update. Keys as in TRL where it has them."""

    save_steps: Annotated[PositiveInt, Free()] = Field(50, description="rounds between checkpoints")
    logging_steps: PositiveInt = Field(5, description="rounds that an entry of the log is the mean of")

    states: Literal["live", "stored"] = Field("live", description="of the policy as it is, or of the run's samples")
    limit: PositiveInt | None = Field(None, description="tasks at most; None: as many as the run's sampling takes")
    questions_per_round: PositiveInt = Field(4, description="tasks; each step of a program is a state of its own")
    num_generations: PositiveInt = Field(8, description="samples a state")
    temperature: float | None = Field(None, gt=0, description="of sampling; None: the run's, so with the next two")
    top_p: float | None = Field(None, gt=0, le=1)

    max_completion_length: PositiveInt | None = Field(None, description="None: the run's")

    reward: RewardKey | None = Field(None, description="None: the one that the run was sampled with")
    credit: Literal["step", "final", "both"] | None = Field(None, description="None: the run's")
    unparsed_reward: float | None = Field(
        None, description="of a completion that does not parse; None: the reward's, or 0, or less in a group with less"
    )

    num_iterations: PositiveInt = Field(1, description="passes over the samples of a round")
    num_mini_batches: PositiveInt = Field(1, description="optimizer steps a pass")

    @property
    def by_trl(self) -> bool:
        """Whether TRL's trainer does it, instead of our loop."""
        return False

    def n_rounds(self, n_tasks: int) -> int:
        """Rounds of the whole training."""
        if self.max_steps is not None:
            return -(-self.max_steps // (self.num_iterations * self.num_mini_batches))
        return max(1, round(self.num_train_epochs * n_tasks / self.questions_per_round))

    def n_steps(self, n_tasks: int) -> int:
        """Optimizer steps of the whole training."""
        return self.n_rounds(n_tasks) * self.num_iterations * self.num_mini_batches

    @model_validator(mode="after")
    def _is_not_of_rounds(self) -> RoundRecipe:
        without = ("match_steps_of", "max_length", *(() if self.by_trl else ("gradient_accumulation_steps",)))
        if unknown := self._given(without):
            raise ValueError(
                f"algorithms on stored examples have {' and '.join(unknown)}; remove that (num_mini_batches sets what "
                "an optimizer step takes, max_steps their number, max_completion_length what is written)"
            )
        return self

    def _given(self, names: Sequence[str]) -> list[str]:
        """Those keys that are not at their defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
