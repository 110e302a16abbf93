"""Policy updates from batches of completions with advantages.

On a CPU, the completions of a group share one forward pass over their prompt. With several
processes, each runs the model on its share of the completions, and log-probabilities and gradients
are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leret.config.training import LoraSettings, RoundRecipe
from leret.core.errors import TrainingError
from leret.policies.local.model import base_network
from leret.policies.local.packing import collate, share_prompts
from leret.training.model import InitialPolicy, load_for_training, new_adapter
from leret.training.processes import N_PROCESSES, add_up, add_up_figures, add_up_gradients, share
from leret.training.rounds.learner import Objective
from leret.training.rounds.losses import KL, LossType, entropy, reduce_loss

Ids = Sequence[int]

_REFERENCE = "reference"

DIFFERENCE = "sampling/sampling_logp_difference"
"""Prefix of the logged figures of |log p sampler - log p trainer| per token."""

OUTLIER = 0.3
"""Difference in nats above which a token is an outlier; bfloat16 instead of float32 gave up to .22."""

LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "clipped": "clip_ratio/region_mean",
    "ratio": "val/ratio",
    "kl": "kl",
    "policy_loss": "loss/policy_avg",
    "divergence": "distill/divergence",
    "imitation": "distill/share",
    "value_loss": "loss/value_avg",
}
"""Name in the log of each metric of an update."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts for one optimizer step; the losses of its micro-batches are divided by them."""

    sequences: int
    tokens: float
    round_tokens: float  # the round's tokens divided by its number of steps
    learnt_tokens: float  # tokens of completions that affect the loss


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Completions with update targets; tensors over tokens are (n, width), as in `losses`.

    Attributes:
        sequences: prompt and completion ids; completions of one prompt are adjacent.
        groups: (n,) index of each completion's state.
        old_logps: log-probabilities under the sampling policy; None means that the policy has not
            changed since.
        sampler_logps: log-probabilities that the sampler computed, at temperature 1; NaN where it
            sent none.
        reference: log-probabilities under the initial policy; None without a KL penalty.
        values: token values before the update; None without a value head.
        returns: targets for the values.
        imitation: weights of the divergence from a teacher; None without a teacher.
        teacher_prompts: (n) prompt ids of the teacher; None: the student's.
        teacher_logps: log-probabilities under a teacher on a server, at temperature 1.
    """

    sequences: list[tuple[Ids, Ids]]
    groups: Tensor
    mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    sampler_logps: Tensor | None = None
    imitation: Tensor | None = None
    teacher_prompts: list[Ids] | None = None
    teacher_logps: Tensor | None = None
    counts: StepCounts | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[tuple[Ids, Ids]],
        groups: Tensor,
        logps: Sequence[Sequence[float]] = (),
    ) -> RolloutBatch:
        """Return a batch whose advantages are 0 and whose tensors are on the device of ``groups``.

        ``logps`` holds the sampler's log-probabilities of each completion, which may lack the last
        tokens.
        """
        lengths = torch.tensor(
            [len(completion) for _, completion in sequences], device=groups.device
        )
        mask = (torch.arange(int(lengths.max()), device=groups.device) < lengths[:, None]).float()
        batch = cls(list(sequences), groups, mask, torch.zeros_like(mask))
        return replace(batch, sampler_logps=batch.table(logps)) if any(logps) else batch

    def table(self, logps: Sequence[Sequence[float]]) -> Tensor:
        """Return the log-probabilities of each completion as a tensor, with NaN where there are none."""
        table = torch.full_like(self.mask, torch.nan)
        for row, values in enumerate(logps):
            table[row, : len(values)] = torch.tensor(values, dtype=table.dtype)
        return table

    def after_teacher_prompts(self) -> list[tuple[Ids, Ids]]:
        """Return the prompt ids of the teacher, with the completions."""
        if self.teacher_prompts is None:
            return self.sequences
        completions = [completion for _, completion in self.sequences]
        return list(zip(self.teacher_prompts, completions, strict=True))

    def rows(self, index: Tensor) -> RolloutBatch:
        """Return the completions at ``index``, truncated to the width of the longest completion."""
        width = int(self.mask[index].sum(1).max())
        names = (
            "mask",
            "advantages",
            "old_logps",
            "reference",
            "values",
            "returns",
            "sampler_logps",
            "imitation",
            "teacher_logps",
        )
        tables = {}
        for name in names:
            table = getattr(self, name)
            if table is not None:
                tables[name] = table[index, :width]
        numbers = index.tolist()
        if self.teacher_prompts is not None:
            tables["teacher_prompts"] = [self.teacher_prompts[i] for i in numbers]
        sequences = [self.sequences[i] for i in numbers]
        return replace(self, sequences=sequences, groups=self.groups[index], **tables)

    def counted(self, round_tokens: float | None, has_other_terms: bool) -> RolloutBatch | None:
        """Return the completions that affect a step's loss, with the step's counts.

        Return None if there are none.

        Without a teacher's divergence, advantages of 0 do not affect the loss, unless it has terms
        other than the policy loss.
        """
        n_tokens = float(self.mask.sum())
        weights = self.advantages.abs()
        if self.imitation is not None:
            weights = weights + self.imitation
        learnt = weights.sum(1).nonzero()[:, 0]
        if not has_other_terms and not len(learnt):
            return None
        batch = self if has_other_terms else self.rows(learnt)
        counts = StepCounts(
            sequences=len(self.sequences),
            tokens=n_tokens,
            round_tokens=n_tokens if round_tokens is None else round_tokens,
            learnt_tokens=float(batch.mask.sum()),
        )
        return replace(batch, counts=counts)

    def sampler_difference(self, logps: Tensor) -> Tensor:
        """Return log-probabilities at temperature 1 minus the sampler's, (n, width).

        The difference is 0 where the sampler sent none.
        """
        assert self.sampler_logps is not None
        return (logps - self.sampler_logps).nan_to_num(nan=0.0) * self.mask

    def log_ratio(self, logps: Tensor) -> Tensor:
        """Return token log-ratios to the sampling policy; 0 where the mask is 0."""
        assert self.old_logps is not None
        return (logps - self.old_logps) * self.mask

    def mean(self, losses: Tensor, kind: LossType) -> Tensor:
        """Return this micro-batch's share of the step's mean loss (`reduce_loss`)."""
        assert self.counts is not None
        n_tokens = self.counts.round_tokens if kind == "dapo" else self.counts.tokens
        return reduce_loss(losses, self.mask, kind, self.counts.sequences, n_tokens)

    def sequence_mean(self, losses: Tensor) -> Tensor:
        """Return this micro-batch's share of the step's mean over completion losses (n, 1)."""
        assert self.counts is not None
        return losses.sum() / self.counts.sequences

    def token_mean(self, table: Tensor) -> Tensor:
        """Return this micro-batch's share of the mean over the tokens that affect the loss."""
        assert self.counts is not None
        return (table * self.mask).sum() / self.counts.learnt_tokens


