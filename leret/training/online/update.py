"""One update of a policy by a batch of completions that have advantages, a prompt read once for its group.

The same for `leret train` (`leret.training.online.loop`) and for the trainings of ``dspy.GRPO``
(`leret.optimize.reinforce`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leret.config.training import LoraSettings, RoundRecipe
from leret.core.errors import TrainingError
from leret.training.algorithms.base import new_adapter
from leret.training.model import InitialPolicy, load_for_training
from leret.training.online.losses import KL, clipped_loss, entropy, total, value_loss
from leret.training.online.recipe import OnlineRecipe
from leret.training.packing import collate, share_prompts

Ids = Sequence[int]

_REFERENCE = "reference"


@dataclass(slots=True)
class RolloutBatch:
    """Completions with what an update needs; tensors over tokens are (n, width), see `leret.training.online.losses`.

    Attributes:
        sequences: prompt and completion each; those of one prompt stand together.
        groups: (n,) number of each completion's state.
        old_logps: under the policy that sampled; None: the policy is still the one.
        reference: log-probabilities under the initial policy; None without a KL penalty.
        n_tokens: that losses of type ``dapo`` are divided by; None: those of the batch.
    """

    sequences: list[tuple[Ids, Ids]]
    groups: Tensor
    mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    n_tokens: float | None = None

    @classmethod
    def of(cls, sequences: Sequence[tuple[Ids, Ids]], groups: Tensor) -> RolloutBatch:
        """A batch without advantages, on the groups' device."""
        lengths = torch.tensor([len(completion) for _, completion in sequences], device=groups.device)
        mask = (torch.arange(int(lengths.max()), device=groups.device) < lengths[:, None]).float()
        return cls(list(sequences), groups, mask, torch.zeros_like(mask))

    def rows(self, index: Tensor) -> RolloutBatch:
        """Some of the completions, no wider than the longest of them."""
        width = int(self.mask[index].sum(1).max())
        names = ("mask", "advantages", "old_logps", "reference", "values", "returns")
        tables = {name: table[index, :width] for name in names if (table := getattr(self, name)) is not None}
        sequences = [self.sequences[i] for i in index.tolist()]
        return replace(self, sequences=sequences, groups=self.groups[index], **tables)


def load_trainable(initial: InitialPolicy, lora: LoraSettings | None, dtype: str, device: str) -> tuple[Any, Any]:
    """The policy on its device, with a new adapter where one is asked for, and its tokenizer."""
    model, tokenizer = load_for_training(initial, lora, dtype)
    if (adapter := new_adapter(lora, model)) is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    if device != "cpu":
        model.enable_input_require_grads()  # a frozen base has no gradient to be recomputed otherwise
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(device), tokenizer


class Reference:
    """The initial policy beside the one in training: the base without its adapter, or else a copy.

    An adapter that was there before the training is copied under another name; there is one base in memory.
    """

    def __init__(self, model: Any, initial: InitialPolicy, lora: LoraSettings | None) -> None:
        self._copy = self._adapter = None
        if lora is None:
            self._copy = deepcopy(model).requires_grad_(False).eval()
        elif (initial.directory / "adapter_config.json").is_file():
            model.load_adapter(str(initial.directory), _REFERENCE)
            self._adapter = _REFERENCE

    @contextmanager
    def of(self, model: Any) -> Iterator[Any]:
        """The model that computes as the initial policy does."""
        if self._copy is not None:
            yield self._copy
        elif self._adapter is None:
            with model.disable_adapter():
                yield model
        else:
            model.set_adapter(self._adapter)
            try:
                yield model
            finally:
                model.set_adapter("default")


