"""Groups of keys for `leret train`. Each recipe in `leret.training` combines the groups it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from leret.config.base import Free, KindName, KindSettings, Settings
from leret.config.sampling import RewardKey
from leret.core.classes import is_path, load_named
from leret.core.errors import ConfigError


class LoraSettings(Settings):
    """A low-rank adapter instead of full weights."""

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    quantization: Literal["nf4"] | None = Field(
        None, description="quantize the frozen base model (QLoRA); CUDA only"
    )


class WriterKeys(Settings):
    """Adapter, precision and default learning rates for policies that write text."""

    # Default rates by number of parameters (full fine-tuning).
    learning_rates: ClassVar[Mapping[float, float]] = {1.5e6: 1e-3, 135e6: 5e-5, 1e9: 1e-5}

    lora: LoraSettings | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def learning_rate_for(self, n_parameters: int) -> float:
        """Return the default learning rate: a power law of the model size between neighbours in `learning_rates`.

        The rate is constant outside their sizes. With LoRA, it is ten times as high, but at most the highest rate.
        """
        import numpy as np

        rates = self.learning_rates
        logs = np.interp(math.log(n_parameters), np.log(list(rates)), np.log(list(rates.values())))
        rate = min(10 * math.exp(logs), max(rates.values())) if self.lora else math.exp(logs)
        return float(f"{rate:.1e}")

    @model_validator(mode="after")
    def _quantizes_in_bfloat16(self) -> WriterKeys:
        if self.lora and self.lora.quantization and self.dtype != "bfloat16":
            raise ValueError("lora.quantization: nf4 needs bfloat16; set dtype: bfloat16 too")
        return self


class TrainingRecipe(KindSettings):
    """The recipe of `leret train`: keys shared by all algorithms. Data, program and retriever come from the run."""

    tag = "algorithm"
    # Path of each engine that is not the default of an algorithm: a table of its algorithms.
    engines: ClassVar[Mapping[str, str]] = {}
    folder: ClassVar[str] = "policies"  # folder of the run for the trained model
    trains: ClassVar[str] = "a policy that writes"
    # True if the algorithm cannot train in several processes
    in_one_process: ClassVar[bool] = False

    algorithm: KindName
    name: str | None = Field(
        None, description="name of the policy in R/policies; None: the algorithm's name"
    )
    init_from: str = Field(
        "base", description="base, a policy of the run, a directory, demo or agent"
    )
    predictors: tuple[str, ...] | None = Field(
        None, description="train only on samples of these predictors"
    )

    seed: int = 0
    device: Annotated[str, Free()] = "auto"
    threads: PositiveInt | None = Field(
        1, description="CPU threads; 1: training is bit-identical after a resume"
    )

    # Optimizer and batch size, named as in TRL and transformers.
    learning_rate: float | None = Field(None, gt=0, description="None: depends on the model size")
    optim: Literal["adamw_torch_fused", "adamw_torch", "rmsprop", "adafactor", "sgd"] = (
        "adamw_torch_fused"
    )
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    per_device_train_batch_size: PositiveInt = Field(
        16, description="examples per device and batch"
    )

    # Number of steps and learning rate schedule.
    max_steps: PositiveInt | None = Field(
        None, description="optimizer steps; replaces num_train_epochs"
    )
    num_train_epochs: float = Field(1.0, gt=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="share of steps for warm-up")
    warmup_steps: NonNegativeInt = Field(
        0, description="steps for warm-up, instead of warmup_ratio"
    )

    # Checkpoints, logs, trackers and alarms.
    save_steps: Annotated[PositiveInt, Free()] = 50
    logging_steps: Annotated[PositiveInt, Free()] = 5
    report_to: Annotated[tuple[Literal["wandb", "tensorboard", "trackio"], ...], Free()] = ()
    project: Annotated[str, Free()] = Field(
        "leret", description="project name in wandb and trackio"
    )
    run_name: Annotated[str | None, Free()] = Field(
        None, description="name in trackers; None: the policy's name"
    )
    on_alarm: Annotated[Literal["warn", "stop"], Free()] = Field(
        "warn", description="stop: save and end training"
    )

    # Validation during training. The best step is published.
    eval_steps: PositiveInt | None = Field(
        None, description="steps between validations; None: no validation"
    )
    eval_tasks: PositiveInt = Field(64, description="maximum number of validation tasks")
    eval_split: Literal["dev", "train"] = Field(
        "dev", description="train: excludes the validation tasks from training"
    )
    metric_for_best_model: str = Field(
        "recall", description="a measure of all retrieved documents or of the answer"
    )

    @classmethod
    def find(cls, name: str, engine: str | None = None) -> Any:
        """Return an algorithm as an engine trains it; None is the algorithm's default engine."""
        algorithm = super().find(name)
        if engine is None or algorithm is None:
            return algorithm
        default = algorithm.settings.model_fields.get("engine")
        if default is not None and engine == default.default:
            return algorithm
        if engine in cls.engines:
            algorithms = resolve_name(cls.engines[engine])
        elif is_path(engine):
            algorithms = load_named(engine, "engine", lambda value: isinstance(value, Mapping))
        else:
            algorithms = {}
        if name not in algorithms:
            others = ", ".join(cls.engines)
            raise ConfigError(
                f"engine {engine} does not train {name}; remove it, or name one of {others} or FILE.py:NAME"
            )
        return algorithms[name]

    @classmethod
    def version(cls, values: Mapping[str, Any]) -> type[Self]:
        settings: type[Self] = cls
        if values.get("engine") is not None:
            settings = cls.find(values[cls.tag], str(values["engine"])).settings
        return settings

    def find_algorithm(self) -> Any:
        """Return the recipe's algorithm, as its engine trains it."""
        algorithm = self.table.get(self.algorithm)
        if algorithm is not None and algorithm.settings is type(self):
            return algorithm
        return self.find(self.algorithm, getattr(self, "engine", None))

    @property
    def algorithm_name(self) -> str:
        """Name of the algorithm, without its path."""
        return self.algorithm.rpartition(":")[2]

    @property
    def policy_name(self) -> str:
        return self.name or self.algorithm_name.lower()

    @property
    def is_control(self) -> bool:
        """True if the policy is only for comparison. Later rounds never start from a control."""
        return False

    @property
    def progress_unit(self) -> str:
        """Unit of the steps in logs, checkpoints and progress: ``step`` (an optimizer step) or ``round``."""
        return "step"

    def with_predictors(self, picks: Sequence[str], writers: Sequence[str]) -> Self:
        """Return the recipe for all of a program's picks, or for all predictors that write."""
        return self.model_copy(update={"predictors": tuple(writers)})

    def n_steps(self, n_inputs: int) -> int:
        """Return the total optimizer steps for ``n_inputs`` examples or tasks on one device."""
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
            raise ValueError("warmup_ratio and warmup_steps cannot both be set; remove one")
        return self


