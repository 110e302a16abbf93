"""GRPO on the groups that ``dspy.GRPO`` hands over: a step of the optimizer for each call.

Updates of leret's own (`leret.training.online.update`), since TRL's trainer has one batch size for a whole training,
while the number of DSPy's groups follows from the program and differs by step.
"""

from __future__ import annotations

import gc
import itertools
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt

from leret.config.base import Settings
from leret.config.training import LoraSettings
from leret.core.dspy_internals import ReinforceJob, TrainDataFormat, TrainingStatus
from leret.core.errors import TrainingError
from leret.core.runs import versions
from leret.optimize.finetune import ONE_TRAINING, default_run_dir, initial_policy, validated
from leret.policies.checkpoints import pick_device, positions
from leret.policies.dspy_lm import PolicyEngine
from leret.training.algorithms.grpo import GRPORecipe
from leret.training.checkpoints import CheckpointDirectory, TrainingRecord
from leret.training.data import TokenEncoder, TrainingExample, end_token
from leret.training.model import InitialPolicy, library_of, save_policy, stop_ids, with_learning_rate
from leret.training.process import training_process

if TYPE_CHECKING:
    from leret.training.online.update import RolloutBatch

N_IDS = 1024
"""Groups of a step at most. More ids than groups: DSPy then sends each group of the step at least once."""

Group = Sequence[Mapping[str, Any]]
"""Of DSPy: samples ``{"messages": [...], "completion": {"role", "content"}, "reward": float}`` that are compared."""


class GRPOSettings(Settings):
    """``train_kwargs`` of ``dspy.GRPO``, beside ``run_dir``. Names and defaults as in TRL where it has them."""

    num_generations: PositiveInt = Field(description="of a group; DSPy sets it")
    learning_rate: float | None = Field(None, gt=0, description="chosen by the size of the model when absent")
    scale_rewards: bool = Field(True, description="divide a group's advantages by their standard deviation")
    max_grad_norm: float = Field(1.0, gt=0)
    per_device_train_batch_size: PositiveInt = Field(16, description="completions that are in memory at once")
    max_length: PositiveInt = Field(2048, description="prompt and completion tokens; longer samples are dropped")
    lora: LoraSettings | None = None
    seed: int = 0
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: PositiveInt | None = 1
    enable_thinking: bool | None = None


class GRPOTraining:
    """A policy in training, in memory from step to step; ``log`` has an entry for each."""

    def __init__(self, initial: InitialPolicy, settings: GRPOSettings) -> None:
        import torch

        from leret.training.online.update import Update, load_trainable

        self.initial, self.settings, self.device = initial, settings, pick_device(settings.device)
        self.log: list[dict[str, float]] = []
        self.n_samples, self._began = 0, time.monotonic()
        torch.manual_seed(settings.seed)
        self.model, self.tokenizer = load_trainable(initial, settings.lora, settings.dtype, self.device)
        end = end_token(self.tokenizer, stop_ids(self.model))
        self._encoder = TokenEncoder(self.tokenizer, end, settings.enable_thinking)
        self._limit = min(settings.max_length, positions(self.model) or settings.max_length)
        recipe = validated(GRPORecipe, settings.model_dump(exclude={"scale_rewards", "enable_thinking", "max_length"}))
        recipe = with_learning_rate(recipe, initial)
        self._update = Update(self.model, self.tokenizer.pad_token_id, recipe)

    def step(self, groups: Sequence[Group]) -> bool:
        """Take one optimizer step on the groups; False where none has two rewards, and nothing changes.

        Raises:
            TrainingError: no sample fits into the policy, or the loss is no number.
        """
        if not groups:
            return False
        batch = self._batch(groups)
        found = self._update.step(batch)
        if not found:
            return False
        rewards = [float(one["reward"]) for group in groups for one in group]
        entry = {"loss": found["loss"], "grad_norm": found["grad_norm"], "reward": sum(rewards) / len(rewards)}
        self.log.append({"step": len(self.log) + 1, **entry})
        self.n_samples += len(batch.sequences)
        return True

    def save(self, place: CheckpointDirectory) -> None:
        """Write and publish the policy as it is now."""
        save_policy(self.model, self.tokenizer, place.final)
        record = TrainingRecord(
            name=place.policy.name,
            algorithm="grpo",
            key={"recipe": self.settings.model_dump(mode="json"), "digest": {"parent": self.initial.digest}},
            parent=self.initial.name,
            examples=self.n_samples,
            steps=len(self.log),
            total_steps=self.initial.total_steps + len(self.log),
            seconds=round(time.monotonic() - self._began, 3),
            versions=versions(),
            log_history=self.log,
        )
        method = "GRPO (arXiv 2402.03300) on the groups of dspy.GRPO"
        record.write(place.final, method, self.initial.base_model, library_of(self.model))
        place.publish()

    def _batch(self, groups: Sequence[Group]) -> RolloutBatch:
        """The samples that are short enough, each with its advantage in the whole group."""
        import torch

        from leret.training.online.advantages import group_relative
        from leret.training.online.update import RolloutBatch

        talks = [(tuple(one["messages"]), (one["completion"]["content"],)) for group in groups for one in group]
        encoded = self._encoder.encode([TrainingExample("", *talk) for talk in talks])
        rewards = torch.tensor([float(one["reward"]) for group in groups for one in group], dtype=torch.float64)
        numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group])
        advantages = group_relative(rewards, numbers, "group" if self.settings.scale_rewards else "none")
        fits = [place for place, one in enumerate(encoded) if one.length <= self._limit]
        if not fits:
            raise TrainingError(f"no sample fits into {self._limit} tokens; raise max_length, or shorten the prompts")
        sequences = [(encoded[place].prompt, encoded[place].completions[0]) for place in fits]
        batch = RolloutBatch.of(sequences, numbers[fits].to(self.device))
        batch.advantages = advantages[fits].to(batch.mask)[:, None] * batch.mask
        return batch