class Update:
    """A model, its optimizer, and one step of it.

    A KL penalty in the loss is the estimator times the ratio to the sampling policy, whose gradient is that of the KL:
    DeepSeek-V3.2, arXiv 2512.02556, and TRL's default. GRPO's paper, arXiv 2402.03300, eq. 4, does not multiply.

    Args:
        model: on its device.
        pad: id of the padding token.
        recipe: what is minimised, and by which optimizer; its learning rate is that of the first step.
        temperature: of the samples.
        reference: where there may be a KL penalty.
    """

    def __init__(
        self,
        model: Any,
        pad: int,
        recipe: OnlineRecipe,
        *,
        temperature: float = 1.0,
        reference: Reference | None = None,
    ) -> None:
        self.model, self.recipe, self.temperature, self.reference = model, recipe, temperature, reference
        self._pad = pad
        self._vf_coef, self._cliprange_value = recipe.values_loss
        self.device = next(model.parameters()).device
        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        copied = [] if reference is None or reference._copy is None else [reference._copy]
        self._packed = self.device.type == "cpu" and False not in [share_prompts(one) for one in (model, *copied)]
        self.value_head: torch.nn.Linear | None = None
        self._hidden: Tensor | None = None
        if self._vf_coef:
            size = inner.get_output_embeddings().weight.shape[1]  # OPT-350m's is not hidden_size
            self.value_head = torch.nn.Linear(size, 1, device=self.device)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
            inner.get_decoder().register_forward_hook(self._keep_hidden)
        kind, more = make_optimizer(recipe)
        self.optimizer = kind(list(self.trained().values()), **{**more, "lr": recipe.learning_rate})

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that change, by name; the value head's among them."""
        found = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        head = {} if self.value_head is None else dict(self.value_head.named_parameters(prefix="value_head"))
        return found | head

    @torch.no_grad()
    def evaluate(self, batch: RolloutBatch, *, reference: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of a batch's tokens, and the values before them where there is a value head."""
        self.model.eval()
        chunks = [self._forward(self.model, part, reference)[1:] for part in self._parts(batch)]
        self.model.train()
        width = batch.mask.shape[1]
        logps = torch.cat([_wide(table, width) for table, _ in chunks])
        values = [_wide(table, width) for _, table in chunks if table is not None]
        return logps, torch.cat(values) if values else None

    def step(self, batch: RolloutBatch, beta: float = 0.0) -> dict[str, float]:
        """One step of the optimizer; ``beta`` weighs the KL penalty in the loss.

        Returns:
            Means over the batch: ``loss``, ``grad_norm``, ``policy_loss``, ``clipped``, ``ratio``; with a reference
            ``kl``, with a value head ``value_loss``. Empty where no completion has an advantage, and nothing changes.

        Raises:
            TrainingError: the loss is no number.
        """
        n_sequences, n_tokens = len(batch.sequences), float(batch.mask.sum())
        if batch.n_tokens is not None and self.recipe.loss_type == "dapo":
            n_tokens = batch.n_tokens
        if not (beta or self.recipe.entropy_coef or self._vf_coef):
            worth = batch.advantages.abs().sum(1).nonzero()[:, 0]  # the others have no part in the loss
            if not len(worth):
                return {}
            batch = batch.rows(worth)
        tokens = float(batch.mask.sum())
        self.optimizer.zero_grad()
        sums: dict[str, float] = {}
        for part in self._parts(batch):
            loss, found = self._loss(part, beta, n_sequences, n_tokens, tokens)
            loss.backward()
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained().values(), self.recipe.max_grad_norm))
        if not math.isfinite(sums["loss"] + norm):
            raise TrainingError(f"the loss is {sums['loss']}, the norm of its gradient {norm}; lower learning_rate")
        self.optimizer.step()
        return {**sums, "grad_norm": norm}

    def _loss(
        self, batch: RolloutBatch, beta: float, n_sequences: int, n_tokens: float, tokens: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Of a part of a batch: what is minimised, and the part's shares of the batch's means."""
        aim = self.recipe
        logits, logps, values = self._forward(self.model, batch)
        mask, old = batch.mask, logps.detach() if batch.old_logps is None else batch.old_logps
        high = aim.epsilon if aim.epsilon_high is None else aim.epsilon_high
        each, clipped = clipped_loss(logps, old, batch.advantages, mask, aim.epsilon, high, sequence=aim.sequence_ratio)
        counted, kind = (torch.ones_like(each), "sequence") if aim.sequence_ratio else (mask, aim.loss_type)
        loss = policy = total(each, counted, kind, n_sequences, n_tokens)  # type: ignore[arg-type]
        ratio = (logps - old).exp() * mask
        found = {"clipped": (clipped * mask).sum() / tokens, "ratio": ratio.sum() / tokens}
        if batch.reference is not None:
            # DeepSeek-V3.2, arXiv 2512.02556, not GRPO's arXiv 2402.03300: times the ratio the gradient is the KL's
            kl = KL[aim.kl_estimator](logps, batch.reference) * ratio
            found["kl"] = kl.sum() / tokens
            if beta:
                loss = loss + beta * total(kl, mask, aim.loss_type, n_sequences, n_tokens)
        if aim.entropy_coef:
            spread = total(entropy(logits), mask, aim.loss_type, n_sequences, n_tokens)
            loss = loss - aim.entropy_coef * spread
        if values is not None and batch.values is not None and batch.returns is not None:
            wrong = value_loss(values, batch.values, batch.returns, self._cliprange_value)
            found["value_loss"] = (wrong * mask).sum() / tokens
            loss = loss + self._vf_coef * found["value_loss"]
        return loss, {"loss": loss, "policy_loss": policy, **found}

    def _forward(
        self, model: Any, batch: RolloutBatch, reference: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits (n, width, n_vocabulary) at the sampling temperature, log-probabilities of the tokens, and values."""
        if reference:
            assert self.reference is not None
            with self.reference.of(model) as initial:
                return self._forward(initial, batch)
        from accelerate.utils import send_to_device

        inputs = send_to_device(collate(batch.sequences, self._pad, packed=self._packed), self.device)
        del inputs["completion_mask"]
        starts = [0 if self._packed else len(prompt) - 1 for prompt, _ in batch.sequences]
        width = batch.mask.shape[1]
        places = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        places = places.clamp(max=inputs["input_ids"].shape[1] - 2)
        rows = torch.arange(len(starts), device=self.device)[:, None]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bfloat16"):
            logits = model(**inputs, use_cache=False).logits[rows, places].float() / self.temperature
        logps = logits.log_softmax(-1).gather(-1, inputs["input_ids"][rows, places + 1, None])[..., 0]
        values = None
        if self.value_head is not None and self._hidden is not None:
            values = self.value_head(self._hidden[rows, places].float())[..., 0]
        self._hidden = None
        return logits, logps * batch.mask, None if values is None else values * batch.mask

    def _parts(self, batch: RolloutBatch) -> Iterator[RolloutBatch]:
        places = torch.arange(len(batch.sequences), device=batch.groups.device)
        for index in places.split(self.recipe.per_device_train_batch_size):
            yield batch.rows(index)

    def _keep_hidden(self, module: Any, args: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state


def make_optimizer(recipe: RoundRecipe, **adam: float) -> tuple[Any, Mapping[str, Any]]:
    """The class and the arguments that transformers takes for the recipe's ``optim`` (``adam_beta1`` ...)."""
    from transformers import Trainer, TrainingArguments

    given = TrainingArguments(
        output_dir="unused", optim=recipe.optim, learning_rate=recipe.learning_rate, report_to=[], use_cpu=True,
        **adam,
    )  # fmt: skip
    kind, more = Trainer.get_optimizer_cls_and_kwargs(given)
    return kind, {**more, "weight_decay": recipe.weight_decay} if recipe.optim != "adafactor" else more


def make_schedule(recipe: RoundRecipe, optimizer: torch.optim.Optimizer, n: int, floor: float = 0.0) -> Any:
    """Of the learning rate, over ``n`` steps; a cosine ends at ``floor``, a share of it."""
    from transformers import get_scheduler

    warmup = recipe.warmup_steps or math.ceil(recipe.warmup_ratio * n)
    name, more = (
        (f"{recipe.lr_scheduler_type}_with_min_lr", {"min_lr_rate": floor})
        if floor
        else (recipe.lr_scheduler_type, None)
    )
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=n, scheduler_specific_kwargs=more)


def _wide(table: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))
