"""Training on a run's stored states with TRL's unmodified GRPOTrainer or RLOOTrainer.

A row holds a state's prompt and id. The reward function continues the program from the state with
each completion and scores the result as `RoundSampler` does. The completions of a generation batch
share one retriever call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, PositiveInt
from torch import tensor

from leret.config.training import PolicyGradientRecipe, RoundRecipe
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.core.types import Sample, State, Task, digest, seed_of
from leret.policies.checkpoints import adapter_base
from leret.policies.local.chat_template import reads_clock
from leret.policies.local.policy import LocalPolicy
from leret.rollouts.environment import Environment
from leret.rollouts.facts import Group
from leret.rollouts.failures import refuse_failures
from leret.rollouts.rounds import Round, RoundSampler
from leret.rollouts.states import StateSampler
from leret.rollouts.walk import Point
from leret.sampling.store.store import stored_paths
from leret.training.data import plain
from leret.training.job import TrainingJob
from leret.training.model import InitialPolicy, find_writer, load_for_training
from leret.training.rounds.grpo import GRPO, GRPOKeys
from leret.training.rounds.rloo import RLOO
from leret.training.stored.trainer import (
    TrainerInputs,
    TRLEngine,
    build_trainer,
    trainer_arguments,
)


class TRLRecipe(PolicyGradientRecipe):
    """Keys of TRL's trainers. The vLLM keys are passed to TRL unchanged."""

    engine: Literal["trl"] = "trl"
    groups: Literal["state"] = "state"
    states: Literal["stored"] = "stored"
    gradient_accumulation_steps: PositiveInt = Field(1, description="batches per step")
    use_vllm: bool = Field(False, description="sample with vLLM")
    vllm_mode: Literal["server", "colocate"] = "server"
    vllm_server_base_url: str | None = Field(
        None, description="URL of `trl vllm-serve` on other GPUs"
    )
    vllm_gpu_memory_utilization: float = Field(
        0.3, gt=0, le=1, description="for vllm_mode colocate"
    )
    vllm_tensor_parallel_size: PositiveInt = 1

    @property
    def progress_unit(self) -> str:
        return "step"

    def trl_arguments(self) -> dict[str, Any]:
        """Return the arguments of the algorithm's own keys."""
        return {}


class GRPOWithTRL(GRPOKeys, TRLRecipe):
    """Group relative policy optimization with TRL's GRPOTrainer."""

    entropy_coef: float = Field(
        0.0, description="weight of the token entropy, subtracted from the loss"
    )

    def trl_arguments(self) -> dict[str, Any]:
        loss_type = {"sequence": "grpo", "token": "bnpo", "dapo": "dapo"}[self.loss_type]
        return {
            "loss_type": loss_type,
            "scale_rewards": self.scale_rewards,
            "entropy_coef": self.entropy_coef,
        }


class RLOOWithTRL(TRLRecipe):
    """REINFORCE leave-one-out with TRL's RLOOTrainer."""

    algorithm: Literal["rloo"] = "rloo"
    beta: float = Field(
        0.05, ge=0, description="weight of the KL penalty (summed over tokens) in the reward"
    )


class _StateCollector(StateSampler):
    """Records the states at trained predictors, each with its `Point`, without sampling."""

    points: dict[str, tuple[Point, State]]

    async def sample_state(self, point: Point, state: State) -> list[Any]:
        if self.roles[state.predictor].sampled:
            self.points[state.id] = point, state
        return []


class StoredStates(RoundSampler):
    """A run's sampled states as dataset rows, and TRL's reward function for completions."""

    __name__ = "reward"

    def __init__(
        self,
        recipe: RoundRecipe,
        environment: Environment,
        run: Run,
        policy: LocalPolicy,
        tasks: Sequence[Task],
    ) -> None:
        super().__init__(recipe, environment, run, policy, stored_paths(run))
        self._points: dict[str, tuple[Point, State]] = {}
        asyncio.run(self._collect_states(tasks))

    @property
    def rows(self) -> dict[str, list[Any]]:
        """Columns ``prompt`` (messages) and ``state`` (state ids)."""
        prompts = [list(plain(state.messages)) for _, state in self._points.values()]
        return {"prompt": prompts, "state": [*self._points]}

    def close(self) -> None:
        super().close()
        self.policy.close()

    def __call__(
        self,
        completions: Sequence[Any],
        state: Sequence[str],
        trainer_state: Any,
        log_metric: Any,
        **more: Any,
    ) -> list[float | None]:
        """Return the reward of each completion; None means that an outage prevented its scoring."""
        texts = [str(turns[0]["content"]) for turns in completions]
        step = trainer_state.global_step
        self.policy.renew(digest("trl", step))  # used with sampling.credit: final
        groups = asyncio.run(self._score(texts, state, step))
        for _, samples in groups:
            self.stats.count(samples)
        max_error_rate = self.environment.recipe.sampling.max_error_rate
        refuse_failures(self.stats, max_error_rate, max_unparsed_rate=1.0)
        rewards = self._log_rewards(groups, log_metric)
        by_state = {}
        for sampled, samples in groups:
            by_state[sampled.id] = iter([rewards.get(sample.id) for sample in samples])
        return [next(by_state[name]) for name in state]

    def _log_rewards(self, groups: Sequence[Group], log_metric: Any) -> dict[str, float | None]:
        """Log the round's metrics; return the reward of each scored sample."""
        scored: list[Sample] = []
        for _, members in self.scored(groups):
            scored += members
        names, parts = self.parts_of(scored)
        rewards = tensor([sample.reward for sample in scored])
        for name, value in self.metrics_of(groups, names, parts, rewards).items():
            log_metric(name, value)
        return {sample.id: sample.reward for sample in scored}

    async def _collect_states(self, tasks: Sequence[Task]) -> None:
        plan = await self.plan_of(Round(), tasks, self.recipe.seed)
        collector = _StateCollector(self.runner, None, plan)
        collector.points = self._points
        await self.roll_out(collector, plan, tasks)

    async def _score(self, texts: Sequence[str], names: Sequence[str], step: int) -> list[Group]:
        round_ = Round()
        plan = await self.plan_of(round_, (), seed_of(self.recipe.seed, "round", step))
        sampler = StateSampler(self.runner, None, plan, walks=round_.walks)

        async def group(name: str) -> Group:
            point, state = self._points[name]
            fresh = replace(point, results=dict(point.results), reached={}, finals={})
            of_texts = zip(names, texts, strict=True)
            completions = [text for state_id, text in of_texts if state_id == name]
            return state, await sampler.score(fresh, state, completions)

        return await round_.walks.gather(group(name) for name in dict.fromkeys(names))