@dataclass(frozen=True, slots=True)
class Forward:
    """Policy outputs at a batch's tokens; tensors over tokens are (n, width)."""

    logits: Tensor  # (n, width, n_vocabulary) at the sampling temperature
    logps: Tensor
    values: Tensor | None  # at the state before each token; None without a value head
    # at temperature 1, without gradient; None if the batch has no sampler_logps
    raw_logps: Tensor | None = None
    teacher: Forward | None = None  # without gradient; None without a teacher in this process


def penalized(
    policy: Tensor, recipe: Any, batch: RolloutBatch, now: Forward, beta: float, kind: LossType
) -> dict[str, Tensor]:
    """Return ``loss`` (policy loss plus KL penalty minus entropy bonus) and its terms.

    The KL estimate is multiplied by the ratio to the sampling policy, which makes the gradient
    unbiased, as in DeepSeek-V3.2 (arXiv 2512.02556) and TRL. The GRPO paper (arXiv 2402.03300, eq.
    4) omits the ratio.
    """
    assert batch.old_logps is not None
    ratio = (now.logps - batch.old_logps).exp() * batch.mask
    terms = {"policy_loss": policy, "ratio": batch.token_mean(ratio)}
    loss = policy
    if batch.reference is not None:
        kl = KL[recipe.kl_estimator](now.logps, batch.reference) * ratio
        terms["kl"] = batch.token_mean(kl)
        if beta:
            loss = loss + beta * batch.mean(kl, kind)
    if recipe.entropy_coef:
        loss = loss - recipe.entropy_coef * batch.mean(entropy(now.logits), kind)
    return {"loss": loss, **terms}


