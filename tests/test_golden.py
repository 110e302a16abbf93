"""``python -m tests.test_golden DIR`` writes the files of tests/golden anew from a run directory."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq

from tests.first_steps import read_lines, succeeds

GOLDEN = Path(__file__).with_name("golden")
COLUMNS = (
    "question_id", "step", "prompt", "n", "seed", "predictor", "completion", "query", "doc_ids", "scores", "reward",
    "recall", "error", "prompt_tokens", "completion_tokens", "chosen",
)  # fmt: skip
TIMES = {"seconds", "lm_calls_per_second", "created", "versions", "run", "path"}


def rounded(value):
    """JSON values with floats of five digits: BM25's last bits are the machine's."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items() if key not in TIMES}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def contents(run, out):
    out.unlink(missing_ok=True)
    succeeds("store", "export", "--run", run, "--out", out, "--messages")
    samples = read_lines(out)
    pairs = pq.read_table(run / "preferences" / "train.parquet").to_pylist()
    identities = {"state_id", "policy_digest", "chosen_id", "rejected_id"}
    pairs = [{key: value for key, value in row.items() if key not in identities} for row in pairs]
    summary = json.loads((run / "eval" / "summary.json").read_text())
    return {
        "samples.jsonl": [rounded({name: row[name] for name in COLUMNS}) for row in samples],
        "messages.jsonl": [row["messages"] for row in samples if row["chosen"]],
        "preferences.jsonl": [rounded(row) for row in pairs],
        "summary.jsonl": [rounded(row) for row in [*summary["rows"], *summary["comparisons"]]],
    }


def test_a_small_run_equals_the_golden_files(tmp_path):
    run = tmp_path / "run"
    succeeds("sample", "demo", "--run", run, "--set", "data.limit=8")
    systems = "systems=[raw-question, oracle-titles, base, few-shot:1, few-shot:2, few-shot:3]"
    succeeds("eval", "demo", "--run", run, "--set", "limit=12", "--set", systems, "--set", "resamples=200")
    for name, rows in contents(run, tmp_path / "export.jsonl").items():
        assert rows == read_lines(GOLDEN / name), name


if __name__ == "__main__":
    for file_name, found in contents(Path(sys.argv[1]), Path(sys.argv[1]) / "golden-export.jsonl").items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
        (GOLDEN / file_name).write_text(text, encoding="utf-8")