@contextmanager
def trl_engine(job: TrainingJob, device: str) -> Iterator[TRLEngine]:
    """Yield an engine with TRL's trainer for the recipe's algorithm.

    It takes as many steps as `RoundLoop` would.
    """
    import trl

    assert job.run is not None
    assert job.environment is not None
    recipe: Any = job.recipe
    environment = job.environment
    tasks = cast(Sequence[Task], job.inputs)
    if recipe.beta and recipe.lora is None and adapter_base(job.initial.directory) is not None:
        raise TrainingError(
            f"engine: trl cannot use adapter {job.initial.directory} as the reference; merge the "
            "adapter"
        )
    model, tokenizer = load_for_training(job.initial, recipe.lora, recipe.dtype)
    inputs = TrainerInputs(
        model, tokenizer, (), job.directory.path, device, recipe.n_steps(len(tasks))
    )
    states = StoredStates(recipe, environment, job.run, _live(job, model, tokenizer), tasks)
    with closing(states):
        name = recipe.algorithm.upper()
        try:
            arguments = getattr(trl, f"{name}Config")(**_arguments(recipe, inputs, environment))
        except ValueError as error:
            raise TrainingError(f"engine: TRL rejects the recipe: {error}") from error
        rows = states.rows
        if reads_clock(tokenizer):
            raise TrainingError(
                "engine: TRL's prompts have today's date instead of the run's; remove engine: trl"
            )
        if any("tools" in prompt[0] for prompt in rows["prompt"]):
            raise TrainingError(
                "engine: TRL does not get the tools of native tool calls; remove engine: trl"
            )
        if len(rows["state"]) * recipe.num_generations < arguments.generation_batch_size:
            raise TrainingError(
                f"a batch of {arguments.generation_batch_size} completions, "
                f"{recipe.num_generations} per state, needs more states than the "
                f"{len(rows['state'])} in the run; lower per_device_train_batch_size or sample "
                "more states"
            )
        kind = getattr(trl, f"{name}Trainer")
        trainer = build_trainer(kind, inputs, arguments, rows, recipe.lora, reward_funcs=states)
        # The trainer moved the model to its device.
        states.policy = _live(job, trainer.model, tokenizer)
        yield TRLEngine(trainer, tokenizer, job, len(rows["state"]))
        trainer.accelerator.wait_for_everyone()


def _live(job: TrainingJob, model: Any, tokenizer: Any) -> LocalPolicy:
    assert job.environment is not None
    thinking = getattr(job.environment.recipe.policy, "enable_thinking", None)
    name = job.recipe.policy_name
    digest = job.initial.digest
    return LocalPolicy.over(model, tokenizer, name=name, digest=digest, enable_thinking=thinking)


def _arguments(recipe: Any, inputs: TrainerInputs, environment: Environment) -> dict[str, Any]:
    """Return TRL arguments for the recipe.

    ``per_device_train_batch_size`` counts completions per device.
    """
    lm = environment.recipe.policy
    suppressed = inputs.model.generation_config.suppress_tokens
    thinking = getattr(lm, "enable_thinking", None)
    same = ["num_generations", "num_iterations", "epsilon", "epsilon_high", "beta"]
    same += [name for name in TRLRecipe.model_fields if name.startswith(("use_vllm", "vllm_"))]
    arguments = trainer_arguments(recipe, inputs)
    arguments |= {name: getattr(recipe, name) for name in same}
    arguments |= recipe.trl_arguments()
    return arguments | {
        "steps_per_generation": recipe.gradient_accumulation_steps * recipe.num_mini_batches,
        "temperature": recipe.temperature or lm.temperature,
        "top_p": recipe.top_p or lm.top_p,
        "max_completion_length": recipe.max_completion_length or lm.max_tokens,
        "generation_kwargs": {"suppress_tokens": suppressed} if suppressed else None,
        "chat_template_kwargs": None if thinking is None else {"enable_thinking": thinking},
    }


@dataclass(frozen=True, slots=True)
class TRLAlgorithm:
    """An algorithm with a trainer in TRL, on a run's stored states."""

    settings: type[TRLRecipe]
    describe: Callable[[Any], str]
    find_initial: Callable[[Run, Any], InitialPolicy] = find_writer

    is_online: ClassVar[bool] = True

    def engine(self, job: TrainingJob, device: str) -> AbstractContextManager[TRLEngine]:
        return trl_engine(job, device)


ENGINE = {
    "grpo": TRLAlgorithm(GRPOWithTRL, GRPO.describe),
    "rloo": TRLAlgorithm(RLOOWithTRL, RLOO.describe),
}
"""`engine: trl` by algorithm."""