def load_trainable(
    initial: InitialPolicy, lora: LoraSettings | None, dtype: str, device: str
) -> tuple[Any, Any]:
    """Return the policy on ``device``, with a new adapter if ``lora`` is set, and its tokenizer."""
    model, tokenizer = load_for_training(initial, lora, dtype)
    adapter = new_adapter(lora, model)
    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    if device != "cpu":
        model.enable_input_require_grads()  # checkpointing needs gradients, and a frozen base has none
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(device), tokenizer


class Reference:
    """Initial policy during training: the base without the adapter, or a copy of full weights.

    If training continues an adapter, the base also loads the initial adapter under another name, as
    the reference.
    """

    def __init__(self, model: Any, initial: InitialPolicy, lora: LoraSettings | None) -> None:
        self.copy: Any = None
        self._adapter: str | None = None
        if lora is None:
            self.copy = deepcopy(model).requires_grad_(False).eval()
        elif (initial.directory / "adapter_config.json").is_file():
            model.load_adapter(str(initial.directory), _REFERENCE)
            self._adapter = _REFERENCE

    @contextmanager
    def of(self, model: Any) -> Iterator[Any]:
        if self.copy is not None:
            yield self.copy
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
    """Takes optimizer steps on a model.

    The recipe must have the keys that the optimizer and objective read.
    """

    def __init__(
        self,
        model: Any,
        pad: int,
        recipe: Any,
        objective: Objective,
        *,
        temperature: float = 1.0,
        reference: Reference | None = None,
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.objective = objective
        self.temperature = temperature
        self.reference = reference
        self._pad = pad
        self.device = next(model.parameters()).device
        inner = base_network(model)
        self._packed = self.device.type == "cpu" and share_prompts(model)
        if self._packed and reference is not None and reference.copy is not None:
            share_prompts(reference.copy)  # of the same type as the model
        self.value_head: torch.nn.Linear | None = None
        self._hidden: Tensor | None = None
        self._mismatch: list[tuple[Tensor, Tensor]] = []
        self._teacher: Any = None
        if objective.has_values:
            # The size differs from hidden_size in OPT-350m.
            size = inner.get_output_embeddings().weight.shape[1]
            self.value_head = torch.nn.Linear(size, 1, device=self.device)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
            inner.get_decoder().register_forward_hook(self._keep_hidden)
        self.optimizer = make_optimizer(recipe, list(self.trainable_parameters().values()))

    def add_teacher(self, model: Any) -> None:
        """Give the objective the logits of a model with the same tokens; it may be the policy itself."""
        self._teacher = model
        if model is not self.model:
            self._packed = self._packed and share_prompts(model)

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return trainable parameters by name, including the value head."""
        weights = {
            name: weight for name, weight in self.model.named_parameters() if weight.requires_grad
        }
        if self.value_head is not None:
            weights |= self.value_head.named_parameters(prefix="value_head")
        return weights

    @torch.no_grad()
    def evaluate(
        self, batch: RolloutBatch, *, reference: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return each token's log-probability, and the value before it (None without a value head)."""
        self.model.eval()
        logps = torch.zeros_like(batch.mask)
        values = torch.zeros_like(batch.mask)
        for index in self._micro_batches(batch):
            rows = batch.rows(index)
            now = self._forward(self.model, rows, reference)
            if not reference:
                self._compare(rows, now)
            width = now.logps.shape[1]
            logps[index, :width] = now.logps
            if now.values is not None:
                values[index, :width] = now.values
        self.model.train()
        if N_PROCESSES > 1:
            add_up([logps, values])
        return logps, None if self.value_head is None else values

    def step(
        self, batch: RolloutBatch, beta: float = 0.0, round_tokens: float | None = None
    ) -> dict[str, float]:
        """Take one optimizer step, with ``beta`` as the weight of the KL penalty in the loss.

        ``round_tokens`` is the round's token count divided by its number of steps; None means the
        batch's token count. Return batch means (``loss``, ``grad_norm``, the objective's terms). If
        all advantages are 0 and the loss has no other term, return an empty dict and leave the
        weights unchanged.

        Raises:
            TrainingError: the loss or the gradient norm is not finite.
        """
        has_other_terms = bool(beta or self.recipe.entropy_coef or self.value_head is not None)
        counted = batch.counted(round_tokens, has_other_terms)
        if counted is None:
            return {}
        terms = self._terms(counted, beta)
        return take_step(self.optimizer, terms, self.recipe.max_grad_norm)

    def _terms(self, batch: RolloutBatch, beta: float) -> Iterator[dict[str, Tensor]]:
        for index in self._micro_batches(batch):
            rows = batch.rows(index)
            now = self._forward(self.model, rows)
            if self._teacher is not None:
                now = replace(now, teacher=self._forward_teacher(rows))
            if rows.old_logps is None:  # the weights are the sampler's
                rows = replace(rows, old_logps=now.logps.detach())
                self._compare(rows, now)
            yield self.objective.loss(self.recipe, rows, now, beta)

    @torch.no_grad()
    def _forward_teacher(self, batch: RolloutBatch) -> Forward:
        """Return the teacher's outputs at the student's tokens, after the teacher's prompts."""
        sequences = batch.after_teacher_prompts()
        return self._forward(self._teacher, replace(batch, sequences=sequences, sampler_logps=None))

    def mismatch(self) -> dict[str, float]:
        """Return how far log-probabilities before updates were from the sampler's, since the last call.

        The figures have TRL's names. With several processes, they are of this process's
        completions. A step that needs no earlier forward pass compares only the completions that
        affect its loss.
        """
        if not self._mismatch:
            return {}
        tokens = torch.cat([tokens for tokens, _ in self._mismatch])
        ratios = torch.cat([ratios for _, ratios in self._mismatch])
        self._mismatch = []
        return {
            f"{DIFFERENCE}/mean": float(tokens.mean()),
            f"{DIFFERENCE}/max": float(tokens.max()),
            f"{DIFFERENCE}/outliers": float((tokens > OUTLIER).float().mean()),
            "sampling/importance_sampling_ratio/min": float(ratios.min()),
            "sampling/importance_sampling_ratio/mean": float(ratios.mean()),
            "sampling/importance_sampling_ratio/max": float(ratios.max()),
        }

    def _compare(self, rows: RolloutBatch, now: Forward) -> None:
        if rows.sampler_logps is None or now.raw_logps is None:
            return
        compared = rows.sampler_logps.isfinite() & rows.mask.bool()
        difference = rows.sampler_difference(now.raw_logps)
        if compared.any():
            ratios = difference.sum(1)[compared.any(1)].exp()
            self._mismatch.append((difference[compared].abs(), ratios))

    def _forward(self, model: Any, batch: RolloutBatch, reference: bool = False) -> Forward:
        if reference:
            assert self.reference is not None
            with self.reference.of(model) as initial:
                return self._forward(initial, batch)
        from accelerate.utils import send_to_device

        device = self.device
        inputs = collate(batch.sequences, self._pad, packed=self._packed)
        inputs = send_to_device(inputs, device)
        del inputs["completion_mask"]
        rows = torch.arange(len(batch.sequences), device=device)[:, None]
        columns = self._columns(batch).clamp(max=inputs["input_ids"].shape[1] - 2)
        half = self.recipe.dtype == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = model(**inputs, use_cache=False).logits[rows, columns].float()
        ids = inputs["input_ids"][rows, columns + 1, None]
        raw = None
        if batch.sampler_logps is not None and not reference:
            raw = _token_logps(logits, ids)
        logits = logits / self.temperature
        logps = logits.log_softmax(-1).gather(-1, ids)[..., 0]
        values = None
        if self.value_head is not None and self._hidden is not None:
            hidden = self._hidden[rows, columns].float()
            values = self.value_head(hidden)[..., 0] * batch.mask
        self._hidden = None
        return Forward(logits, logps * batch.mask, values, raw)

    def _columns(self, batch: RolloutBatch) -> Tensor:
        """Return the positions (n, width) that predict the tokens of each completion."""
        steps = torch.arange(batch.mask.shape[1], device=self.device)
        if self._packed:
            return steps.expand(len(batch.sequences), -1)
        starts = [len(prompt) - 1 for prompt, _ in batch.sequences]
        return torch.tensor(starts, device=self.device)[:, None] + steps

    def _micro_batches(self, batch: RolloutBatch) -> Sequence[Tensor]:
        """Return the indices of each micro-batch of this process."""
        indices = range(len(batch.sequences))
        if N_PROCESSES > 1:
            indices = share(len(indices))
        if not indices:
            return ()
        mine = torch.tensor(indices, dtype=torch.long, device=batch.groups.device)
        batches: Sequence[Tensor] = mine.split(self.recipe.per_device_train_batch_size)
        return batches

    def _keep_hidden(self, module: Any, args: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state


@torch.no_grad()
def _token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the (n, width) log-probabilities of ``ids``.

    It works row by row, which needs no second table of all logits.
    """
    chosen = logits.gather(-1, ids)[..., 0]
    return chosen - torch.stack([row.logsumexp(-1) for row in logits])


def take_step(
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Mapping[str, Tensor]],
    max_grad_norm: float,
) -> dict[str, float]:
    """Take one optimizer step on the sum of the micro-batches' ``loss``.

    Return all summed terms and ``grad_norm``.

    Raise `TrainingError` if the loss or the gradient norm is not finite.
    """
    optimizer.zero_grad()
    sums: dict[str, float] = {}
    for terms in micro_batches:
        terms["loss"].backward()
        for name, value in terms.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
    weights: list[torch.nn.Parameter] = []
    for group in optimizer.param_groups:
        weights += group["params"]
    if N_PROCESSES > 1:
        sums = add_up_figures(sums)
        add_up_gradients(weights)
    norm = float(torch.nn.utils.clip_grad_norm_(weights, max_grad_norm))
    if not math.isfinite(sums["loss"] + norm):
        raise TrainingError(
            f"the loss is {sums['loss']} and the gradient norm is {norm}; lower learning_rate"
        )
    optimizer.step()
    return {**sums, "grad_norm": norm}


def make_optimizer(recipe: Any, weights: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer in transformers for the recipe's ``optim``, ``learning_rate`` etc."""
    from transformers import Trainer, TrainingArguments

    names = ("optim", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon")
    keys = {name: getattr(recipe, name) for name in names if hasattr(recipe, name)}
    arguments = TrainingArguments(output_dir="unused", report_to=[], use_cpu=True, **keys)
    kind, more = Trainer.get_optimizer_cls_and_kwargs(arguments)
    decay = {} if recipe.optim == "adafactor" else {"weight_decay": recipe.weight_decay}
    optimizer: torch.optim.Optimizer = kind(weights, **more, **decay)
    return optimizer


def make_schedule(recipe: RoundRecipe, optimizer: torch.optim.Optimizer, n: int) -> Any:
    """Return a learning rate schedule over ``n`` steps.

    With ``min_lr_rate``, it ends at this share of the peak.
    """
    from transformers import get_scheduler

    name: str = recipe.lr_scheduler_type
    more = None
    floor = getattr(recipe, "min_lr_rate", 0.0)
    if floor:
        name = f"{name}_with_min_lr"
        more = {"min_lr_rate": floor}
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=recipe.warmup_steps or math.ceil(recipe.warmup_ratio * n),
        num_training_steps=n,
        scheduler_specific_kwargs=more,
    )
