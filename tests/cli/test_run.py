"""The loop through real stages: it runs, goes on where it was stopped, and ends at once when all is done."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.test_app import ANSI, ROOT, leret


def test_the_whole_loop_runs_goes_on_and_ends_at_once(tmp_path: Path, small: list[str]) -> None:
    run = tmp_path / "r"
    code, out = leret("sample", "sampling/demo.yaml", "--run", run, *small)
    assert code == 0, out
    assert not ANSI.search(out)
    code, out = leret("sample", "sampling/demo.yaml", "--run", run, *small)
    assert (code, "nothing to do" in out) == (0, True)
    code, out = leret("pairs", "--run", run, "--strategy", "all", "--json")
    assert (code, json.loads(out)["strategy"]) == (0, "all")
    code, out = leret("store", "check", "--run", run, "--json")
    assert (code, json.loads(out)["faults"]) == (0, [])
    fast = ["--set", "learning_rate=1e-3", "--set", "require_spread=false"]
    code, out = leret("train", "training/sft.yaml", "--run", run, *fast, "--dry-run")
    assert (code, "examples" in out) == (0, True), out
    code, out = leret("train", "training/sft.yaml", "--run", run, *fast)
    assert code == 0, out
    assert re.search(r"note: \d+ examples made \d steps", out)
    code, out = leret("train", "training/sft.yaml", "--run", run, *fast)
    assert (code, "nothing to do" in out) == (0, True)
    args = ["eval", "eval/demo.yaml", "--run", run, "--set", "limit=5", "--set", "resamples=100"]
    assert re.search(r"lm calls +20\n", leret(*args, "--dry-run")[1])  # base and sft, 5 questions, 2 hops
    code, out = leret(*args)
    assert code == 0, out
    rows = json.loads((run / "eval" / "summary.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["raw-question", "oracle-titles", "base", "sft"]
    assert all(row["system"] in out for row in rows)
    assert "nothing to do" in leret(*args)[1]
    assert json.loads(leret(*args, "--json")[1]) == json.loads((run / "eval" / "summary.json").read_text())
    by_hop = leret(*args, "--all")[1]
    assert "bridge" not in out
    assert re.search(r"^ sft +1( +\d\.\d{3}){4}$\n^ sft +2( +\d\.\d{3}){4} +\d+\.\d$", by_hop, re.MULTILINE), by_hop


def test_the_demo_leaves_a_table_a_report_and_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sampling", "training", "eval", "pipelines"):
        shutil.copytree(ROOT / name, tmp_path / name)
    changes = {
        "sampling/demo.yaml": {"split: train": "split: train\n  limit: 30", "prompts: 4": "prompts: 1"},
        "eval/demo.yaml": {"limit: null": "limit: 5", "resamples: 10000": "resamples: 100"},
    }
    for name, lines in changes.items():
        text = (tmp_path / name).read_text()
        for old, new in lines.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)  # recipes here come before the shipped ones
    code, out = leret("demo", "--seed", "1")
    assert code == 0, out
    rows = json.loads(Path("runs/demo/eval/summary.json").read_text())["rows"]
    assert {row["system"] for row in rows} == {"raw-question", "oracle-titles", "base", "sft", "ipo", "sft-more"}
    assert Path("runs/demo/report.html").is_file()
    assert Path("runs/demo/program/policy.json").is_file()
