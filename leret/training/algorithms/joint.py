"""`joint`: train a picker and a writer together, from one tree of samples per task.

A round draws ``picker.num_generations`` picks at a state and follows each distinct one with
``writer.num_generations`` completions. A pick's reward is the mean reward of its completions, and
the same completions are the group that trains the writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from leret.config.training import RoundRecipe, changed_keys
from leret.core.types import digest
from leret.training.algorithms.grpo import OBJECTIVE, GRPORecipe
from leret.training.algorithms.pick import GroupMethod, PickRecipe
from leret.training.model import InitialPolicy, find_initial, find_picker
from leret.training.online.algorithm import OnlineAlgorithm

if TYPE_CHECKING:
    from leret.core.runs import Run
    from leret.training.job import TrainingJob
    from leret.training.online.joint import JointLearner

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

    algorithm: Literal["joint"] = "joint"
    picker: PickRecipe = Field(
        PickRecipe(num_generations=4), description="keys of pick for the picker"
    )
    writer: GRPORecipe = Field(
        GRPORecipe(num_generations=4), description="keys of grpo for the writer"
    )
    credit: Literal["step", "final", "both", "return"] | None = Field(
        "final", description="always final"
    )

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
        if self.writer.uses_trl or self.writer.uses_tinker:
            raise ValueError(f"writer.engine: {self.writer.engine} trains one policy; remove it")
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


@dataclass(frozen=True, slots=True)
class JointAlgorithm(OnlineAlgorithm):
    """An algorithm with two learners.

    ``objective`` is a pair, for the picker and for the writer.
    """

    def find_initial(self, run: Run, recipe: JointRecipe) -> InitialPolicy:
        """Return the writer's initial policy, with both in ``actors`` and a digest of both."""
        writer = find_initial(run, recipe.writer.init_from, recipe.writer.predictors)
        actors = {"picker": find_picker(run, recipe.picker), "writer": writer}
        total = max(policy.total_steps for policy in actors.values())
        whole = digest(*(policy.digest for policy in actors.values()))
        return InitialPolicy(writer.name, writer.directory, whole, total, writer.template, actors)

    def learner(self, job: TrainingJob, device: str) -> JointLearner:
        from leret.training.online.joint import JointLearner

        return JointLearner(self.objective, job, device)


def _describe(recipe: JointRecipe) -> str:
    k, n = recipe.picker.num_generations, recipe.writer.num_generations
    return (
        f"joint training of a picker and a writer, {k} picks per state and {n} completions per pick"
    )


JOINT = JointAlgorithm(JointRecipe, (GroupMethod, OBJECTIVE), _describe, picks=True)
