"""Training loop of online algorithms: each round samples and then updates the policy.

A checkpoint holds the learner's state (weights, optimizer, schedule), the random state and the log.
Seeds depend only on the recipe's seed and the round number, so on one thread a killed and resumed
training gives bit-identical weights.

With several processes (`leret.training.processes`), the main process samples each round and sends
it to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import TrainerState

from leret.core.types import Task, digest
from leret.rollouts.rounds import RoundSampler, Sampled, round_of
from leret.sampling.store.store import stored_paths
from leret.training.driver import StepLoop
from leret.training.job import TrainingJob
from leret.training.model import SavedPolicy
from leret.training.processes import IS_MAIN, from_main, gather
from leret.training.validation import Validation

if TYPE_CHECKING:
    from leret.training.rounds.learner import Learner

_STATE = "state.pt"


class RoundLoop(StepLoop):
    """Engine (`leret.training.driver.Engine`) that trains a policy in rounds."""

    preflight: float | None = None
    dropped = 0

    def __init__(
        self, job: TrainingJob, make_learner: Callable[[TrainingJob, str], Learner], device: str
    ) -> None:
        assert job.run is not None
        assert job.environment is not None
        recipe: Any = job.recipe
        self.recipe = recipe
        self.tasks = cast(Sequence[Task], job.inputs)
        torch.manual_seed(recipe.seed)
        self.examples = 0
        self.size = min(int(recipe.questions_per_round), len(self.tasks))
        self._initial = job.initial.digest
        self._device = device
        self._directory = job.directory.path
        super().__init__(
            self._directory,
            recipe.logging_steps,
            recipe.save_steps,
            recipe.n_rounds(len(self.tasks)),
        )
        self.learner = make_learner(job, device)
        self.sampler: RoundSampler | None = None
        if IS_MAIN:
            paths = stored_paths(job.run) if recipe.states == "stored" else None
            self.sampler = RoundSampler(
                recipe, job.environment, job.run, self.learner.actors[0].policy, paths
            )

    @property
    def steps(self) -> int:
        return int(self.state.global_step * self.recipe.steps_per_round)

    def train(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            self.load(checkpoint)
            self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self.begin()
        while not self.is_over:
            figures = self._round()
            epoch = (self.state.global_step + 1) * self.size / len(self.tasks)
            if self.end_step(figures, epoch):
                from_main(self._save_checkpoint)
        self._handler.on_train_end(self.args, self.state, self.control)

    def validate(self, validation: Validation) -> dict[str, float]:
        return from_main(lambda: self.learner.validate(validation, self.state.global_step))

    def load(self, checkpoint: Path) -> None:
        state = torch.load(checkpoint / _STATE, map_location=self._device, weights_only=True)
        self.learner.load_state(state, checkpoint)
        torch.set_rng_state(state["random"].cpu())
        # The count stays when the best step is loaded.
        self.examples = max(self.examples, state["examples"])

    def save(self, directory: Path) -> SavedPolicy:
        gather(None)  # wait until all processes have loaded the best step; publication removes it
        return from_main(lambda: self.learner.save(directory))

    def close(self) -> None:
        if self.sampler is not None:
            self.sampler.close()
        for actor in self.learner.actors:
            actor.policy.close()

    def _round(self) -> dict[str, float]:
        number = self.state.global_step
        sampled = from_main(lambda: self._sample(number))
        self.examples += int(sampled.metrics["num_samples"])
        figures = {"learning_rate": self.learner.learning_rate, **sampled.metrics}
        if sampled.sequences:
            figures |= self.learner.learn(sampled, number)
        return figures

    def _sample(self, number: int) -> Sampled:
        assert self.sampler is not None
        sampler = self.sampler
        actors = self.learner.actors
        for actor in actors:
            actor.policy.renew(digest(self._initial, self.recipe.model_dump(mode="json"), number))
        sampler.policies = {}
        for actor in actors:
            sampler.policies |= dict.fromkeys(actor.predictors or [""], actor.policy)
        sampler.keys = self.learner.sampling_keys
        sampler.temperature = actors[0].temperature
        recipe = self.recipe
        indices = round_of(len(self.tasks), recipe.questions_per_round, recipe.seed, number)
        is_last = number + 1 == self.state.max_steps
        return sampler.sample([self.tasks[i] for i in indices], number, last=is_last)

    def _save_checkpoint(self) -> None:
        path = self._directory / f"checkpoint-{self.state.global_step}"
        path.mkdir(parents=True, exist_ok=True)
        state = self.learner.state(path)
        state |= {"random": torch.get_rng_state(), "examples": self.examples}
        torch.save(state, path / _STATE)
        self.save_state(path)
