"""A picker in training: what its methods share, from the choices of a round to the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from leret.core.errors import TrainingError
from leret.core.types import Choice, digest
from leret.policies.pickers.picker import Picker, open_picker
from leret.sampling.rollouts.environment import Environment
from leret.training.model import InitialPolicy, sampled_picker
from leret.training.online.advantages import mini_batches
from leret.training.online.rounds import Sampled
from leret.training.online.update import make_optimizer, make_schedule
from leret.training.picking.losses import gains
from leret.training.picking.recipe import PickingRecipe
from leret.training.validation import Validation

_PICKER = "picker"


@dataclass(frozen=True, slots=True)
class PickBatch:
    """Picks with what an update needs; tensors are (n,), an entry a pick.

    Attributes:
        choices: one a state; all picks of a state stand together.
        states: place of each pick's choice.
        actions: place of the picked candidate in it.
        walks: number of the run of the program.
        gains: what each pick is paid of its run's reward.
        targets: what the method aims at: advantages, or returns.
        before: log-probabilities of the picks under the picker that sampled, or under the reference.
    """

    choices: Sequence[Choice]
    states: Tensor
    actions: Tensor
    rewards: Tensor
    walks: Tensor
    gains: Tensor
    targets: Tensor
    before: Tensor

    @classmethod
    def of(cls, sampled: Sampled) -> PickBatch:
        """A round's picks, without targets."""
        choices = {int(group): one[0] for group, one in zip(sampled.groups, sampled.sequences, strict=True)}
        places = {group: {one.id: i for i, one in enumerate(choice.candidates)} for group, choice in choices.items()}
        groups = sampled.groups.tolist()
        actions = [places[group][name] for group, (_, name) in zip(groups, sampled.sequences, strict=True)]
        zeros = torch.zeros(len(actions))
        paid = gains(sampled.rewards, sampled.walks, sampled.at_end)
        given = sampled.groups, torch.tensor(actions), sampled.rewards, sampled.walks, paid
        return cls([choices[i] for i in range(len(choices))], *given, zeros, zeros)

    def at(self, states: Tensor) -> PickBatch:
        """The picks at some states, given in rising order."""
        rows = torch.isin(self.states, states).nonzero()[:, 0]
        names = ("actions", "rewards", "walks", "gains", "targets", "before")
        tables = {name: getattr(self, name)[rows] for name in names}
        own = torch.searchsorted(states, self.states[rows])
        return replace(self, choices=[self.choices[i] for i in states.tolist()], states=own, **tables)


class Method(Protocol):
    """How a picker learns from a round.

    Attributes:
        fellow: the picker beside the one in training, if any: a reference, or a target network.
    """

    fellow: Picker | None

    def begin(self, picker: Picker) -> None:
        """Make the fellow, of a picker that is about to be trained."""

    def draws(self, number: int, share: float) -> tuple[float, int | None]:
        """Temperature and top-k of a round; ``share`` is of the first learning rate."""
        ...

    def prepare(self, picker: Picker, batch: PickBatch, share: float) -> tuple[PickBatch, dict[str, float]]:
        """The batch with targets, and figures for the log."""
        ...

    def losses(self, picker: Picker, batch: PickBatch) -> Tensor:
        """(n_states,)."""
        ...

    def after(self, picker: Picker) -> None:
        """After each step of the optimizer."""


