"""GRPO on groups from ``dspy.GRPO``, with one optimizer step per call.

This module uses leret's updates (`leret.training.online.update`) because TRL's trainer needs a fixed batch size, while
the number of groups from DSPy depends on the program and varies between steps.
"""

from __future__ import annotations

import gc
import itertools
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PositiveInt

from leret.config.training import ClipKeys, DeviceKeys, OptimizerKeys, WriterKeys, WritingRecipe
from leret.core.dspy_internals import ReinforceJob, TrainDataFormat, TrainingStatus
from leret.core.errors import TrainingError
from leret.core.progress import Progress
from leret.core.runs import versions
from leret.optimize.finetune import ONE_TRAINING, default_run_dir, initial_policy, validated
from leret.policies.checkpoints import pick_device, positions
from leret.policies.dspy_lm import PolicyEngine
from leret.policies.local.chat_template import end_token
from leret.policies.local.model import stop_ids
from leret.training.algorithms.grpo import OBJECTIVE, GRPOKeys
from leret.training.data import TokenEncoder, TrainingExample
from leret.training.job import CheckpointDirectory, Interrupt, TrainingRecord, training_process
from leret.training.model import InitialPolicy, library_of, save_policy, with_learning_rate
from leret.training.processes import n_processes
from leret.training.watch import Monitor

if TYPE_CHECKING:
    from leret.training.online.update import RolloutBatch

N_IDS = 1024
"""Number of batch ids per step. A step must have fewer groups than ids, so that DSPy sends every group."""

Group = Sequence[Mapping[str, Any]]
"""Samples that GRPO compares, each ``{"messages": [...], "completion": {"role", "content"}, "reward": float}``."""


class GRPOSettings(OptimizerKeys, DeviceKeys, WriterKeys, ClipKeys, GRPOKeys):
    """``train_kwargs`` of ``dspy.GRPO`` without ``run_dir``: those keys of GRPO recipes that apply to single steps."""

    learning_rates: ClassVar[tuple[float, float]] = WritingRecipe.learning_rates

    num_generations: PositiveInt = Field(description="samples per group; set by DSPy")
    max_length: PositiveInt = Field(2048, description="prompt and completion tokens; longer samples are dropped")
    enable_thinking: bool | None = None


class GRPOTraining:
    """A policy in training that stays in memory between steps; the log has one entry per step."""

    def __init__(self, initial: InitialPolicy, settings: GRPOSettings, directory: Path) -> None:
        import torch

        from leret.training.driver import Driver, StepLoop
        from leret.training.online.update import Update, load_trainable

        if n_processes() > 1:
            raise TrainingError(f"dspy.GRPO trains in one process, not in {n_processes()}; start it without a launcher")
        settings = with_learning_rate(settings, initial)
        self.initial, self.settings, self.device = initial, settings, pick_device(settings.device)
        self.n_samples, self._began = 0, time.monotonic()
        torch.manual_seed(settings.seed)
        self.model, self.tokenizer = load_trainable(initial, settings.lora, settings.dtype, self.device)
        end = end_token(self.tokenizer, stop_ids(self.model))
        self._encoder = TokenEncoder(self.tokenizer, end, settings.enable_thinking)
        self._limit = min(settings.max_length, positions(self.model) or settings.max_length)
        self._update = Update(self.model, self.tokenizer.pad_token_id, settings, OBJECTIVE)
        self._loop = StepLoop(directory, logging_steps=1, save_steps=0)
        self._loop.add_callback(Driver(self._loop.log, Monitor(directory.name), "dspy.GRPO", Progress(), Interrupt()))
        self._loop.begin()

    @property
    def log(self) -> list[dict[str, float]]:
        entries: list[dict[str, float]] = self._loop.state.log_history
        return entries

    def step(self, groups: Sequence[Group]) -> bool:
        """Take one optimizer step on the groups; return False, without a step, if no group has different rewards."""
        if not groups:
            return False
        batch = self._batch(groups)
        figures = self._update.step(batch)
        if not figures:
            return False
        rewards = [float(one["reward"]) for group in groups for one in group]
        entry = {name: figures[name] for name in ("loss", "grad_norm")} | {"reward": sum(rewards) / len(rewards)}
        entry["num_completions"] = len(batch.sequences)
        self._loop.end_step(entry)
        self.n_samples += len(batch.sequences)
        return True

    def save(self, place: CheckpointDirectory) -> None:
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
        method = "GRPO (arXiv 2402.03300) on groups from dspy.GRPO"
        record.write(place.final, method, self.initial.base_model, library_of(self.model))
        place.publish()

    def _batch(self, groups: Sequence[Group]) -> RolloutBatch:
        import torch

        from leret.training.online.advantages import group_relative
        from leret.training.online.update import RolloutBatch

        conversations = [(tuple(one["messages"]), (one["completion"]["content"],)) for group in groups for one in group]
        encoded = self._encoder.encode([TrainingExample("", *conversation) for conversation in conversations])
        rewards = torch.tensor([float(one["reward"]) for group in groups for one in group], dtype=torch.float64)
        numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group])
        advantages = group_relative(rewards, numbers, self.settings.scale_rewards)
        fits = [index for index, one in enumerate(encoded) if one.length <= self._limit]
        if not fits:
            raise TrainingError(f"no sample fits into {self._limit} tokens; raise max_length, or shorten the prompts")
        sequences = [(encoded[index].prompt, encoded[index].completions[0]) for index in fits]
        batch = RolloutBatch.of(sequences, numbers[fits].to(self.device))
        return replace(batch, advantages=advantages[fits].to(batch.mask)[:, None] * batch.mask)


