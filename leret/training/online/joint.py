"""Training of a picker and a writer from the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from leret.policies.load import PolicySet
from leret.policies.local.policy import LocalPolicy
from leret.rollouts.rounds import Sampled
from leret.training.job import TrainingJob
from leret.training.online.base import Objective
from leret.training.online.picking import Method, PickLearner
from leret.training.online.writing import WriterLearner
from leret.training.validation import Validation
from leret.training.watch import PICKER


class JointLearner:
    """Trains two policies, each on its part of a round. They share one log and one checkpoint.

    A picker from scratch takes its vocabulary from the first round, so its updates begin in the
    second.
    """

    def __init__(
        self,
        objectives: tuple[Callable[[Any, float], Method], Objective],
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
        pick_method, write_objective = objectives
        self.picker = PickLearner(pick_method, jobs["picker"], device)
        self.writer = WriterLearner(write_objective, jobs["writer"], device)
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
        picks = sampled.of(self.picker.recipe.predictors or ())
        texts = sampled.of(self.writer.recipe.predictors or ())
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
        picks = dict.fromkeys(self.picker.recipe.predictors or (), picker)
        return self.picker.run(PolicySet({"": writer, **picks}), validation)

    def state(self, directory: Path) -> dict[str, Any]:
        return {"picker": self.picker.state(directory), "writer": self.writer.state(directory)}

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        self.picker.load_state(state["picker"], directory)
        self.writer.load_state(state["writer"], directory)

    def save(self, directory: Path) -> tuple[str, str]:
        self.picker.save(directory / "picker")
        return self.writer.save(directory / "writer")
