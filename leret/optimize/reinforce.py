"""GRPO on the groups that ``dspy.GRPO`` hands over: a step of the optimizer for each call.

A loop of its own, since TRL's trainer has one batch size for a whole training, while the number of DSPy's groups
follows from the program and differs by step; the loss is TRL's, as the tests compare.
"""

from __future__ import annotations

import gc
import itertools
import math
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
from leret.policies.dspy_lm import PolicyEngine
from leret.training.algorithms.base import new_adapter
from leret.training.checkpoints import CheckpointDirectory, TrainingRecord
from leret.training.data import Encoded, TokenEncoder, TrainingExample, end_token
from leret.training.model import InitialPolicy, load_for_training, pick_device, positions, save_policy, stop_ids
from leret.training.process import training_process

if TYPE_CHECKING:
    import torch

N_IDS = 1024
"""Groups of a step at most. More ids than groups: DSPy then sends each group of the step at least once."""

Group = Sequence[Mapping[str, Any]]
"""Of DSPy: samples ``{"messages": [...], "completion": {"role", "content"}, "reward": float}`` that are compared."""


class GRPOSettings(Settings):
    """``train_kwargs`` of ``dspy.GRPO``, beside ``run_dir``. Names and defaults as in TRL where it has them."""

    num_generations: PositiveInt = Field(description="of a group; DSPy sets it")
    learning_rate: float = Field(1e-6, gt=0)
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


def group_advantages(rewards: Sequence[float], scale: bool) -> list[float]:
    """A group's rewards less their mean, over their standard deviation (of a sample) where ``scale``."""
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1))
    return [(reward - mean) / (deviation + 1e-4 if scale else 1.0) for reward in rewards]


def grpo_loss(logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """GRPO on fresh samples: their ratio to the policy that drew them is 1, and has the policy's gradient.

    Args:
        logps: (n_sequences, length) natural log-probabilities of tokens.
        advantages: (n_sequences,).
        mask: (n_sequences, length) 1 on the tokens of completions, 0 elsewhere.
        n_tokens: of the completions of the whole step, of which this may be a part.

    Source: Shao et al. 2024, arXiv 2402.03300, eq. 3, without KL; averaged over tokens as Yu et al. 2025, arXiv
    2503.14476, eq. 8.
    """
    ratio = (logps - logps.detach()).exp()
    return -(ratio * advantages[:, None] * mask).sum() / n_tokens


class GRPOTraining:
    """A policy in training, in memory from step to step; ``log`` has an entry for each."""

    def __init__(self, initial: InitialPolicy, settings: GRPOSettings) -> None:
        import torch

        from leret.training.packing import share_prompts

        self.initial, self.settings, self.device = initial, settings, pick_device(settings.device)
        self.log: list[dict[str, float]] = []
        self.n_samples, self._began = 0, time.monotonic()
        torch.manual_seed(settings.seed)
        model, self.tokenizer = load_for_training(initial, settings.lora, settings.dtype)
        if (adapter := new_adapter(settings.lora, model)) is not None:
            from peft import get_peft_model

            model = get_peft_model(model, adapter)
        self._packed = self.device == "cpu" and share_prompts(model)
        if self.device != "cpu":
            model.enable_input_require_grads()  # a frozen base has no gradient to be recomputed otherwise
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = model.to(self.device)
        end = end_token(self.tokenizer, stop_ids(model))
        self._encoder = TokenEncoder(self.tokenizer, end, settings.enable_thinking)
        self._limit = min(settings.max_length, positions(model) or settings.max_length)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=0.0)

    def step(self, groups: Sequence[Group]) -> bool:
        """Take one optimizer step on the groups; False where none has two rewards, and nothing changes.

        Raises:
            TrainingError: no sample fits into the policy, or the loss is no number.
        """
        import torch

        samples = [sample for group in groups for sample in self._encode(group)]
        if groups and not samples:
            raise TrainingError(f"no sample fits into {self._limit} tokens; raise max_length, or shorten the prompts")
        if not any(advantage for _, advantage in samples):
            return False
        n_tokens, size = sum(len(one.completions[0]) for one, _ in samples), self.settings.per_device_train_batch_size
        self._optimizer.zero_grad()
        total = 0.0
        for start in range(0, len(samples), size):
            loss = self._loss(samples[start : start + size], n_tokens)
            loss.backward()
            total += loss.item()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm))
        if not math.isfinite(total + norm):
            raise TrainingError(f"the loss is {total}, the norm of its gradient {norm}; lower learning_rate")
        self._optimizer.step()
        rewards = [float(one["reward"]) for group in groups for one in group]
        entry = {"loss": total, "grad_norm": norm, "reward": sum(rewards) / len(rewards)}
        self.log.append({"step": len(self.log) + 1, **entry})
        self.n_samples += len(samples)
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
            dropped=0,
            steps=len(self.log),
            total_steps=self.initial.total_steps + len(self.log),
            seconds=round(time.monotonic() - self._began, 3),
            preflight=0.0,
            versions=versions(),
            log_history=self.log,
        )
        method = "GRPO (arXiv 2402.03300) on the groups of dspy.GRPO"
        record.write(place.final, method, self.initial.base_model, hasattr(self.model, "peft_config"))
        place.publish()

    def _encode(self, group: Group) -> list[tuple[Encoded, float]]:
        """The samples that are short enough, each with its advantage in the whole group."""
        talks = [(tuple(one["messages"]), (one["completion"]["content"],)) for one in group]
        encoded = self._encoder.encode([TrainingExample("", *talk) for talk in talks])
        advantages = group_advantages([float(one["reward"]) for one in group], self.settings.scale_rewards)
        return [pair for pair in zip(encoded, advantages, strict=True) if pair[0].length <= self._limit]

    def _loss(self, samples: Sequence[tuple[Encoded, float]], n_tokens: int) -> torch.Tensor:
        import torch
        from accelerate.utils import send_to_device

        from leret.training.packing import collate

        sequences = [(one.prompt, one.completions[0]) for one, _ in samples]
        batch = send_to_device(collate(sequences, self.tokenizer.pad_token_id, packed=self._packed), self.device)
        mask, targets = batch.pop("completion_mask")[:, 1:], batch["input_ids"][:, 1:, None]
        bfloat16 = self.settings.dtype == "bfloat16"
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=bfloat16):
            logits = self.model(**batch, use_cache=False).logits[:, :-1].float()
        logps = torch.log_softmax(logits, dim=-1).gather(-1, targets)[..., 0]
        return grpo_loss(logps, torch.tensor([value for _, value in samples], device=self.device), mask, n_tokens)


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
        with ONE_TRAINING, training_process(self.directory, self._settings.threads):
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
            with ONE_TRAINING, training_process(self.directory, self._settings.threads):
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
