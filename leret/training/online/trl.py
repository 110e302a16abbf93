"""TRL's GRPOTrainer and RLOOTrainer, as they are, on a run's stored states: for several GPUs, and to compare ours with.

A row is the prompt of a state and its id. The reward function runs the program on from the state with each completion,
all of a generation batch at once, so they share one call of the retriever; it scores them as our rounds do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from leret.core.aio import gathered
from leret.core.errors import TrainingError
from leret.core.runs import Run
from leret.core.types import State, Task, digest
from leret.policies.checkpoints import adapter_base
from leret.policies.local.policy import LocalPolicy
from leret.sampling.rollouts.branching import BranchPoint, StateSampler
from leret.sampling.rollouts.environment import Environment
from leret.sampling.rollouts.rollout import seed_of
from leret.sampling.rollouts.scheduler import refuse_failures
from leret.training.algorithms.base import TrainerInputs, build_trainer, trainer_arguments
from leret.training.data import plain
from leret.training.model import InitialPolicy
from leret.training.online.recipe import TwoEngines
from leret.training.online.rounds import Group, RoundPolicy, RoundSampler

_LOSSES = {"sequence": "grpo", "token": "bnpo", "dapo": "dapo"}


class _Places(StateSampler):
    """Keeps where a path stands, instead of sampling there."""

    found: dict[str, tuple[BranchPoint, State]]

    async def sample_state(self, point: BranchPoint, state: State) -> list[Any]:
        if self.roles[state.predictor].sampled:
            self.found[state.id] = point, state
        return []


class StoredStates(RoundSampler):
    """The states of a run's samples as rows, and TRL's reward function of completions at them."""

    __name__ = "reward"

    def __init__(
        self, recipe: TwoEngines, environment: Environment, run: Run, policy: LocalPolicy, tasks: Sequence[Task]
    ) -> None:
        super().__init__(recipe, environment, run, policy)
        self._places: dict[str, tuple[BranchPoint, State]] = {}
        asyncio.run(self._find(tasks))

    @property
    def rows(self) -> dict[str, list[Any]]:
        """Columns ``prompt``, of messages, and ``state``, of ids."""
        prompts = [list(plain(state.messages)) for _, state in self._places.values()]
        return {"prompt": prompts, "state": [*self._places]}

    def close(self) -> None:
        """End the threads of searches and sampling."""
        super().close()
        self.policy.close()

    def __call__(
        self, completions: Sequence[Any], state: Sequence[str], trainer_state: Any, log_metric: Any, **more: Any
    ) -> list[float | None]:
        """A reward a completion, as our rounds score it; None where an outage leaves it unknown."""
        texts = [str(turns[0]["content"]) for turns in completions]
        self.policy.renew(digest("trl", trainer_state.global_step))  # it writes what follows, under credit final
        groups = asyncio.run(self._score(texts, state, trainer_state.global_step))
        for _, samples in groups:
            self.stats.count(samples)
        refuse_failures(self.stats, self._environment.recipe.sampling.max_error_rate, max_unparsed_rate=1.0)
        members = [member for _, samples in self._scored(groups) for member in samples]
        for name, value in self._facts(groups, *self._parts([sample for sample, _ in members])).items():
            log_metric(name, value)
        rewards = {sample.id: value for sample, value in members}
        made = {own.id: iter([rewards.get(sample.id) for sample in samples]) for own, samples in groups}
        return [next(made[name]) for name in state]

    async def _find(self, tasks: Sequence[Task]) -> None:
        plan = await self._plan_of(RoundPolicy(self.policy, lambda: True), tasks, self.recipe.seed)
        walker = _Places(self._runner, None, plan)
        walker.found = self._places
        await gathered(self._walk(walker, plan, task) for task in tasks)

    async def _score(self, texts: Sequence[str], names: Sequence[str], step: int) -> list[Group]:
        policy = RoundPolicy(self.policy, lambda: self._runner.idle)
        plan = await self._plan_of(policy, (), seed_of(self.recipe.seed, "round", step))
        sampler = StateSampler(self._runner, None, plan)

        async def group(name: str) -> Group:
            point, state = self._places[name]
            fresh = replace(point, results=dict(point.results), reached={}, finals={})
            own = [text for text, other in zip(texts, names, strict=True) if other == name]
            return state, await sampler.score(fresh, state, own)

        return list(await gathered(group(name) for name in dict.fromkeys(names)))


def make_trainer(
    recipe: TwoEngines, inputs: TrainerInputs, initial: InitialPolicy, environment: Environment, run: Run,
    tasks: Sequence[Task],
) -> tuple[Any, StoredStates]:  # fmt: skip
    """TRL's trainer of the recipe's algorithm, and its states, which are to be closed.

    Raises:
        TrainingError: there are fewer states than a batch takes, or TRL refuses the settings.
    """
    import trl

    if recipe.beta and recipe.lora is None and adapter_base(initial.directory) is not None:
        raise TrainingError(f"engine: trl would take the base of {initial.directory} as the reference; merge it first")
    thinking = getattr(environment.recipe.policy, "enable_thinking", None)

    def live(model: Any) -> LocalPolicy:
        name, digest = recipe.policy_name, initial.digest
        return LocalPolicy.over(model, inputs.tokenizer, name=name, digest=digest, enable_thinking=thinking)

    states = StoredStates(recipe, environment, run, live(inputs.model), tasks)
    name = recipe.algorithm.upper()
    try:
        arguments = getattr(trl, f"{name}Config")(**_arguments(recipe, inputs, environment, thinking))
    except ValueError as error:
        raise TrainingError(f"engine: trl refuses the recipe: {error}") from error
    rows = states.rows
    if len(rows["state"]) * recipe.num_generations < arguments.generation_batch_size:
        raise TrainingError(
            f"a batch of {arguments.generation_batch_size} completions, {recipe.num_generations} a state, is more than "
            f"the {len(rows['state'])} states of the run give; lower per_device_train_batch_size, or sample more"
        )
    trainer = build_trainer(getattr(trl, f"{name}Trainer"), recipe, inputs, arguments, rows, reward_funcs=states)
    states.policy = live(trainer.model)  # on its device now
    return trainer, states


def _arguments(
    recipe: TwoEngines, inputs: TrainerInputs, environment: Environment, thinking: bool | None
) -> dict[str, Any]:
    """The recipe in TRL's terms; an optimizer step takes ``per_device_train_batch_size`` completions a device."""
    lm, suppressed = environment.recipe.policy, inputs.model.generation_config.suppress_tokens
    same = ["num_generations", "num_iterations", "epsilon", "epsilon_high", "beta"]
    same += [name for name in TwoEngines.model_fields if name.startswith(("use_vllm", "vllm_"))]
    same += [name for name in ("scale_rewards", "entropy_coef") if not recipe.sequence_ratio]
    given = trainer_arguments(recipe, inputs) | {name: getattr(recipe, name) for name in same}
    del given["max_length"]
    if not recipe.sequence_ratio:
        given["loss_type"] = _LOSSES[recipe.loss_type]
    return given | {
        "steps_per_generation": recipe.gradient_accumulation_steps * recipe.num_mini_batches,
        "temperature": recipe.temperature or lm.temperature,
        "top_p": recipe.top_p or lm.top_p,
        "max_completion_length": recipe.max_completion_length or lm.max_tokens,
        "generation_kwargs": {"suppress_tokens": suppressed} if suppressed else None,
        "chat_template_kwargs": None if thinking is None else {"enable_thinking": thinking},
    }
