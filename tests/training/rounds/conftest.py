import random

import pytest

from tests.datasets.writing import json_lines
from tests.sampling.fakes import recipe_of, unsampled_run
from tests.training.training_runs import LETTERS, train_ids


@pytest.fixture
def run(tmp_path, base):
    return online_run(tmp_path, base)


def online_run(tmp_path, base):
    """Begun, and not sampled: 12 questions, with so many gold documents that words at random find some."""
    rng = random.Random(0)
    texts = {word: " ".join(rng.sample(LETTERS, 12)) for word in LETTERS}
    json_lines(tmp_path / "c.jsonl", [{"doc_id": w, "title": w, "text": text} for w, text in texts.items()])
    asked = [(id, rng.sample(LETTERS, 50)) for id in train_ids(12)]
    rows = [{"id": id, "question": f"{w[0]} and {w[1]} ?", "answer": "", "relevant_doc_ids": w} for id, w in asked]
    json_lines(tmp_path / "q.jsonl", rows)
    data = {"corpus": f"{tmp_path}/c.jsonl", "questions": f"{tmp_path}/q.jsonl", "split": "train"}
    recipe = recipe_of(data=data, policy={"model": str(base), "max_tokens": 6}, prompts=1)
    return unsampled_run(tmp_path / "run", recipe)
