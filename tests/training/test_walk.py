"""Bars on the files and calls of leret that a training passes, counted like benchmarks/walk.py."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import leret
from leret.config.sampling import SamplingRecipe
from leret.core.runs import Run
from leret.rollouts.environment import Environment
from leret.sampling.stage import sample
from leret.training.algorithms.grpo import GRPORecipe
from leret.training.algorithms.preference import IPORecipe
from leret.training.online.writing import WriterLearner
from leret.training.stage import train

PACKAGE = str(Path(leret.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
RECIPE = {
    "data": {"kind": "world", "options": {"n_train": 20, "n_dev": 5, "n_test": 5}, "limit": 6},
    "policy": {"kind": "local", "model": "demo", "max_tokens": 12},
    "program": {
        "path": f"{Path(__file__).parents[2]}/pipelines/multihop.py:MultiHop",
        "adapter": {"kind": "compact"},
    },
    "sampling": {"prompts": 1, "samples": 6},
}


@contextmanager
def calls():
    """Collect (file, function) of leret's calls in this thread."""
    walk = []

    def see(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            walk.append((code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname))

    sys.setprofile(see)
    try:
        yield walk
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    run = Run.create(tmp_path_factory.mktemp("walk") / "run")
    sample(SamplingRecipe.model_validate(RECIPE), run)
    return run


def test_a_training_by_ipo_passes_few_files_and_calls(world, monkeypatch):
    opened, open_ = [], Environment.open
    monkeypatch.setattr(Environment, "open", lambda run: opened.append(run) or open_(run))
    with calls() as walk:
        train(IPORecipe(), world)
    assert len({file for file, _ in walk}) <= 34
    assert len(walk) <= 1500
    assert len(opened) == 1


def test_an_update_by_grpo_passes_six_files(world, monkeypatch):
    learn, files = WriterLearner.learn, []

    def counted(self, sampled, number):
        with calls() as walk:
            entry = learn(self, sampled, number)
        files.append({file for file, _ in walk})
        return entry

    monkeypatch.setattr(WriterLearner, "learn", counted)
    train(GRPORecipe(max_steps=2, questions_per_round=4, max_completion_length=12, learning_rate=1e-3), world)
    assert max(map(len, files)) <= 6, files
