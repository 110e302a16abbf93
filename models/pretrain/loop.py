"""Pretraining loop: train a model to complete each prompt with its targets, and write a model directory.

All targets of a prompt share one forward pass; a mask separates them. One prompt with six targets takes about a quarter
of the time of six with one target each. A run resumed on one thread ends with the weights of an uninterrupted run.
"""

from __future__ import annotations

import ctypes
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from leret.core.errors import TrainingError
from leret.core.files import atomic_file, write_atomically
from leret.core.progress import Progress
from leret.core.stages import check_resumable
from leret.policies.local.packing import Packed, pack

Probe = Callable[[PreTrainedModel], Mapping[str, float]]
"""Measures the model on held-out data without changing the global random state."""

_STATE = "state.pt"
_DONE = "finished.json"
_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of a prompt and of its alternative completions, each with its end token."""

    prompt: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.prompt) + sum(map(len, self.targets))


def interleaved(
    rows: Iterator[Row],
    exercise: Callable[[], Row],
    shares: tuple[float, float],
    constant_after: int,
    rng: random.Random,
) -> Iterator[Row]:
    """Insert exercises; their share goes from ``shares[0]`` to ``shares[1]`` over the first ``constant_after`` rows."""
    n, (start, last) = 0, shares
    for row in rows:
        while rng.random() < last + (start - last) * max(0.0, 1 - n / constant_after):
            yield exercise()
            n += 1
        yield row
        n += 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows, the flat indices of the positions that predict target tokens, and the target tokens."""

    rows: Sequence[Row]
    packed: Packed
    target_at: torch.Tensor
    target_labels: torch.Tensor


@dataclass(frozen=True)
class LoopSettings:
    """Hyperparameters of the loop, its optimizers and its loss."""

    steps: int
    lr: float = 7e-4  # peak rate of AdamW
    batch_tokens: int = 2048  # maximum tokens per batch, padding included
    pool_rows: int = 256  # rows that are sorted by length together to reduce padding
    warmup_steps: int = 30
    decay_from: float = 0.0  # after this share of the steps, the rate falls linearly to 0
    # Random tokens in the softmax of the loss, in addition to the batch's tokens (Jean et al., arXiv 1412.2007). The
    # last sixth of the steps use the whole vocabulary; all steps do if this is 0.
    negatives: int = 0
    checkpoint_every: int = 500  # steps; a multiple of log_every, so that resuming does not change the log
    log_every: int = 50  # steps; each line of the log has the means over these steps
    probe_every: int = 500
    seed: int = 0  # for the order of batches and for the model

    def optimizers(self, model: PreTrainedModel) -> list[torch.optim.Optimizer]:
        return [adamw(model.parameters(), self.lr)]

    def loss(self, model: PreTrainedModel, batch: Batch, step: int) -> torch.Tensor:
        """Return the mean cross entropy of the targets' tokens."""
        classes = classes_of(model, batch, self, step)
        return cross_entropy(model, hidden_states(model, batch), batch.target_at, batch.target_labels, classes)


def train(
    model: PreTrainedModel,
    rows: Iterator[Row],
    settings: LoopSettings,
    out: Path,
    progress: Progress,
    *,
    probe: Probe | None = None,
    data: Mapping[str, str] | None = None,
) -> Path:
    """Train a model, or continue from the checkpoint in ``out``, which must have the same settings and data.

    Args:
        model: a causal LM of transformers that accepts a 4-dimensional attention mask and position ids.
        rows: the same stream in every call; a resumed call skips the rows already used.
        settings: hyperparameters.
        out: directory for ``config.json``, ``model.safetensors``, ``pretrain.jsonl`` and the checkpoint.
        progress: shows each line of the log.
        probe: measures the model on held-out data for the log.
        data: description of ``rows``, saved with the checkpoint.
    """
    if is_finished(out, settings.steps):
        return out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings.seed)
    parts = settings.optimizers(model)
    key = {**asdict(settings), **(data or {})}
    first = _load_state(out, model, parts, key)
    batches = islice(_batches(rows, settings), first, None)
    log = _Log(out / "pretrain.jsonl", settings.log_every, progress, first)
    model.train()
    for step in range(first, settings.steps):
        batch = next(batches, None)
        if batch is None:
            raise TrainingError(f"pretraining: out of rows at step {step} of {settings.steps}; add more data")
        log.add(step + 1, _step(model, batch, parts, settings, step))
        if (step + 1) % settings.log_every == 0:
            with suppress(AttributeError, OSError, TypeError):  # without glibc
                ctypes.CDLL(None).malloc_trim(0)  # batches of different shapes fragment the heap
        done = step + 1 == settings.steps
        if probe is not None and ((step + 1) % settings.probe_every == 0 or done):
            model.eval()
            log.write(step + 1, probe(model))
            model.train()
        if (step + 1) % settings.checkpoint_every == 0 or done:
            _save_state(out, model, parts, key, step + 1)
    model.save_pretrained(out)  # at the end: an unfinished build is no model directory
    write_atomically(out / _DONE, json.dumps({"steps": settings.steps}) + "\n")
    (out / _STATE).unlink(missing_ok=True)
    return out


