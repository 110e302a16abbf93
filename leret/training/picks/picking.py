"""Online training of pickers: a round's picks, the protocol for losses, and optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from leret.core.types import Choice, digest
from leret.policies.pickers.picker import Picker, open_picker
from leret.rollouts.rounds import Sampled
from leret.training.driver import means
from leret.training.job import TrainingJob
from leret.training.model import LOAD, SavedPolicy, sampled_picker
from leret.training.rounds.advantages import Comparison, step_indices
from leret.training.rounds.update import LOGGED, make_optimizer, make_schedule, take_step
from leret.training.validation import Validation

_PICKER = "picker"  # folder name in a checkpoint


@dataclass(frozen=True, slots=True)
class PickBatch:
    """Picks with update targets; tensors are (n,), with one entry per pick.

    Attributes:
        choices: one per state; a state's picks are adjacent.
        states: index of each pick's choice.
        actions: index of the picked candidate in the choice.
        rollouts: index of the pick's rollout.
        step_rewards: each pick's part of the rollout's reward.
        targets: advantages or returns, depending on the method.
        old_logps: log-probabilities under the sampling picker.
        comparison: rewards of the round to compare.
    """

    choices: Sequence[Choice]
    states: Tensor
    actions: Tensor
    rewards: Tensor
    rollouts: Tensor
    step_rewards: Tensor
    targets: Tensor
    old_logps: Tensor
    comparison: Comparison

    @classmethod
    def of(cls, sampled: Sampled) -> PickBatch:
        choices: dict[int, Choice] = {}
        actions = []
        for group, (choice, name) in zip(sampled.groups.tolist(), sampled.sequences, strict=True):
            choices[group] = choice
            ids = [candidate.id for candidate in choice.candidates]
            actions.append(ids.index(name))
        zeros = torch.zeros(len(actions))
        return cls(
            choices=[choices[i] for i in range(len(choices))],
            states=sampled.groups,
            actions=torch.tensor(actions),
            rewards=sampled.rewards,
            rollouts=sampled.walks,
            step_rewards=step_rewards(sampled.rewards, sampled.walks, sampled.at_end),
            targets=zeros,
            old_logps=zeros,
            comparison=Comparison.of(sampled),
        )

    def at(self, states: Tensor) -> PickBatch:
        """Return the picks of ``states``, which are indices of choices in ascending order."""
        rows = torch.isin(self.states, states).nonzero()[:, 0]
        names = ("actions", "rewards", "rollouts", "step_rewards", "targets", "old_logps")
        tables = {name: getattr(self, name)[rows] for name in names}
        choices = [self.choices[i] for i in states.tolist()]
        index = torch.searchsorted(states, self.states[rows])
        return replace(self, choices=choices, states=index, **tables)


class Method(Protocol):
    """Losses for training a picker.

    ``reference`` is the initial picker, a target network, or None.
    """

    reference: Picker | None

    def begin(self, picker: Picker) -> None: ...

    def sampling(self, number: int, share: float) -> tuple[float, int | None]:
        """Return temperature and top-k for round ``number``; ``share`` is learning rate / peak."""
        ...

    def prepare(
        self, picker: Picker, batch: PickBatch, share: float
    ) -> tuple[PickBatch, dict[str, float]]:
        """Return the batch with its targets filled in, and metrics for the log."""
        ...

    def losses(self, picker: Picker, batch: PickBatch) -> dict[str, Tensor]:
        """Return ``loss``, which is minimized, and other terms for the log; each (n_states,)."""
        ...

    def after_step(self, picker: Picker) -> None: ...


class PickLearner:
    """Trains a picker; `temperature` and `learning_rate` apply to the next round."""

    sampling_keys: Mapping[str, Mapping[str, Any]] = {}

    def __init__(
        self, method: Callable[[Any, float], Method], job: TrainingJob, device: str
    ) -> None:
        assert job.environment is not None
        recipe: Any = job.recipe
        sampled = sampled_picker(job.environment.recipe, recipe)
        self.recipe = recipe
        self.predictors = recipe.predictors
        self.actors = (self,)
        self._n_steps = recipe.n_steps(len(job.inputs))
        self._rounds = 0
        self.method = method(recipe, recipe.temperature or sampled.temperature)
        keys = {"model": str(job.initial.directory)}
        if hasattr(sampled, "device"):
            keys["device"] = device
        self._settings = sampled.model_copy(update=keys)
        self._optimizer: Any = None
        self._schedule: Any = None
        self.policy = open_picker(self._settings)
        self._initial = self.policy.name
        self._next_round()

    @property
    def learning_rate(self) -> float:
        if self._schedule is None:
            return float(self.recipe.learning_rate)
        return float(self._schedule.get_last_lr()[0])

    def learn(self, sampled: Sampled, number: int) -> dict[str, float]:
        batch = PickBatch.of(sampled)
        if self._optimizer is None:
            self.begin(batch.choices)
        self.policy.model.eval()
        batch, logged = self.method.prepare(self.policy, batch, self._lr_fraction)
        steps = self._steps(batch, number)
        self._rounds = number + 1
        self._next_round()
        return {**logged, **means(steps)}

    def validate(self, validation: Validation, step: int) -> dict[str, float]:
        return validation.run_policy(self.policy.clone())  # it closes the clone

    def state(self, directory: Path) -> dict[str, Any]:
        self.policy.save(directory / _PICKER)
        reference: dict[str, Any] = {}
        if self.method.reference is not None:
            reference = self.method.reference.model.state_dict()
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "reference": reference,
            "rounds": self._rounds,
        }

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        self.policy.close()
        settings = self._settings.model_copy(update={"model": str(directory / _PICKER)})
        self.policy = open_picker(settings)
        self.begin()
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        if self.method.reference is not None:
            self.method.reference.model.load_state_dict(state["reference"])
        self._rounds = state["rounds"]
        self._next_round()

    def save(self, directory: Path) -> SavedPolicy:
        self.policy.save(directory)
        return SavedPolicy(
            self._initial,
            "leret",
            noun="picker of candidates",
            use="It picks candidates for `leret.Pick`. Its encoders are sentence-transformers "
            f"directories. {LOAD}",
            pipeline="sentence-similarity",
            tag="picker",
        )

    def begin(self, choices: Sequence[Choice] = ()) -> None:
        """Make the optimizer; a picker from scratch takes its vocabulary from ``choices``."""
        self.policy.fit(choices)
        recipe = self.recipe
        self._optimizer = make_optimizer(recipe, self.policy.model.parameters())
        self._schedule = make_schedule(recipe, self._optimizer, self._n_steps)
        self.method.begin(self.policy)

    @property
    def _lr_fraction(self) -> float:
        """Learning rate as a fraction of its peak; 1 during warm-up."""
        warmup = self.recipe.warmup_steps or math.ceil(self.recipe.warmup_ratio * self._n_steps)
        if self._schedule is None or self._schedule.last_epoch < warmup:
            return 1.0
        return self.learning_rate / float(self.recipe.learning_rate)

    def _next_round(self) -> None:
        """Set the next round's temperature and top-k, and drop embeddings of old weights."""
        self.temperature, top_k = self.method.sampling(self._rounds, self._lr_fraction)
        self.policy.settings = self.policy.settings.model_copy(update={"top_k": top_k})
        self.policy.renew(digest(self.policy.digest, self._rounds))

    def _steps(self, batch: PickBatch, number: int) -> list[dict[str, float]]:
        """Take the optimizer steps of a round; return their figures."""
        rollout_of = torch.zeros(len(batch.choices), dtype=torch.long)
        _, index = torch.unique_consecutive(batch.states, return_inverse=True)
        rollout_of = rollout_of.index_copy(0, index, batch.rollouts)
        steps = []
        for states in step_indices(self.recipe, rollout_of, number):
            steps.append(self._step(batch.at(states)))
        return steps

    def _terms(self, batch: PickBatch) -> Iterator[dict[str, Tensor]]:
        """Yield each micro-batch's share of the means over states."""
        n = len(batch.choices)
        for states in torch.arange(n).split(self.recipe.per_device_train_batch_size):
            terms = self.method.losses(self.policy, batch.at(states))
            yield {name: value.sum() / n for name, value in terms.items()}

    def _step(self, batch: PickBatch) -> dict[str, float]:
        """Take one optimizer step on the mean loss over states."""
        figures = take_step(self._optimizer, self._terms(batch), self.recipe.max_grad_norm)
        self._schedule.step()
        self.method.after_step(self.policy)
        return {LOGGED[name]: value for name, value in figures.items()}


