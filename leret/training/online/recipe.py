"""Keys that the online algorithms share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from leret.config.base import Free
from leret.config.sampling import RewardKey
from leret.config.training import TrainingRecipe


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
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


class OnlineRecipe(RoundRecipe):
    """Of algorithms that train a policy which writes."""

    learning_rates: ClassVar[tuple[float, float]] = (2e-3, 1e-6)
    kl_in_reward: ClassVar[bool] = False
    sequence_ratio: ClassVar[bool] = False

    per_device_train_batch_size: PositiveInt = Field(64, description="completions that are in memory at once")
    keep_rollouts: Literal["above", "below", "either"] | None = Field(
        None, description="learn only from completions whose parts of the reward are all above (below) the group's mean"
    )

    served: bool = Field(
        False, description="the run's servers write (kind openai: vLLM), and load the adapter before each round"
    )

    epsilon: float = Field(0.2, gt=0, description="the ratio to the policy that sampled is clipped at 1 - epsilon ...")
    epsilon_high: float | None = Field(None, gt=0, description="... and at 1 + epsilon_high; None: epsilon")
    loss_type: Literal["sequence", "token", "dapo"] = "dapo"
    beta: float = Field(0.0, ge=0, description="strength of the KL penalty to the initial policy")
    kl_estimator: Literal["k1", "k3"] = "k3"
    target_kl: float | None = Field(None, gt=0, description="nats a completion that beta is moved to keep; None: fixed")
    kl_horizon: float = Field(10_000, gt=0, description="completions in which beta moves by about a fifth")
    entropy_coef: float = 0.0

    @property
    def values_loss(self) -> tuple[float, float]:
        """Weight of the values' loss, and how far a value moves in a round; of weight 0 there are no values."""
        return 0.0, 0.0

    @model_validator(mode="after")
    def _has_a_penalty_to_move(self) -> OnlineRecipe:
        if self.target_kl is not None and not self.beta:
            raise ValueError("target_kl moves beta, which is 0; set beta to what it starts with")
        if self.served and self.lora is None:
            raise ValueError("served: a server that runs takes adapters alone; set lora too")
        return self


class TwoEngines(OnlineRecipe):
    """Of the algorithms that TRL has a trainer of, too; the keys of vLLM go to it as they are."""

    engine: Literal["leret", "trl"] = Field("leret", description="our loop, or TRL's trainer on the stored states")
    use_vllm: bool = Field(False, description="TRL samples with vLLM")
    vllm_mode: Literal["server", "colocate"] = "server"
    vllm_server_base_url: str | None = Field(None, description="of `trl vllm-serve`, on GPUs of its own")
    vllm_gpu_memory_utilization: float = Field(0.3, gt=0, le=1, description="where it is colocated")
    vllm_tensor_parallel_size: PositiveInt = 1

    @property
    def by_trl(self) -> bool:
        return self.engine == "trl"

    @model_validator(mode="after")
    def _engine_has_it(self) -> TwoEngines:
        if self.use_vllm and not self.by_trl:
            raise ValueError("use_vllm is of engine: trl; set that too")
        if self.sequence_ratio and self._given(["loss_type"]):
            raise ValueError("loss_type: the loss of whole completions is their mean; remove it")
        if not self.by_trl:
            return self
        if self.states != "stored":
            raise ValueError("engine: trl trains on the states that the run has stored; set states: stored")
        without = ["questions_per_round", "target_kl", "keep_rollouts", "kl_estimator", "served"]
        if self.sequence_ratio:
            without += ["entropy_coef"]
        if unknown := self._given(without):
            raise ValueError(f"TRL's trainer has no {' or '.join(unknown)}; remove them, or set engine: leret")
        return self
