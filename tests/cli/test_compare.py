import json

from tests.evaluation.report.runs_fakes import evaluated
from tests.first_steps import refused, succeeds


def test_runs_are_compared_in_every_form(tmp_path):
    run = evaluated(tmp_path / "r_1", {"base": [0.0, 1.0, 0.5], "ipo": [1.0, 1.0, 0.5]}).path
    assert "ipo - base" in succeeds("compare", run)
    assert "| ipo - base | 0.333" in succeeds("compare", run, "--form", "markdown")
    assert r"\end{tabular}" in succeeds("compare", run, "--form", "latex")
    [row] = json.loads(succeeds("compare", run, "--json"))["comparisons"]
    assert (row["n"], row["difference"]) == (3, 0.333333)
    assert "k is" not in refused("compare", run, "--measure", "f1")


def test_runs_are_listed_in_every_form(tmp_path):
    evaluated(tmp_path / "r_1", {"base": [0.0], "ipo": [1.0]})
    assert "r_1" in succeeds("runs", tmp_path)
    assert r"r\_1 & " in succeeds("runs", tmp_path, "--form", "latex")
    [row] = json.loads(succeeds("runs", tmp_path, "--json"))["runs"]
    assert row["figures"] == {"measure": "recall", "systems": {"ipo": 1.0, "base": 0.0}}
    refused("runs", tmp_path / "none")


def test_the_list_of_runs_shows_the_figures_at_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    scores = {"base": [0.0], "a-picker-of-names": [1.0]}
    path = evaluated(tmp_path / "a-run-of-a-long-name", scores).path
    (path / "policies/a-picker-of-names").mkdir(parents=True)
    (path / "policies/a-picker-of-names/training.json").write_text("{}")
    out = succeeds("runs", tmp_path)
    assert "recall: a-picker-of-names 1.000, base 0.000" in out


def test_a_comparison_explains_its_columns(tmp_path):
    run = evaluated(tmp_path / "r", {"base": [0.0, 1.0], "ipo": [1.0, 1.0]}).path
    assert "effect size: the mean difference divided by" in " ".join(succeeds("compare", run).split())
