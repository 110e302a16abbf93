import random
import shutil

import pytest

from leret.core.runs import Run
from leret.sampling.stage import sample
from leret.training.rounds.update import RolloutBatch
from tests.datasets.writing import json_lines
from tests.sampling.fakes import ROOT, unsampled_run
from tests.tiny import tiny_policy
from tests.training import stories
from tests.training.training_runs import LETTERS, sampled_run, train_ids, world_recipe


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("base") / "policy")


@pytest.fixture(scope="session")
def sampled_once(tmp_path_factory, base):
    return sampled_run(tmp_path_factory.mktemp("sampled") / "run", base)


@pytest.fixture
def run(tmp_path, sampled_once):
    return Run.open(shutil.copytree(sampled_once.path, tmp_path / "run"))


@pytest.fixture
def picking_run(tmp_path):
    """A run of 24 questions, not sampled; each names one of eight chunks, and that one names the other to pick."""
    rng = random.Random(0)
    rows = []
    for id in train_ids(24):
        words = rng.sample(LETTERS, 10)
        order = rng.sample(range(8), 8)
        chunks = [f"{words[i]} leads to {words[i + 1]}" for i in order]
        support = [order.index(0), order.index(1)]
        rows.append({"id": id, "question": f"from {words[0]}", "chunks": chunks, "support": support, "answer": ""})
    json_lines(tmp_path / "q.jsonl", rows)
    section = {
        "data": {"kind": "chunks", "questions": f"{tmp_path}/q.jsonl", "split": "train"},
        "policy": {"kind": "features", "features": f"{stories.__name__}:numbers"},
        "retriever": {"kind": "none"},
        "program": {"path": f"{ROOT}/pipelines/picks.py:Picks", "budget": 2},
        "sampling": {"reward": "recall", "prompts": 1},
    }
    return unsampled_run(tmp_path / "run", section)


@pytest.fixture
def dialogue_run(tmp_path):
    """A run of ten personas, not sampled, with a picker over numbers and the policy demo."""
    section = {
        "data": {"kind": "personas", "options": {"n_train": 10, "n_dev": 1, "n_test": 2, "turns": 2}},
        "policy": {"kind": "local", "model": "demo", "max_tokens": 8},
        "policies": {"pick": {"kind": "features", "features": f"{stories.__name__}:overlaps"}},
        "retriever": {"kind": "bm25", "k": 4},
        "program": {"path": f"{ROOT}/pipelines/dialogue.py:Dialogue", "k": 4, "adapter": {"kind": "compact"}},
        "sampling": {"reward": "f1", "credit": "final", "prompts": 1, "samples": 2},
    }
    return unsampled_run(tmp_path / "run", section)


@pytest.fixture
def learnt(monkeypatch):
    pairs, of = [], RolloutBatch.of
    batch_of = lambda sequences, *more: pairs.extend(sequences) or of(sequences, *more)  # noqa: E731
    monkeypatch.setattr("leret.training.rounds.writing.RolloutBatch.of", batch_of)
    return pairs


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """A run of the demo's policy on a few questions of its world, under a copy of the program."""
    directory = tmp_path_factory.mktemp("parity")
    shutil.copy(ROOT / "pipelines/multihop.py", directory / "multihop.py")
    run = Run.create(directory / "run")
    assert sample(world_recipe(f"{directory}/multihop.py:MultiHop", limit=6, samples=6), run).pairs > 0
    return run
