"""`leret sample`: flags that do not go together, dry runs, bad lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.test_app import leret
from tests.datasets.writing import json_lines


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--workers", "2"], "--engine ray; add it"), (["--address", "auto"], "--engine ray; add it"),
     (["--engine", "ray"], "requires --workers"),
     (["--engine", "ray", "--workers", "2", "--shard", "0/2"], "leave --shard"),
     (["--shard", "2/2", "--set", "data.limit=2"], "2/2")],
)  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(tmp_path: Path, flags: list[str], says: str) -> None:
    code, out = leret("sample", "demo", "--run", tmp_path / "r", *flags)
    assert (code, says in out) == (2, True), out


def test_a_dry_run_tells_the_calls_and_writes_nothing(tmp_path: Path, small: list[str]) -> None:
    code, out = leret("sample", "sampling/demo.yaml", "--run", tmp_path / "r", "--dry-run", *small)
    assert code == 0
    assert re.search(r"lm calls +24\n", out)  # 6 questions, 2 hops, 1 prompt, 2 samples
    assert not (tmp_path / "r").exists()


def test_bad_lines_of_the_data_are_left_out_by_a_flag_of_sample(tmp_path: Path, small: list[str]) -> None:
    corpus, questions = tmp_path / "c.jsonl", tmp_path / "q.jsonl"
    json_lines(corpus, [{"doc_id": "d", "title": "T", "text": "words"}])
    json_lines(questions, [{"id": "q", "question": "Who?", "relevant_doc_ids": ["d"]}, {"id": 3}])
    data = f"data={{kind: jsonl, questions: {questions}, corpus: {corpus}, split: all}}"
    args = ["sample", "demo", "--run", tmp_path / "r", "--dry-run", "--set", data, *small]
    code, out = leret(*args)
    assert (code, "--skip-invalid" in out) == (2, True)
    code, out = leret(*args, "--skip-invalid", "--json")
    assert (code, json.loads(out)["questions"]) == (0, 1)