class GRPOJob(ReinforceJob):
    """A training job of ``dspy.GRPO``. After each step, ``lm.model`` names the new weights.

    The weights from the previous step are then deleted, unless they are a checkpoint. During training, the LM runs in
    this process instead of on a server, because a server would have to restart after each step.
    """

    _ids = itertools.count()  # shared by all jobs, because DSPy's optimizer remembers used ids

    def initialize(self) -> None:
        engine = getattr(self.lm, "engine", None)
        if not isinstance(engine, PolicyEngine):
            raise TrainingError(f"{self.lm.model} has no local weights to reinforce; use leret.LM(DIRECTORY)")
        keys = {"enable_thinking": engine.settings.enable_thinking, **self.train_kwargs}
        policies = Path(keys.pop("run_dir", None) or default_run_dir()).resolve() / "policies"
        self._settings = validated(GRPOSettings, keys)
        policies.mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="grpo-", dir=policies))
        self._first = self.lm.model
        self.lm.kill()  # memory may not hold the model twice
        with ONE_TRAINING, training_process(self._settings.threads):
            self._training: GRPOTraining | None = GRPOTraining(
                initial_policy(self.lm.finetuning_model or self._first), self._settings, self.directory
            )
        self._state = TrainingStatus.running
        self._pending = list(itertools.islice(self._ids, N_IDS))
        self._seen: dict[int, Group] = {}

    def get_status(self) -> dict[str, Any]:
        """Return DSPy's ``GRPOStatus``. DSPy calls ``get_status``, but its base class only defines ``status``."""
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
        """Train on all groups of a step; a row is ``{"batch_id": int, "group": Group}``. An error ends the job."""
        if self._training is None:
            raise TrainingError(f"{self.directory.name} has ended ({self._state.value}); call lm.reinforce again")
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
        """Add the name of the current weights to ``checkpoints``, so that the next step does not delete them."""
        self.checkpoints[checkpoint_name] = self.lm.model
        self.last_checkpoint = checkpoint_name

    def terminate(self) -> None:
        """End the training and free its memory; the LM keeps its last weights. A second call does nothing."""
        self._end(TrainingStatus.succeeded)

    def cancel(self) -> None:
        self._end(TrainingStatus.cancelled)

    def _new_groups(self, train_data: Sequence[Mapping[str, Any]]) -> list[Group]:
        """Return the groups of this step without repetitions.

        DSPy repeats the groups of a step to fill the ids, and sends the remaining repetitions in the next step.
        Repetitions are the same list objects, so a list from the previous step is skipped.
        """
        by_id: dict[int, Group] = {id(row["group"]): row["group"] for row in train_data}
        if len(by_id) == N_IDS:
            raise TrainingError(f"a step has {N_IDS} groups or more; lower num_dspy_examples_per_grpo_step")
        groups = [group for number, group in by_id.items() if number not in self._seen]
        self._seen = by_id  # keeps the lists alive, so that Python does not reuse their ids
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