class PickLearner:
    """The `leret.training.online.algorithm.Learner` of pickers."""

    def __init__(
        self, method: Callable[[Any, float], Method], recipe: PickingRecipe, initial: InitialPolicy,
        environment: Environment, n_tasks: int, device: str,
    ) -> None:  # fmt: skip
        own = sampled_picker(environment.recipe, recipe)
        self.recipe, self._n_steps, self._rounds = recipe, recipe.n_steps(n_tasks), 0
        self.method = method(recipe, recipe.temperature or own.temperature)
        self._settings = own.model_copy(
            update={"model": str(initial.directory)} | ({"device": device} if hasattr(own, "device") else {})
        )
        self._optimizer: Any = None
        self._schedule: Any = None
        self.policy = open_picker(self._settings)
        self._initial = self.policy.name
        self._next_round()

    @property
    def learning_rate(self) -> float:
        return self.recipe.learning_rate if self._schedule is None else float(self._schedule.get_last_lr()[0])

    def learn(self, sampled: Sampled, number: int) -> dict[str, float]:
        recipe, batch = self.recipe, PickBatch.of(sampled)
        if self._optimizer is None:
            self.policy.fit(batch.choices)
            self._begin()
        self.policy.model.eval()
        batch, entry = self.method.prepare(self.policy, batch, self._share)
        first = torch.unique_consecutive(batch.states, return_inverse=True)[1]
        walks = torch.zeros(len(batch.choices), dtype=torch.long).index_copy(0, first, batch.walks)
        found: list[dict[str, float]] = []
        for order in range(recipe.num_iterations):
            for states in mini_batches(walks, recipe.num_mini_batches, recipe.seed, number, order):
                found.append(self._step(batch.at(states)))
        self._rounds = number + 1
        self._next_round()
        return entry | {name: sum(one[name] for one in found) / len(found) for name in found[0]}

    def validate(self, validation: Validation, step: int) -> dict[str, float]:
        return validation.run_policy(self.policy.clone())  # whoever runs it closes it

    def state(self, directory: Path) -> dict[str, Any]:
        self.policy.save(directory / _PICKER)
        fellow = {} if self.method.fellow is None else self.method.fellow.model.state_dict()
        own = {"optimizer": self._optimizer.state_dict(), "schedule": self._schedule.state_dict()}
        return {**own, "fellow": fellow, "rounds": self._rounds}

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        self.policy.close()
        self.policy = open_picker(self._settings.model_copy(update={"model": str(directory / _PICKER)}))
        self._begin()
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        if self.method.fellow is not None:
            self.method.fellow.model.load_state_dict(state["fellow"])
        self._rounds = state["rounds"]
        self._next_round()

    def save(self, directory: Path) -> tuple[str, str]:
        self.policy.save(directory)
        return self._initial, "leret"

    def _begin(self) -> None:
        recipe = self.recipe
        adam = {name: getattr(recipe, name) for name in ("adam_beta1", "adam_beta2", "adam_epsilon")}
        kind, more = make_optimizer(recipe, **adam)
        self._optimizer = kind(self.policy.model.parameters(), **{**more, "lr": recipe.learning_rate})
        self._schedule = make_schedule(recipe, self._optimizer, self._n_steps, getattr(recipe, "min_lr_rate", 0.0))
        self.method.begin(self.policy)

    @property
    def _share(self) -> float:
        """Of the first learning rate; 1 while it is warmed up."""
        warmup = self.recipe.warmup_steps or math.ceil(self.recipe.warmup_ratio * self._n_steps)
        if self._schedule is None or self._schedule.last_epoch < warmup:
            return 1.0
        return self.learning_rate / self.recipe.learning_rate

    def _next_round(self) -> None:
        """What the next round is drawn with; embeddings of the weights before are forgotten."""
        self.temperature, top_k = self.method.draws(self._rounds, self._share)
        self.policy.settings = self.policy.settings.model_copy(update={"top_k": top_k})
        self.policy.renew(digest(self.policy.digest, self._rounds))

    def _step(self, batch: PickBatch) -> dict[str, float]:
        """One step of the optimizer; the loss is the mean over states."""
        self._optimizer.zero_grad()
        n, total, picker = len(batch.choices), 0.0, self.policy
        for states in torch.arange(n).split(self.recipe.per_device_train_batch_size):
            loss = self.method.losses(picker, batch.at(states)).sum() / n
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(picker.model.parameters(), self.recipe.max_grad_norm))
        if not math.isfinite(total + norm):
            raise TrainingError(f"the loss is {total}, the norm of its gradient {norm}; lower learning_rate")
        self._optimizer.step()
        self._schedule.step()
        self.method.after(picker)
        return {"loss": total, "grad_norm": norm}


def values_of(picker: Picker, choices: Sequence[Choice], twin: bool = False) -> Tensor:
    """Q-values (n_states, n_heads, width) on the CPU, minus infinity behind a choice's candidates."""
    rows = [values if twin else values[None] for values in picker.q(choices, twin)]
    return pad_sequence([values.T for values in rows], batch_first=True, padding_value=-math.inf).transpose(1, 2).cpu()
