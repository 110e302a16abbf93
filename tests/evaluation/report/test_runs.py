import json

from leret.evaluation.report.runs import list_runs, table
from tests.evaluation.report.runs_fakes import evaluated, sampled

SCORES = {"base": [0.0, 1.0], "ipo": [1.0, 1.0]}


def train(run, name):
    (run.policies / name).mkdir(parents=True)
    (run.policies / name / "training.json").write_text(json.dumps({"algorithm": "grpo"}))


def finish_sampling(run):
    report = {"policy": "demo", "questions": 1200, "samples": 9600}
    (run.path / "sample.done").write_text(json.dumps({"report": report}))
    return run


def test_runs_of_all_subdirectories_are_listed_with_state_and_figures(tmp_path):
    sampled(tmp_path / "a")
    runs = {name: finish_sampling(evaluated(tmp_path / name, SCORES)) for name in ("c", "deep/d", "deep/e")}
    train(runs["c"], "ipo")
    train(runs["deep/d"], "grpo")
    runs["deep/e"].manifest_path.write_text("schema: 1\n")
    run = finish_sampling(sampled(tmp_path / "f"))
    train(run, "ipo")
    (run.policies / "next").mkdir()
    listed = list_runs(tmp_path)
    assert {row["run"]: row["state"] for row in listed} == {
        f"{tmp_path}/a": "sampling unfinished",
        f"{tmp_path}/c": "evaluated",
        f"{tmp_path}/deep/d": "not evaluated: grpo",
        f"{tmp_path}/deep/e": "unreadable",
        f"{tmp_path}/f": "training unfinished: next",
    }
    columns, rows = table(listed)
    values = dict(zip(columns, next(row for row in rows if row[0].endswith("c")), strict=True))
    assert values["sampled"] == "1,200 questions, 9,600 samples"
    assert (values["trained"], values["main figures"]) == ("ipo", "recall: ipo 1.000, base 0.500")
