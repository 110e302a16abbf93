"""The demo's policy from nothing: `leret pretrain sampling/demo.yaml`.

A word vocabulary, a fresh model of a million parameters, rows from generated worlds, the loop, and a model card.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from leret.training.pretrain.gate import GATE_SEED, make_gate
from leret.training.pretrain.loop import LoopSettings, train
from leret.training.pretrain.words import build_model, build_tokenizer
from leret.training.pretrain.worlds import StreamSettings, rows

__all__ = ["STEPS_PER_MINUTE", "pretrain_scratch"]

STEPS_PER_MINUTE = 220
"""Steps in a CPU-minute of one thread of a 2024 server core."""

_LOOP = LoopSettings(
    steps=3000,
    optimizer="muon",
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


def pretrain_scratch(
    out: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    minutes: float | None = None,
    progress: Callable[[int, Mapping[str, float]], None] | None = None,
) -> Path:
    """Build the tiny policy of the demo, or go on building it.

    Args:
        out: directory of the model; a run that was stopped there goes on, with the same arguments.
        seed: of the weights, the worlds and the order of the rows.
        steps: optimizer steps; None for what ``minutes`` allows, or for as many as the shipped policy had.
        minutes: CPU-minutes, one thread; the schedule is scaled to it by :data:`STEPS_PER_MINUTE`.
        progress: called with the step and its figures at every line of the log.

    Returns:
        ``out``: ``config.json``, ``model.safetensors``, the tokenizer, ``pretrain.jsonl`` and ``README.md``.

    Raises:
        TrainingError: ``out`` holds pretraining with other settings, or training diverged.
    """
    if steps is None:
        steps = _LOOP.steps if minutes is None else max(1, round(minutes * STEPS_PER_MINUTE))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(out)
    model = build_model(len(tokenizer), seed)
    settings = replace(_LOOP, steps=steps, seed=seed)
    stream = rows(tokenizer, StreamSettings(seed=seed))
    train(model, stream, settings, out, probe=make_gate(tokenizer), progress=progress)
    (out / "README.md").write_text(_card(out, settings, sum(p.numel() for p in model.parameters())), encoding="utf-8")
    return out


def _card(out: Path, settings: LoopSettings, n_parameters: int) -> str:
    """The model card: what it is, how it was made, what was measured at the end."""
    lines = [json.loads(line) for line in (out / "pretrain.jsonl").read_text(encoding="utf-8").splitlines()]
    figures = [line for line in lines if "bridge" in line][-1]
    minutes = sum(line.get("cpu_s", 0.0) for line in lines) / 60
    tokens = sum(line.get("tokens", 0.0) for line in lines) * settings.log_every / 1e6
    measured = "\n".join(f"| {name} | {figures[name]} |" for name in figures if name != "step")
    return f"""# A tiny search policy for `leret demo`

A causal language model (Qwen3, {n_parameters:,} parameters, float32) that writes a search query for a question and the
passages found so far. It knows the words of leret's generated worlds and nothing else; any other word is `<|unk|>`,
which it never writes. It is made to be mediocre and diverse: reward teaches it the rest.

Made by `leret pretrain sampling/demo.yaml` from nothing: seed {settings.seed}, {settings.steps} steps, {tokens:.1f}
million tokens, {minutes:.0f} CPU-minutes on one thread. Its worlds have seeds from {10**6 * (settings.seed + 1)} on.
What it was shown are queries by noisy rules that see the question and the passages and never a gold document. The log
is `pretrain.jsonl`.

At bridge questions of the held-out world {GATE_SEED} whose bridge stands in the context (what each figure is:
`leret.training.pretrain.gate`):

| measure | |
|--|--|
{measured}
"""