class ExampleRecipe(TrainingRecipe, WriterKeys):
    """Keys of algorithms that learn from stored samples."""

    match_steps_of: str | None = Field(
        None, description="for a control: train for as many total steps as this policy"
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="batches per step")
    max_length: PositiveInt = Field(
        2048, description="prompt and completion tokens; longer examples are dropped"
    )

    @property
    def is_control(self) -> bool:
        return self.match_steps_of is not None

    def n_steps(self, n_inputs: int) -> int:
        batches = -(
            -n_inputs // (self.per_device_train_batch_size * self.gradient_accumulation_steps)
        )
        return self.max_steps or max(1, round(batches * self.num_train_epochs))

    @model_validator(mode="after")
    def _counts_steps_once(self) -> ExampleRecipe:
        if self.max_steps and self.match_steps_of:
            raise ValueError("max_steps and match_steps_of cannot both be set; remove one")
        return self


class RoundRecipe(TrainingRecipe):
    """Keys of algorithms that train in rounds: sample tasks with the current policy, score the samples, update.

    Keys that TRL has too are named as in TRL.
    """

    # True if each pick of a state is continued and rewarded by its continuation
    branches: ClassVar[bool] = False
    # True if it adds up step rewards along a path: credit auto stays step
    sums_steps: ClassVar[bool] = False

    groups: Literal["state", "question"] = Field(
        "state",
        description="compare the samples of a state, or whole rollouts of a question (GRPO as in papers)",
    )
    states: Literal["live", "stored"] = Field(
        "live", description="live: from the current policy; stored: the run's"
    )
    limit: PositiveInt | None = Field(
        None, description="maximum number of tasks; None: the run's limit"
    )
    questions_per_round: PositiveInt = Field(
        4, description="tasks per round; each program step is a state"
    )
    num_generations: PositiveInt = Field(
        8, description="samples per state; with groups: question, rollouts per task"
    )
    temperature: float | None = Field(
        None, gt=0, description="sampling temperature; None: the run's"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="None: the run's")
    max_completion_length: PositiveInt | None = Field(
        None, description="maximum tokens; None: the run's"
    )
    reward: RewardKey | None = Field(None, description="None: the run's")
    credit: Literal["step", "final", "both"] | None = Field(None, description="None: the run's")
    unparsed_reward: float | None = Field(
        None,
        description="reward of unparsed completions; None: as in `reward`, else min(0, lowest in group)",
    )
    num_iterations: PositiveInt = Field(1, description="passes over the samples of a round")
    num_mini_batches: PositiveInt = Field(1, description="optimizer steps per pass")
    save_steps: Annotated[PositiveInt, Free()] = Field(50, description="rounds between checkpoints")
    logging_steps: PositiveInt = Field(5, description="rounds averaged in each log entry")

    @property
    def progress_unit(self) -> str:
        return "round"

    @property
    def steps_per_round(self) -> int:
        return self.num_iterations * self.num_mini_batches

    @model_validator(mode="after")
    def _compares_rollouts_by_their_outcome(self) -> Self:
        if self.groups == "question" and self.credit not in (None, "final"):
            raise ValueError(
                f"groups: question gives every turn the final reward, not credit {self.credit}; remove credit"
            )
        if self.groups == "question" and self.states != "live":
            raise ValueError(
                "groups: question runs whole rollouts, not stored states; remove states or groups"
            )
        return self

    def n_rounds(self, n_tasks: int) -> int:
        if self.max_steps is not None:
            return -(-self.max_steps // self.steps_per_round)
        return max(1, round(self.num_train_epochs * n_tasks / self.questions_per_round))

    def n_steps(self, n_inputs: int) -> int:
        return self.n_rounds(n_inputs) * self.steps_per_round


class PolicyGradientRecipe(RoundRecipe, WriterKeys):
    """Keys of online algorithms for policies that write text, in leret's loop and in TRL's trainers."""

    learning_rates: ClassVar[Mapping[float, float]] = {1.5e6: 2e-3, 135e6: 4e-5, 1e9: 1e-6}

    epsilon: float = Field(0.2, gt=0, description="clip the probability ratio at 1 - epsilon")
    epsilon_high: float | None = Field(
        None, gt=0, description="clip the ratio at 1 + epsilon_high; None: epsilon"
    )
    per_device_train_batch_size: PositiveInt = Field(
        64, description="completions in memory at once"
    )
    beta: float = Field(0.0, ge=0, description="strength of the KL penalty to the initial policy")


class WritingRecipe(PolicyGradientRecipe):
    """Keys of online algorithms for policies that write text, in leret's loop."""

    removed: ClassVar[Mapping[str, Any]] = {
        "samples": "student",
        "target_kl": None,
        "kl_horizon": 10_000,
    }

    entropy_coef: float = Field(
        0.0, description="weight of the token entropy, subtracted from the loss"
    )
    served: bool = Field(
        False,
        description="sample on the run's servers (kind openai, vLLM), which load the adapter before each round",
    )
    importance_clip: float | None = Field(
        None,
        gt=0,
        description="weight losses by min(p_trainer / p_sampler, importance_clip); None: no weights",
    )
    kl_estimator: Literal["k1", "k3"] = "k3"

    @model_validator(mode="after")
    def _serves_adapters(self) -> Self:
        if self.served and self.lora is None:
            raise ValueError("served: servers can only load LoRA adapters; set lora too")
        return self


class PickingRecipe(RoundRecipe):
    """Keys of algorithms that train pickers, starting from the run's picker or a trained picker."""

    in_one_process = True
    trains = "a picker"

    learning_rate: float = Field(1e-3, gt=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    questions_per_round: PositiveInt = Field(
        64, description="tasks per round; each pick is a state"
    )
    per_device_train_batch_size: PositiveInt = Field(256, description="states in memory at once")

    def with_predictors(self, picks: Sequence[str], writers: Sequence[str]) -> Self:
        return self.model_copy(update={"predictors": tuple(picks)})


def changed_keys(settings: Settings, names: Sequence[str]) -> list[str]:
    """Return the ``names`` whose values differ from their defaults."""
    return [
        name
        for name in names
        if getattr(settings, name) != type(settings).model_fields[name].default
    ]
