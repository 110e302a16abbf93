"""Build the demo's policy from scratch (``python -m models demo``) and write its model card.

The model has a million parameters and a vocabulary of whole words. It is trained on rows from generated worlds.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import torch
from transformers import PreTrainedModel

from leret.core.progress import Progress
from models.gate import GATE_SEED, make_gate
from models.pretrain.loop import Batch, LoopSettings, adamw, cross_entropy, hidden_states, train
from models.words import build_model, build_tokenizer
from models.worlds import StreamSettings, rows

_FIRST_PART = ".first"


@dataclass(frozen=True)
class ScratchSettings(LoopSettings):
    """Settings of the loop, with Muon for the layers' matrices and a loss on the prompt's tokens."""

    matrix_lr: float = 0.02  # peak rate of Muon
    prompt_weight: float = 0.0  # weight of the loss on the prompt's tokens; the targets' loss has weight 1

    def optimizers(self, model: PreTrainedModel) -> list[torch.optim.Optimizer]:
        """Return AdamW and Muon. Muon skips the embedding and the head, whose rows are separate vectors."""
        ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in ends]
        ids = {id(p) for p in matrices}
        rest = (p for p in model.parameters() if id(p) not in ids)
        return [adamw(rest, self.lr), torch.optim.Muon(matrices, lr=self.matrix_lr, weight_decay=0.0)]

    def loss(self, model: PreTrainedModel, batch: Batch, step: int) -> torch.Tensor:
        hidden = hidden_states(model, batch)
        positions: list[int] = []
        for row, by_target in zip(batch.rows, batch.packed.indices, strict=True):
            last = by_target[0][0]
            positions += range(last - len(row.prompt) + 1, last)
        labels = torch.tensor([token for row in batch.rows for token in row.prompt[1:]])
        prompt = cross_entropy(model, hidden, torch.tensor(positions), labels)
        return cross_entropy(model, hidden, batch.target_at, batch.target_labels) + self.prompt_weight * prompt


_FIRST = ScratchSettings(
    steps=3000,
    lr=6e-3,
    matrix_lr=0.04,
    batch_tokens=2048,
    warmup_steps=30,
    decay_from=0.5,
    prompt_weight=0.2,
    checkpoint_every=250,
    log_every=50,
    probe_every=250,
)
SECOND = replace(
    _FIRST,
    steps=2200,
    lr=5e-3,
    matrix_lr=0.03,
    decay_from=0.7,
    prompt_weight=0.1,
    checkpoint_every=200,
    probe_every=200,
)
_LOOKING_UP_ROWS = 26_000
"""Rows in the second part, before the final mixture, that teach looking up names."""

_HOP1 = {"copy": 0.25, "generic": 0.4, "keywords": 0.2, "entity": 0.15}
_LOOKING_UP = StreamSettings(
    uses=1,
    lists=(0.05, 0.05),
    constant_after=1,
    demos=(0.1, 0.1),
    hop1=_HOP1,
    hop2={"mention_near": 0.9, "mention_random": 0.05, "title": 0.05},
)
MIXED = replace(
    _LOOKING_UP,
    demos=(0.4, 0.6),
    hop2={
        "title": 0.15,
        "copy": 0.1,
        "keywords": 0.08,
        "entity": 0.07,
        "generic": 0.08,
        "mention_near": 0.4,
        "mention_random": 0.12,
    },
)


def pretrain_scratch(out: Path, progress: Progress, *, seed: int = 0, steps: int | None = None) -> Path:
    """Build the demo's tiny policy in ``out``, or continue; ``steps`` defaults to the shipped policy's."""
    from transformers import AutoModelForCausalLM

    both = _FIRST.steps + SECOND.steps
    steps = steps or both
    share = steps / both
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(out)
    gate = make_gate(tokenizer)
    first = replace(_FIRST, steps=max(1, round(_FIRST.steps * share)), seed=seed)
    model = build_model(len(tokenizer), seed)
    train(model, rows(tokenizer, StreamSettings(seed=seed)), first, out / _FIRST_PART, progress, probe=gate)
    second = replace(SECOND, steps=max(1, steps - first.steps), seed=seed + 1)
    model = AutoModelForCausalLM.from_pretrained(out / _FIRST_PART, dtype="float32")
    looking_up = islice(rows(tokenizer, replace(_LOOKING_UP, seed=seed + 1)), round(_LOOKING_UP_ROWS * share))
    stream = chain(looking_up, rows(tokenizer, replace(MIXED, seed=seed + 2)))
    train(model, stream, second, out, progress, probe=gate)
    shutil.copyfile(out / _FIRST_PART / "pretrain.jsonl", out / "pretrain-first.jsonl")
    (out / "README.md").write_text(
        _card(out, seed, steps, sum(p.numel() for p in model.parameters())), encoding="utf-8"
    )
    return out


def training_facts(*logs: Path, measure: str = "bridge", every: int = _FIRST.log_every) -> tuple[str, str]:
    """Return the training cost and a table of the final measures, for a model card."""
    lines = [json.loads(line) for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
    figures = [line for line in lines if measure in line][-1]
    minutes = sum(line.get("cpu_s", 0.0) for line in lines) / 60
    tokens = sum(line.get("tokens", 0.0) for line in lines) * every / 1e6
    rows = [f"| {name} | {figures[name]} |" for name in figures if name != "step"]
    cost = f"{tokens:.1f} million tokens, {minutes:.0f} CPU-minutes on one thread"
    return cost, "\n".join(["| measure | |", "|--|--|", *rows])


def _card(out: Path, seed: int, steps: int, n_parameters: int) -> str:
    cost, measured = training_facts(out / "pretrain-first.jsonl", out / "pretrain.jsonl")
    return f"""# A tiny search policy for `leret demo`

A causal language model (Qwen3, {n_parameters:,} parameters, float32) that writes a search query for a question and the
passages found so far. It knows the words of leret's generated worlds and nothing else; any other word is `<|unk|>`,
which it never writes. It is made to be mediocre and diverse: reward teaches it the rest.
A pair of heads that copies is written into its layers before training (`models.words`).

Made by `python -m models demo` from nothing: seed {seed}, {steps} steps,
{cost}. Its worlds have seeds from {10**6 * (seed + 1)} on. What it was shown
are queries by noisy rules that see the question and the passages and never a gold document: first in many styles, then
mostly names looked up in the passages, at last the mixture that it ends with. The logs are `pretrain-first.jsonl` and
`pretrain.jsonl`.

At bridge questions of the held-out world {GATE_SEED} whose bridge stands in the context (what each figure is:
`models.gate`):

{measured}
"""
