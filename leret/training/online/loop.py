"""Training on fresh samples: sample a round, estimate advantages, update, and again.

A checkpoint holds all that the next round depends on: the learner's state (weights, optimizer, schedule), the random
state, the log. Seeds follow from the recipe's and the round's number, so a training that was killed and goes on ends
in the same bits, on one thread.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from leret.core.errors import TrainingError
from leret.core.files import write_atomically
from leret.core.progress import Progress
from leret.core.runs import Run
from leret.core.types import digest
from leret.policies.checkpoints import pick_device
from leret.sampling.rollouts.environment import Environment
from leret.training.alarms import best_step
from leret.training.callbacks import Monitor, monitored
from leret.training.checkpoints import TrainingJob, TrainingRecord, TrainReport, checkpoint_step
from leret.training.online.algorithm import Learner, OnlineAlgorithm
from leret.training.online.recipe import RoundRecipe
from leret.training.online.rounds import RoundSampler, round_of
from leret.training.process import Interrupt, training_process
from leret.training.validation import Validation

_STATE, _LAST = "state.pt", "trainer_state.json"
_KEPT = 2


class OnlineTraining:
    """A policy in training, round by round.

    Attributes:
        history: a log entry for each round so far, names as in TRL.
        validations: a log entry for each validation.
    """

    def __init__(
        self, job: TrainingJob, algorithm: OnlineAlgorithm, environment: Environment, run: Run, device: str
    ) -> None:
        self.recipe, self.tasks = recipe, tasks = cast(RoundRecipe, job.recipe), job.tasks
        torch.manual_seed(recipe.seed)
        self.n_rounds = recipe.n_rounds(len(tasks))
        self.history: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self._initial, self._device = job.initial.digest, device
        self.learner: Learner = algorithm.learner(recipe, job.initial, environment, len(tasks), device)
        self.sampler = RoundSampler(recipe, environment, run, self.learner.policy)

    @property
    def log(self) -> list[dict[str, Any]]:
        """Means over every ``logging_steps`` rounds, fewer at the end, and the validations."""
        every, n = self.recipe.logging_steps, len(self.history)
        whole = n if n == self.n_rounds else n // every * every
        means = [_mean(self.history[i : min(i + every, n)]) for i in range(0, whole, every)]
        return sorted([*means, *self.validations], key=lambda entry: entry["step"])

    def step(self) -> None:
        """One round; its log entry is the last of `history`."""
        number = len(self.history)
        self.learner.policy.renew(digest(self._initial, self.recipe.model_dump(mode="json"), number))
        self.sampler.policy, self.sampler.temperature = self.learner.policy, self.learner.temperature
        places = round_of(len(self.tasks), self.recipe.questions_per_round, self.recipe.seed, number)
        last = number + 1 == self.n_rounds
        sampled = self.sampler.sample([self.tasks[place] for place in places], number, last=last)
        entry = {"step": number + 1, "epoch": (number + 1) * len(places) / len(self.tasks)}
        entry |= {"learning_rate": self.learner.learning_rate, **sampled.facts}
        self.history.append({**entry, **(self.learner.learn(sampled, number) if sampled.sequences else {})})

    def validate(self, validation: Validation) -> bool:
        """Run the program on held-out tasks; whether it was never better."""
        number, metric = len(self.history), self.recipe.metric_for_best_model
        self.validations.append({"step": number, **self.learner.validate(validation, number)})
        return best_step(self.validations, metric) == number

    def save(self, directory: Path) -> None:
        """Write a checkpoint after the last round; the file that makes it whole comes last."""
        path = directory / f"checkpoint-{len(self.history)}"
        path.mkdir(parents=True, exist_ok=True)
        torch.save({**self.learner.state(path), "random": torch.get_rng_state()}, path / _STATE)
        last = {"global_step": len(self.history), "history": self.history, "validations": self.validations}
        write_atomically(path / _LAST, json.dumps(last))
        best = best_step(self.validations, self.recipe.metric_for_best_model)
        for old in sorted(directory.glob("checkpoint-*"), key=checkpoint_step)[:-_KEPT]:
            if checkpoint_step(old) != best:
                shutil.rmtree(old)

    def load(self, path: Path) -> None:
        state = torch.load(path / _STATE, map_location=self._device, weights_only=True)
        self.learner.load_state(state, path)
        torch.set_rng_state(state["random"].cpu())
        last = json.loads((path / _LAST).read_text(encoding="utf-8"))
        self.history, self.validations = last["history"], last["validations"]

    def load_best(self, directory: Path) -> None:
        """Take the weights of the best validation, where there were any."""
        best, log = best_step(self.validations, self.recipe.metric_for_best_model), (self.history, self.validations)
        if best not in (None, len(self.history)):
            self.load(directory / f"checkpoint-{best}")
            self.history, self.validations = log

    def close(self) -> None:
        """End the threads of sampling."""
        self.sampler.close()
        self.learner.policy.close()


def fit_online(job: TrainingJob, algorithm: OnlineAlgorithm, progress: Progress, interrupt: Interrupt) -> TrainReport:
    """Train and publish one policy, or go on with it from its last checkpoint.

    Raises:
        LeretError: the loss is no number, an alarm stopped the training, or too many samples failed.
        KeyboardInterrupt: SIGINT or SIGTERM came; a checkpoint was written first.
    """
    began = time.monotonic()
    recipe, directory, device = job.recipe, job.directory, pick_device(job.recipe.device)
    if job.run is None:
        raise TrainingError(f"algorithm: {recipe.algorithm} samples a run's tasks afresh; for examples: sft, dpo, ipo")
    with (
        training_process(recipe.threads if device == "cpu" else None),
        job.environment or Environment.open(job.run) as environment,
    ):
        training = OnlineTraining(job, algorithm, environment, job.run, device)
        directory.drop_broken()
        checkpoint = directory.checkpoint()
        if checkpoint is not None:
            training.load(checkpoint)
        try:
            with monitored(recipe, directory.path, job.event) as monitor, interrupt.handled():
                _rounds(training, directory.path, progress, interrupt, monitor, job.validation)
        finally:
            progress.finish()
            training.close()
        training.load_best(directory.path)
        record = TrainingRecord.of(
            job,
            training.log,
            examples=int(sum(entry["num_samples"] for entry in training.history)),
            steps=len(training.history) * training.recipe.num_iterations * training.recipe.num_mini_batches,
            seconds=round(time.monotonic() - began, 3),
        )
        base_model, library = training.learner.save(directory.final)
        record.write(directory.final, algorithm.describe(recipe), base_model, library)
        directory.publish()
    seconds = time.monotonic() - began
    return record.report(directory.policy, seconds, resumed_from=checkpoint_step(checkpoint))


def _rounds(
    training: OnlineTraining,
    directory: Path,
    progress: Progress,
    interrupt: Interrupt,
    monitor: Monitor,
    validation: Validation | None,
) -> None:
    recipe = training.recipe
    progress.start(f"train {recipe.policy_name}", training.n_rounds)
    progress.advance(len(training.history))
    monitor.begin(training.log)
    n_seen = len(training.log)
    if validation is not None and not training.validations:
        training.validate(validation)
    for done in range(len(training.history) + 1, training.n_rounds + 1):
        training.step()
        last, better = done == training.n_rounds, False
        if validation is not None and recipe.eval_steps and (last or done % recipe.eval_steps == 0):
            better = training.validate(validation)
        log, stopped = training.log, False
        for n in range(n_seen + 1, len(log) + 1):
            stopped = monitor.see(log[:n])
        n_seen = len(log)
        shown = {name: training.history[-1][name] for name in ("reward", "loss") if name in training.history[-1]}
        progress.advance(1, **shown)
        if stopped or better or interrupt.requested or done % recipe.save_steps == 0:
            training.save(directory)
        if stopped or interrupt.requested:
            break
    monitor.check()


def _mean(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each figure's mean over the entries that have it; step and epoch are those of the last."""
    names = dict.fromkeys(name for entry in entries for name in entry)
    means = {name: [entry[name] for entry in entries if name in entry] for name in names}
    last = {name: entries[-1][name] for name in ("step", "epoch")}
    return {name: sum(values) / len(values) for name, values in means.items()} | last
