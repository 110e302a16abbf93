"""`joint`: train a picker and a writer together, from one tree of samples per task.

A round draws ``picker.num_generations`` picks at a state and follows each distinct one with
``writer.num_generations`` completions. A pick's reward is the mean reward of its completions, and
the same completions are the group that trains the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from leret.config.training import RoundRecipe, changed_keys
from leret.core.types import digest
from leret.policies.load import PolicySet
from leret.policies.local.policy import LocalPolicy
from leret.training.model import InitialPolicy, find_picker, find_writer
from leret.training.picks.pick import GroupMethod, PickRecipe, picker
from leret.training.rounds.algorithm import RoundAlgorithm, writer
from leret.training.rounds.grpo import GRPO, GRPORecipe
from leret.training.watch import PICKER

if TYPE_CHECKING:
    from leret.core.runs import Run
    from leret.rollouts.rounds import Sampled
    from leret.training.job import TrainingJob
    from leret.training.model import SavedPolicy
    from leret.training.picks.picking import PickLearner
    from leret.training.rounds.writing import WriterLearner
    from leret.training.validation import Validation

OF_ACTORS = (
    "init_from",
    "num_generations",
    "temperature",
    "top_p",
    "max_completion_length",
    "learning_rate",
    "optim",
    "weight_decay",
    "max_grad_norm",
    "per_device_train_batch_size",
    "lr_scheduler_type",
    "warmup_ratio",
    "warmup_steps",
    "num_iterations",
    "num_mini_batches",
)
"""Keys of `RoundRecipe` that each actor's section has, besides the keys of its algorithm; all
others apply to both."""

Actor = Literal["picker", "writer"]


class JointRecipe(RoundRecipe):
    """Train a picker and a writer together, from one tree of samples per task."""

    branches = in_one_process = True
    trains = "a picker and a writer"

    algorithm: Literal["joint"] = "joint"
    picker: PickRecipe = Field(
        PickRecipe(num_generations=4), description="keys of pick for the picker"
    )
    writer: GRPORecipe = Field(
        GRPORecipe(num_generations=4), description="keys of grpo for the writer"
    )
    credit: Literal["step", "final", "both"] | None = Field("final", description="always final")

    @property
    def steps_per_round(self) -> int:
        return self.writer.steps_per_round

    def with_predictors(self, picks: Sequence[str], writers: Sequence[str]) -> JointRecipe:
        names = {
            "picker": self.picker.predictors or tuple(picks),
            "writer": self.writer.predictors or tuple(writers),
        }
        keys: dict[str, Any] = {"predictors": ()}
        for actor, predictors in names.items():
            keys[actor] = getattr(self, actor).model_copy(update={"predictors": predictors})
        if all(names.values()):
            keys["predictors"] = (*names["picker"], *names["writer"])
        return self.model_copy(update=keys)

    def actor(self, name: Actor, n_tasks: int) -> Any:
        """Return the recipe of an actor, with the keys that apply to both actors."""
        section: RoundRecipe = getattr(self, name)
        shared = {key: getattr(self, key) for key in _SHARED}
        steps = self.n_rounds(n_tasks) * section.steps_per_round
        return section.model_copy(update={**shared, "name": self.policy_name, "max_steps": steps})

    @model_validator(mode="after")
    def _has_each_key_in_its_place(self) -> JointRecipe:
        wrong = changed_keys(self, OF_ACTORS)
        if wrong:
            raise ValueError(
                f"{wrong[0]} is a key of each actor; set picker.{wrong[0]} or writer.{wrong[0]}"
            )
        for name, section in (("picker", self.picker), ("writer", self.writer)):
            wrong = changed_keys(section, _SHARED)
            if wrong:
                raise ValueError(
                    f"{name}.{wrong[0]} applies to both actors; remove it, or set {wrong[0]}"
                )
        if self.picker.top_p is not None:
            raise ValueError(
                "picker.top_p: the ratio and the KL are over all candidates; remove it"
            )
        if (self.groups, self.states, self.credit) != ("state", "live", "final"):
            raise ValueError(
                "joint samples trees from fresh states with the final reward; remove groups, "
                "states, credit"
            )
        if self.picker.num_generations * self.writer.num_generations < 2:
            raise ValueError(
                "one pick with one completion leaves nothing to compare; raise num_generations of "
                "one"
            )
        return self


_SHARED = [
    key
    for key in RoundRecipe.model_fields
    if key not in {*OF_ACTORS, "algorithm", "predictors", "credit"}
]


def find_actors(run: Run, recipe: JointRecipe) -> InitialPolicy:
    """Return the writer's initial policy, with both in ``actors`` and a digest of both."""
    initial = find_writer(run, recipe.writer)
    actors = {"picker": find_picker(run, recipe.picker), "writer": initial}
    total = max(policy.total_steps for policy in actors.values())
    whole = digest(*(policy.digest for policy in actors.values()))
    return InitialPolicy(initial.name, initial.directory, whole, total, initial.template, actors)