def is_finished(out: Path, steps: int) -> bool:
    """Return True if ``out`` has a policy trained for ``steps`` or more; raise TrainingError if it had fewer steps."""
    done = out / _DONE
    if not done.is_file():
        return False
    before = int(json.loads(done.read_text(encoding="utf-8"))["steps"])
    if before < steps:
        raise TrainingError(
            f"{out} already contains a policy trained for {before} steps, and its training cannot be extended to "
            f"{steps}; choose another directory"
        )
    return True


def adamw(parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return AdamW with the hyperparameters for pretraining."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)


def collate(rows: Sequence[Row]) -> Batch:
    """Pack rows into a batch."""
    packed = pack([(row.prompt, row.targets) for row in rows])
    target_at = [position for by_target in packed.indices for positions in by_target for position in positions]
    labels = [token for row in rows for target in row.targets for token in target]
    return Batch(rows, packed, torch.tensor(target_at), torch.tensor(labels))


def _batches(rows: Iterator[Row], settings: LoopSettings) -> Iterator[Batch]:
    rng = random.Random(f"batches {settings.seed}")
    while pool := sorted(islice(rows, settings.pool_rows), key=len):
        groups: list[list[Row]] = [[]]
        for row in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(row) > settings.batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            yield collate(group)


def _step(
    model: PreTrainedModel, batch: Batch, parts: list[torch.optim.Optimizer], settings: LoopSettings, step: int
) -> dict[str, float]:
    loss = settings.loss(model, batch, step)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    if not torch.isfinite(norm):
        raise TrainingError(f"pretraining: the gradient is not finite at step {step}; reduce lr ({settings.lr})")
    warm = (step + 1) / max(1, settings.warmup_steps)
    left = (settings.steps - step) / max(1.0, settings.steps * (1 - settings.decay_from))
    for part in parts:
        for group in part.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * min(warm, left, 1.0)
        part.step()
        part.zero_grad(set_to_none=True)
    return {"loss": loss.item(), "tokens": float(sum(map(len, batch.rows)))}


def classes_of(model: PreTrainedModel, batch: Batch, settings: LoopSettings, step: int) -> torch.Tensor | None:
    """Return the sorted token ids that a step's softmax covers; None means the whole vocabulary."""
    if not settings.negatives or step >= settings.steps * 5 // 6:
        return None
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    drawn = torch.randint(model.config.vocab_size, (settings.negatives,), generator=generator)
    classes: torch.Tensor = torch.unique(torch.cat([batch.packed.ids.flatten(), batch.target_labels, drawn]))
    return classes


def hidden_states(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the last layer's hidden state at every position, (rows * positions, width)."""
    packed = batch.packed
    mask = packed.mask.to(model.dtype)
    output = model.base_model(packed.ids, attention_mask=mask, position_ids=packed.positions, use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden


def cross_entropy(
    model: PreTrainedModel,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    labels: torch.Tensor,
    classes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean cross entropy at ``positions``. The softmax covers the token ids ``classes`` (None: all)."""
    head = model.get_output_embeddings()
    if classes is None:
        logits = head(hidden[positions])
    else:
        logits = torch.nn.functional.linear(hidden[positions], head.weight[classes])
        labels = torch.searchsorted(classes, labels)
    return torch.nn.functional.cross_entropy(logits.float(), labels)


class _Log:
    """Log of JSON lines; each has the means over the steps since the previous line."""

    def __init__(self, path: Path, every: int, progress: Progress, first: int) -> None:
        self._path, self._every, self._progress = path, every, progress
        self._since: list[Mapping[str, float]] = []
        self._step = 0
        self._cpu = time.process_time()
        # Drop lines after the last checkpoint; they will be written again.
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        lines = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= first]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        self._since.append(figures)
        self._progress.advance(step - self._step)
        self._step = step
        if step % self._every == 0:
            mean = {name: round(fmean(one[name] for one in self._since), 4) for name in figures}
            cpu = time.process_time()
            self.write(step, {**mean, "cpu_s": round(cpu - self._cpu, 1)})
            self._cpu, self._since = cpu, []

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        self._progress.advance(0, **figures)


def _save_state(
    out: Path, model: PreTrainedModel, parts: Sequence[torch.optim.Optimizer], key: Mapping[str, Any], step: int
) -> None:
    state = {"model": model.state_dict(), "optimizers": [part.state_dict() for part in parts]}
    with atomic_file(out / _STATE, "wb") as file:
        torch.save({**state, "random": torch.get_rng_state(), "step": step, "settings": json.dumps(key)}, file)


def _load_state(
    out: Path, model: PreTrainedModel, parts: Sequence[torch.optim.Optimizer], key: Mapping[str, Any]
) -> int:
    """Load the checkpoint into the model and optimizers. Return its number of steps; 0 if there is no checkpoint."""
    if not (out / _STATE).is_file():
        return 0
    state = torch.load(out / _STATE, weights_only=True)
    before, now = json.loads(state["settings"]), json.loads(json.dumps(key))
    check_resumable(out, before, now, otherwise="choose another directory to start over")
    model.load_state_dict(state["model"])
    for part, part_state in zip(parts, state["optimizers"], strict=True):
        part.load_state_dict(part_state)
    torch.set_rng_state(state["random"])
    return int(state["step"])
