"""A picker in training from a run to a directory, whatever stops it on the way."""

import json
import signal
import subprocess
import sys

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from leret.core.errors import PolicyError, TrainingError
from leret.training.algorithms.grpo import GRPORecipe
from leret.training.algorithms.pick import PickRecipe
from leret.training.algorithms.pqn import PQNRecipe
from leret.training.stage import estimate, train
from tests.sampling.fakes import ROOT
from tests.training.picking_runs import picking_run
from tests.training.training_runs import changed

SMALL = {"questions_per_round": 8, "save_steps": 2, "logging_steps": 1, "learning_rate": 2e-2, "device": "cpu"}
PICK = PickRecipe(**SMALL, num_generations=4, num_train_epochs=6, temperature=1.0)
PQN = PQNRecipe(
    **SMALL, num_train_epochs=12, num_mini_batches=2, learning_starts=2, temperature=0.1, lr_scheduler_type="constant",
    min_lr_rate=0.0,
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return picking_run(tmp_path)


def record(report):
    return json.loads((report.path / "training.json").read_text())


def bits(report):
    weights = load_file(report.path / "model.safetensors")
    return {name: weight.numpy().tobytes() for name, weight in weights.items()}, record(report)["log_history"]


KILLED = """
import os, signal, sys
from pathlib import Path
from leret.core.runs import Run
from leret.training.stage import train
from tests.training.online.test_picking import PQN
from tests.training.training_runs import Stopper
stopper = Stopper(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
train(PQN, Run.open(Path(sys.argv[1])), progress=stopper)
"""


def test_a_killed_training_that_goes_on_ends_in_the_same_bits(run):
    command = [sys.executable, "-c", KILLED, str(run.path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    resumed = train(PQN, run)
    assert resumed.resumed_from == 4
    assert bits(resumed) == bits(train(changed(PQN, name="straight"), run))


def test_a_training_goes_on_from_a_trained_picker(run):
    train(changed(PICK, name="first", max_steps=2), run)
    again = changed(PICK, name="second", init_from="first", max_steps=1)
    assert estimate(again, run).steps == 1
    assert estimate(changed(again, limit=5), run).examples == 5
    assert train(again, run).total_steps == 3
    with pytest.raises(TrainingError, match="init_from: 'third'"):
        train(changed(PICK, init_from="third"), run)
    changed_picker = sorted((run.policies / "first").rglob("*.safetensors"))[-1]
    weights = load_file(changed_picker)
    save_file({name: weight + 1 for name, weight in weights.items()}, changed_picker)
    with pytest.raises(PolicyError, match="than its training wrote"):
        train(changed(again, name="third"), run)


@pytest.mark.parametrize("keys", [{"lora": {"r": 4}}, {"dtype": "bfloat16"}, {"lr_scheduler_type": "linear"}])
def test_keys_without_a_use_for_pickers_are_refused(keys):
    with pytest.raises(ValidationError, match=f"{next(iter(keys))}|min_lr_rate"):
        PQNRecipe(**keys)


def test_what_writes_is_no_picker_and_the_other_way_round(run):
    with pytest.raises(PolicyError, match="with a picker"):
        train(GRPORecipe(), run)
    section = run.section("sampling", "")
    run.update(sampling={**section, "policy": {"kind": "local", "model": "demo"}})
    with pytest.raises(TrainingError, match="kind local"):
        train(PICK, run)