def values_of(picker: Picker, choices: Sequence[Choice], twin: bool = False) -> Tensor:
    """Return Q-values (n_states, n_heads, width) on the CPU; padding is minus infinity."""
    columns = []
    for values in picker.q(choices, twin):
        heads = values if twin else values[None]
        columns.append(heads.T)
    table = pad_sequence(columns, batch_first=True, padding_value=-math.inf)
    return table.transpose(1, 2).cpu()


def step_rewards(rewards: Tensor, rollouts: Tensor, at_end: bool = False) -> Tensor:
    """Return each step's reward (n,) from ``rewards`` (n,), the rollout's after each step.

    Its steps are adjacent.

    A step gets the increase of the rollout's reward. With ``at_end``, the last step gets the final
    reward, others 0.
    """
    changes = rollouts[1:] != rollouts[:-1]
    if at_end:
        ends = torch.cat([changes, changes.new_ones(1)])
        return rewards * ends
    starts = torch.cat([changes.new_ones(1), changes])
    before = torch.cat([rewards.new_zeros(1), rewards[:-1]])
    return rewards - before.masked_fill(starts, 0.0)


def as_table(values: Tensor, rollouts: Tensor) -> tuple[Tensor, Tensor]:
    """Return steps' values (n,) as a table (n_rollouts, width), and a mask: True at steps."""
    sizes = torch.unique_consecutive(rollouts, return_counts=True)[1]
    mask = torch.arange(int(sizes.max())) < sizes[:, None]
    zeros = torch.zeros(mask.shape, dtype=values.dtype)
    return zeros.masked_scatter(mask, values), mask
