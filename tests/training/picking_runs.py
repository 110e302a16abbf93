"""A run with a program that picks two of eight chunks: the question names one, and that one names the other."""

from __future__ import annotations

import json
import random

from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from tests.sampling.fakes import ROOT
from tests.training import stories
from tests.training.training_runs import LETTERS, train_ids


def picking_run(tmp_path) -> Run:
    """Return a run that was not sampled, with 24 questions."""
    rng = random.Random(0)
    rows = []
    for id in train_ids(24):
        words = rng.sample(LETTERS, 10)
        order = rng.sample(range(8), 8)
        chunks = [f"{words[i]} leads to {words[i + 1]}" for i in order]
        support = [order.index(0), order.index(1)]
        rows.append({"id": id, "question": f"from {words[0]}", "chunks": chunks, "support": support, "answer": ""})
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {
        "data": {"kind": "chunks", "questions": f"{tmp_path}/q.jsonl", "split": "train"},
        "policy": {"kind": "features", "features": f"{stories.__name__}:numbers"},
        "retriever": {"kind": "none"},
        "program": {"path": f"{ROOT}/pipelines/picks.py:Picks", "budget": 2},
        "sampling": {"reward": "recall", "prompts": 1},
    }
    recipe = SamplingRecipe.model_validate(section)
    made = Run.create(tmp_path / "run")
    made.update(sampling=recipe.model_dump(mode="json"))
    made.held_out.write_text("[]")
    return made
