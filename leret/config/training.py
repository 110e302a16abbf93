"""Keys of `leret train` in groups; a recipe of `leret.training.algorithms` combines those that its algorithm has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from leret.config.base import Free, KindSettings, Settings
from leret.config.sampling import RewardKey


class LoraSettings(Settings):
    """A low-rank adapter instead of full weights."""

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    quantization: Literal["nf4"] | None = Field(None, description="of the frozen base (QLoRA); CUDA only")


class OptimizerKeys(Settings):
    """Optimizer and batch size, as in TRL and transformers."""

    learning_rate: float | None = Field(None, gt=0, description="chosen by the size of the model when absent")
    optim: Literal["adamw_torch_fused", "adamw_torch", "rmsprop", "adafactor", "sgd"] = "adamw_torch_fused"
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    per_device_train_batch_size: PositiveInt = Field(16, description="examples a batch and device")


class DeviceKeys(Settings):
    """Seed, device and threads of a training."""

    seed: int = 0
    device: Annotated[str, Free()] = "auto"
    threads: PositiveInt | None = Field(1, description="CPU threads; 1 makes a resumed training bit-equal")


class WriterKeys(Settings):
    """Weights of a policy that writes."""

    # Default rates for 1.5 million and for a billion parameters, full weights.
    learning_rates: ClassVar[tuple[float, float]] = (1e-3, 1e-5)

    lora: LoraSettings | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def learning_rate_for(self, n_parameters: int) -> float:
        """Return the default rate for a model: a power law through `learning_rates`.

        An adapter gets at least ten times the rate of a model with a billion parameters.
        """
        small, large = self.learning_rates
        size = min(max(n_parameters / 1.5e6, 1.0), 1e9 / 1.5e6)
        rate = small * size ** (math.log(large / small) / math.log(1e9 / 1.5e6))
        return float(f"{max(rate, 10 * large) if self.lora else rate:.1e}")

    @model_validator(mode="after")
    def _quantizes_in_bfloat16(self) -> WriterKeys:
        if self.lora and self.lora.quantization and self.dtype != "bfloat16":
            raise ValueError("lora.quantization: nf4 computes in bfloat16; set dtype: bfloat16 too")
        return self


class TrainingRecipe(KindSettings, OptimizerKeys, DeviceKeys):
    """`leret train`: keys of every algorithm. Data, program and retriever are those of the run."""

    tag = "algorithm"

    algorithm: str
    name: str | None = Field(None, description="of the policy in R/policies; the algorithm's name when absent")
    init_from: str = Field("base", description="base, the name of a policy of the run, a directory, demo or agent")
    predictors: tuple[str, ...] | None = Field(None, description="train only on samples of these predictors")

    # Number of steps, and the learning rate over them.
    max_steps: PositiveInt | None = Field(None, description="optimizer steps, instead of num_train_epochs")
    num_train_epochs: float = Field(1.0, gt=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="share of the steps")
    warmup_steps: NonNegativeInt = Field(0, description="number of steps, instead of warmup_ratio")

    # Checkpoints, logs, trackers and alarms.
    save_steps: Annotated[PositiveInt, Free()] = 50
    logging_steps: Annotated[PositiveInt, Free()] = 5
    report_to: Annotated[tuple[Literal["wandb", "tensorboard", "trackio"], ...], Free()] = ()
    project: Annotated[str, Free()] = Field("leret", description="of wandb and trackio")
    run_name: Annotated[str | None, Free()] = Field(None, description="of trackers; the policy's name when absent")
    on_alarm: Annotated[Literal["warn", "stop"], Free()] = Field("warn", description="stop leaves a checkpoint")

    # Validation during the training; the best step is published.
    eval_steps: PositiveInt | None = Field(None, description="steps between validations; none: no validation")
    eval_tasks: PositiveInt = Field(64, description="tasks to validate on, at most")
    eval_split: Literal["dev", "train"] = Field("dev", description="of the run's data; train: left out of training")
    metric_for_best_model: str = Field("recall", description="a measure of all that was retrieved, or of the answer")

    @property
    def policy_name(self) -> str:
        return self.name or self.algorithm

    @property
    def is_control(self) -> bool:
        """True if the policy only serves comparisons; later rounds never start from it."""
        return False

    @property
    def samples_in_process(self) -> bool:
        """True if one process samples and trains, so that no launcher can start several."""
        return False

    def n_steps(self, n_inputs: int) -> int:
        """Return the optimizer steps of the whole training on so many examples or tasks, on one device."""
        raise NotImplementedError

    @field_validator("name")
    @classmethod
    def _names_a_directory(cls, name: str | None) -> str | None:
        if name is not None and (name in {"base", ""} or "/" in name or name.startswith(".")):
            raise ValueError(f"{name!r} cannot name a policy; use letters, digits, - and _")
        return name

    @model_validator(mode="after")
    def _has_one_warmup(self) -> Self:
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("warmup_ratio and warmup_steps exclude each other; remove one")
        return self


class ExampleRecipe(TrainingRecipe, WriterKeys):
    """Keys of algorithms that learn from stored samples."""

    match_steps_of: str | None = Field(None, description="a control: take as many steps as this policy took in all")
    gradient_accumulation_steps: PositiveInt = Field(1, description="batches a step")
    max_length: PositiveInt = Field(2048, description="prompt and completion tokens; longer examples are dropped")

    @property
    def is_control(self) -> bool:
        return self.match_steps_of is not None

    def n_steps(self, n_inputs: int) -> int:
        batches = -(-n_inputs // (self.per_device_train_batch_size * self.gradient_accumulation_steps))
        return self.max_steps or max(1, round(batches * self.num_train_epochs))

    @model_validator(mode="after")
    def _counts_steps_once(self) -> ExampleRecipe:
        if self.max_steps and self.match_steps_of:
            raise ValueError("max_steps and match_steps_of exclude each other; remove one")
        return self


class RoundRecipe(TrainingRecipe):
    """Keys of algorithms that sample the run's tasks in rounds: sample some with the current policy, score, update.

    Names are as in TRL where TRL has them.
    """

    states: Literal["live", "stored"] = Field("live", description="of the current policy, or of the run's samples")
    limit: PositiveInt | None = Field(None, description="tasks at most; None: as many as the run's sampling takes")
    questions_per_round: PositiveInt = Field(4, description="tasks; each step of a program is a state")
    num_generations: PositiveInt = Field(8, description="samples a state")
    temperature: float | None = Field(None, gt=0, description="of sampling; None: the run's, like the next two")
    top_p: float | None = Field(None, gt=0, le=1)
    max_completion_length: PositiveInt | None = Field(None, description="tokens; None: the run's")
    reward: RewardKey | None = Field(None, description="None: the run's")
    credit: Literal["step", "final", "both"] | None = Field(None, description="None: the run's")
    unparsed_reward: float | None = Field(
        None, description="of a completion that does not parse; None: the reward's, or 0, or its group's lowest if less"
    )
    num_iterations: PositiveInt = Field(1, description="passes over the samples of a round")
    num_mini_batches: PositiveInt = Field(1, description="optimizer steps a pass")
    save_steps: Annotated[PositiveInt, Free()] = Field(50, description="rounds between checkpoints")
    logging_steps: PositiveInt = Field(5, description="rounds averaged in a log entry")

    @property
    def uses_trl(self) -> bool:
        """True if TRL's trainer runs the algorithm instead of our loop."""
        return False

    @property
    def samples_in_process(self) -> bool:
        return not self.uses_trl

    def n_rounds(self, n_tasks: int) -> int:
        if self.max_steps is not None:
            return -(-self.max_steps // (self.num_iterations * self.num_mini_batches))
        return max(1, round(self.num_train_epochs * n_tasks / self.questions_per_round))

    def n_steps(self, n_inputs: int) -> int:
        return self.n_rounds(n_inputs) * self.num_iterations * self.num_mini_batches


class ClipKeys(Settings):
    """Clipping and entropy bonus of a policy gradient."""

    epsilon: float = Field(0.2, gt=0, description="the ratio to the sampling policy is clipped at 1 - epsilon ...")
    epsilon_high: float | None = Field(None, gt=0, description="... and at 1 + epsilon_high; None: epsilon")
    entropy_coef: float = Field(0.0, description="weight of the tokens' entropy, which lowers the loss")


class WritingRecipe(RoundRecipe, WriterKeys, ClipKeys):
    """Keys of online algorithms that train a policy that writes."""

    learning_rates: ClassVar[tuple[float, float]] = (2e-3, 1e-6)

    per_device_train_batch_size: PositiveInt = Field(64, description="completions in memory at once")
    keep_rollouts: Literal["above", "below", "either"] | None = Field(
        None, description="learn only from completions with all parts of the reward above (below) the group's mean"
    )
    served: bool = Field(
        False, description="the run's servers write (kind openai: vLLM), and load the adapter before each round"
    )
    beta: float = Field(0.0, ge=0, description="strength of the KL penalty to the initial policy")
    kl_estimator: Literal["k1", "k3"] = "k3"
    target_kl: float | None = Field(None, gt=0, description="nats a completion that beta adapts to; None: fixed beta")
    kl_horizon: float = Field(10_000, gt=0, description="completions in which beta moves by about a fifth")

    @model_validator(mode="after")
    def _has_a_penalty_to_move(self) -> WritingRecipe:
        if self.target_kl is not None and not self.beta:
            raise ValueError("target_kl moves beta, which is 0; set beta to its first value")
        return self

    @model_validator(mode="after")
    def _serves_adapters(self) -> WritingRecipe:
        if self.served and self.lora is None:
            raise ValueError("served: a running server takes only adapters; set lora too")
        return self


class TRLKeys(Settings):
    """The choice between our loop and TRL's trainer; TRL gets the keys of vLLM unchanged."""

    not_in_trl: ClassVar[tuple[str, ...]] = (
        "questions_per_round", "target_kl", "keep_rollouts", "kl_estimator", "served",
    )  # fmt: skip

    engine: Literal["leret", "trl"] = Field("leret", description="our loop, or TRL's trainer on the stored states")
    gradient_accumulation_steps: PositiveInt = Field(1, description="batches a step, of engine trl")
    use_vllm: bool = Field(False, description="TRL samples with vLLM")
    vllm_mode: Literal["server", "colocate"] = "server"
    vllm_server_base_url: str | None = Field(None, description="of `trl vllm-serve` on other GPUs")
    vllm_gpu_memory_utilization: float = Field(0.3, gt=0, le=1, description="of vllm_mode colocate")
    vllm_tensor_parallel_size: PositiveInt = 1

    @property
    def uses_trl(self) -> bool:
        return self.engine == "trl"

    @model_validator(mode="after")
    def _fits_the_engine(self) -> TRLKeys:
        if self.uses_trl and getattr(self, "states", "stored") != "stored":
            raise ValueError("engine: trl trains on the run's stored states; set states: stored")
        in_trl_only = ("gradient_accumulation_steps", "use_vllm")
        other, names = ("leret", self.not_in_trl) if self.uses_trl else ("trl", in_trl_only)
        if wrong := changed_keys(self, names):
            raise ValueError(f"engine {self.engine} has no {' or '.join(wrong)}; remove it, or set engine: {other}")
        return self


class PickingRecipe(RoundRecipe):
    """Keys of trainings of pickers; they start from the run's picker, or from a trained one."""

    learning_rate: float = Field(1e-3, gt=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    questions_per_round: PositiveInt = Field(64, description="tasks; each pick of a program is a state")
    per_device_train_batch_size: PositiveInt = Field(256, description="states in memory at once")


def changed_keys(settings: Settings, names: Sequence[str]) -> list[str]:
    """Return those keys with another value than their default."""
    return [name for name in names if getattr(settings, name) != type(settings).model_fields[name].default]