class JointLearner:
    """Trains two policies, each on its part of a round. They share one log and one checkpoint.

    A picker from scratch takes its vocabulary from the first round, so its updates begin in the
    second.
    """

    def __init__(
        self,
        learners: tuple[
            Callable[[TrainingJob, str], PickLearner], Callable[[TrainingJob, str], WriterLearner]
        ],
        job: TrainingJob,
        device: str,
    ) -> None:
        assert job.environment is not None
        recipe: Any = job.recipe
        self.recipe = recipe
        self._sampling = job.environment.recipe
        jobs = {}
        for actor, initial in job.initial.actors.items():
            part = recipe.actor(actor, len(job.inputs))
            jobs[actor] = replace(job, recipe=part, initial=initial)
        make_picker, make_writer = learners
        self.picker = make_picker(jobs["picker"], device)
        self.writer = make_writer(jobs["writer"], device)
        self.actors = self.picker, self.writer

    @property
    def learning_rate(self) -> float:
        return self.writer.learning_rate

    @property
    def sampling_keys(self) -> dict[str, dict[str, Any]]:
        """Return the next round's keys of `leret.rollouts.actors.Role` by predictor."""
        keys: dict[str, dict[str, Any]] = {}
        for actor in self.actors:
            recipe = actor.recipe
            settings = self._sampling.policy_of(recipe.predictors)
            top_p = 1.0
            if actor is not self.picker:
                top_p = recipe.top_p or settings.top_p
            decoding = {
                "temperature": actor.temperature,
                "top_p": top_p,
                "max_tokens": recipe.max_completion_length or settings.max_tokens,
                "n_samples": recipe.num_generations,
            }
            keys |= dict.fromkeys(recipe.predictors or (), decoding)
        return keys

    def learn(self, sampled: Sampled, number: int) -> dict[str, float]:
        picks = sampled.of(self.picker.predictors or ())
        texts = sampled.of(self.writer.predictors or ())
        logged: dict[str, float] = {}
        if picks.sequences and not self.picker.policy.fitted:
            self.picker.begin([choice for choice, _ in picks.sequences])
        elif picks.sequences:
            figures = {"learning_rate": self.picker.learning_rate}
            figures |= self.picker.learn(picks, number)
            logged = {f"{PICKER}{name}": value for name, value in figures.items()}
        if texts.sequences:
            logged |= self.writer.learn(texts, number)
        return logged

    def validate(self, validation: Validation, step: int) -> dict[str, float]:
        name = f"step {step}"
        picker = self.picker.policy.clone()
        writer = LocalPolicy.over(self.writer.model, self.writer.tokenizer, name=name, digest=name)
        picks = dict.fromkeys(self.picker.predictors or (), picker)
        return validation.run_policy(PolicySet({"": writer, **picks}))

    def state(self, directory: Path) -> dict[str, Any]:
        return {"picker": self.picker.state(directory), "writer": self.writer.state(directory)}

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        self.picker.load_state(state["picker"], directory)
        self.writer.load_state(state["writer"], directory)

    def save(self, directory: Path) -> SavedPolicy:
        self.picker.save(directory / "picker")
        return self.writer.save(directory / "writer")


def _describe(recipe: JointRecipe) -> str:
    k, n = recipe.picker.num_generations, recipe.writer.num_generations
    return (
        f"joint training of a picker and a writer, {k} picks per state and {n} completions per pick"
    )


LEARNERS: tuple[
    Callable[[TrainingJob, str], PickLearner], Callable[[TrainingJob, str], WriterLearner]
] = (partial(picker, GroupMethod), partial(writer, GRPO.objective))

JOINT = RoundAlgorithm(JointRecipe, LEARNERS, JointLearner, _describe, find_actors)