class GRPOJob(ReinforceJob):
    """A training by ``dspy.GRPO``: after each step the LM, in place, has the name of new weights.

    The weights of the step before are closed and removed, unless they are a checkpoint. A server of the LM is stopped,
    since it would have to start again with each step: this process answers.
    """

    _ids = itertools.count()  # DSPy keeps the ids that were served for as long as its optimizer lives

    def initialize(self) -> None:
        """Load the policy to train."""
        engine = getattr(self.lm, "engine", None)
        if not isinstance(engine, PolicyEngine):
            raise TrainingError(f"{self.lm.model} has no weights here that can be reinforced; use leret.LM(DIRECTORY)")
        keys = {"enable_thinking": engine.settings.enable_thinking, **self.train_kwargs}
        policies = Path(keys.pop("run_dir", None) or default_run_dir()).resolve() / "policies"
        self._settings = validated(GRPOSettings, keys)
        policies.mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="grpo-", dir=policies))
        self._first = self.lm.model
        self.lm.kill()  # there may be memory for one of them
        with ONE_TRAINING, training_process(self._settings.threads):
            self._training: GRPOTraining | None = GRPOTraining(initial_policy(self._first), self._settings)
        self._state = TrainingStatus.running
        self._pending = list(itertools.islice(self._ids, N_IDS))
        self._seen: dict[int, Group] = {}

    def get_status(self) -> dict[str, Any]:
        """DSPy's ``GRPOStatus``: its optimizer asks for this, its base class has ``status`` alone."""
        return {
            "job_id": self.directory.name,
            "status": self._state.value,
            "current_model": self.lm.model,
            "checkpoints": dict(self.checkpoints),
            "last_checkpoint": self.last_checkpoint,
            "pending_batch_ids": list(self._pending),
        }

    status = get_status

    def step(
        self, train_data: Sequence[Mapping[str, Any]], train_data_format: TrainDataFormat | str | None = None
    ) -> None:
        """Train on all groups of a step, ``{"batch_id": int, "group": Group}`` each.

        Raises:
            TrainingError: the job has ended, the data are none of GRPO's, or the training fails, and the job with it.
        """
        if self._training is None:
            raise TrainingError(f"{self.directory.name} has ended ({self._state.value}); lm.reinforce begins another")
        if train_data_format not in {None, TrainDataFormat.GRPO_CHAT}:
            raise TrainingError(f"leret reinforces on data of format grpo_chat, not {train_data_format}")
        try:
            groups = self._new_groups(train_data)
            with ONE_TRAINING, training_process(self._settings.threads):
                if self._training.step(groups):
                    self._publish(self._training)
        except BaseException:
            self._end(TrainingStatus.failed)
            raise
        self._pending = list(itertools.islice(self._ids, N_IDS))

    def save_checkpoint(self, checkpoint_name: str) -> None:
        """Keep the weights of now: ``checkpoints`` has their name."""
        self.checkpoints[checkpoint_name] = self.lm.model
        self.last_checkpoint = checkpoint_name

    def terminate(self) -> None:
        """End the training and free its memory; the LM keeps the weights of the last step. May be called twice."""
        self._end(TrainingStatus.succeeded)

    def cancel(self) -> None:
        """As `terminate`, and the status says so."""
        self._end(TrainingStatus.cancelled)

    def _new_groups(self, train_data: Sequence[Mapping[str, Any]]) -> list[Group]:
        """Each group of this step once.

        DSPy sends as many groups as there are ids. It repeats the step's groups to fill them and keeps what is left for
        its next step, always as the same list objects; so each that was seen before is a repetition.
        """
        given: dict[int, Group] = {id(row["group"]): row["group"] for row in train_data}
        if len(given) == N_IDS:
            raise TrainingError(f"a step has {N_IDS} groups or more; lower num_dspy_examples_per_grpo_step")
        groups = [group for number, group in given.items() if number not in self._seen]
        self._seen = given  # held, so that no other list gets their ids
        return groups

    def _publish(self, training: GRPOTraining) -> None:
        before, place = self.lm.model, CheckpointDirectory(self.directory, f"step-{len(training.log)}")
        training.save(place)
        self.lm.kill()
        self.lm.model = f"leret/{place.policy}"
        if before not in {self._first, *self.checkpoints.values()}:
            shutil.rmtree(before.removeprefix("leret/"))

    def _end(self, state: TrainingStatus) -> None:
        if self._training is not None:
            self._state, self._training, self._pending = state, None, []
            gc.collect()
