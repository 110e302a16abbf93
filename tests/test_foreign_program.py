"""A program file that leret does not ship goes through the whole loop by its path alone."""

import json
from pathlib import Path

import dspy
import pytest
from typer.testing import CliRunner

import leret
from leret.cli.app import app

PROGRAM = Path(__file__).parent / "programs/threehop.py"
SAMPLING = f"""
data:
  kind: world
  seed: 5
  limit: 12
  options: {{n_train: 40, n_dev: 10, n_test: 20, comparison: 0.0, three_hop: 1.0}}
retriever: {{kind: bm25, k: 2}}
policy: {{model: demo, max_tokens: 12}}
program: {{path: "{PROGRAM}:ThreeHop", breadth: 2, adapter: {{kind: compact}}}}
sampling: {{prompts: 1, samples: 4}}
"""
TRAINING = (
    "{algorithm: sft, num_train_epochs: 1, learning_rate: 1.0e-3, per_device_train_batch_size: 8, max_length: 512}"
)
EVALUATION = "{split: test, systems: [raw-question, base, policies], resamples: 200}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    for name, text in (("s", SAMPLING), ("t", TRAINING), ("e", EVALUATION)):
        (folder / f"{name}.yaml").write_text(text)
    directory = folder / "run"
    for command in ("sample", "train", "eval"):
        result = CliRunner().invoke(app, [command, str(folder / f"{command[0]}.yaml"), "--run", str(directory)])
        assert result.exit_code == 0, result.output
    return directory


def test_three_hops_are_evaluated(run):
    summary = json.loads((run / "eval/summary.json").read_text())
    assert {row["system"] for row in summary["rows"]} == {"raw-question", "base", "sft"}
    assert all(len(row["hops"]) == 3 for row in summary["rows"])


def test_both_predictors_are_sampled(run):
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(run / "preferences/train.parquet")
    assert set(table["predictor"].to_pylist()) == {"first", "then"}


def test_it_is_loaded_back_by_path(run):
    program = leret.load(run / "program")
    prediction = program(claim="In which city was the director of the film The Silent Harbor born?")
    assert prediction.titles
    assert isinstance(program, dspy.Module)
