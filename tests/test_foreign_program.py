import json
from pathlib import Path

import pyarrow.parquet

import leret
from tests.first_steps import succeeds

PROGRAM = Path(__file__).parent / "programs/threehop.py"
RECIPES = {
    "sample": f"""
data: {{kind: world, seed: 5, limit: 12, options: {{n_train: 40, n_dev: 10, n_test: 20, comparison: 0, three_hop: 1}}}}
retriever: {{kind: bm25, k: 2}}
policy: {{model: demo, max_tokens: 12}}
program: {{path: "{PROGRAM}:ThreeHop", breadth: 2, adapter: {{kind: compact}}}}
sampling: {{prompts: 1, samples: 4}}
""",
    "train": "{algorithm: sft, num_train_epochs: 1, learning_rate: 1.0e-3, max_length: 512}",
    "eval": "{split: test, systems: [raw-question, base, policies], resamples: 200}",
}  # fmt: skip


def test_it_is_sampled_trained_evaluated_and_loaded_back(tmp_path):
    run = tmp_path / "run"
    for command, recipe in RECIPES.items():
        (tmp_path / "recipe.yaml").write_text(recipe)
        succeeds(command, tmp_path / "recipe.yaml", "--run", run)
    rows = json.loads((run / "eval/summary.json").read_text())["rows"]
    assert {row["system"]: len(row["hops"]) for row in rows} == {"raw-question": 3, "base": 3, "sft": 3}
    sampled = pyarrow.parquet.read_table(run / "preferences/train.parquet")["predictor"]
    assert set(sampled.to_pylist()) == {"first", "then"}
    program = leret.load(run / "program")
    assert program(claim="In which city was the director of the film The Silent Harbor born?").titles
