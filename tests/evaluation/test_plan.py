import json
import os
from pathlib import Path

import dspy
import pytest
from pydantic import ValidationError

from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.evaluation.plan import estimate
from leret.evaluation.results import read_rows
from leret.evaluation.stage import evaluate
from leret.extras.tantivy import TantivySettings
from leret.programs.load import load_program
from leret.viewer.report import write_report
from tests.evaluation.eval_fakes import asks, train
from tests.first_steps import edit

SMALL = asks("raw-question")
BASE = asks("raw-question", "base", limit=4)


def but(recipe, **keys):
    return recipe.model_copy(update=keys)


def test_changed_questions_and_temperatures_want_a_name_and_a_seed_only_where_it_is_warm(run, tmp_path):
    evaluate(SMALL, run)
    warm = but(SMALL, temperature=0.7)
    with pytest.raises(RunError, match=r"(?s)temperature: 0\.0 in the run.*evaluation="):
        evaluate(warm, run)
    assert evaluate(but(warm, evaluation="warm"), run).asked == SMALL.systems
    with pytest.raises(RunError, match=r"(?s)eval/warm .*seed: 0 in the run"):
        evaluate(but(warm, evaluation="warm", seed=1), run)
    assert evaluate(SMALL, run).already
    assert not evaluate(but(SMALL, seed=1), run).asked
    edit(tmp_path / "questions.jsonl", '"relevant_doc_ids": ["alpha", "beta"]', '"relevant_doc_ids": ["alpha"]')
    with pytest.raises(RunError, match=r"(?s)questions: its content.*--set evaluation="):
        evaluate(SMALL, run)


def test_splits_lie_side_by_side_and_the_program_is_that_of_the_runs_own_test_questions(run):
    def delivered():
        return json.loads((run.program / "program.json").read_text())["lms"][0]["policy"]["model"]

    train(run, "mine", 1)
    recipes = but(BASE, split="dev"), but(BASE, systems=("raw-question", "base", "mine"))
    dev = evaluate(recipes[0], run, report=write_report)
    assert not delivered().endswith("policies/mine")  # of the only evaluation that there is
    test = evaluate(recipes[1], run, report=write_report)
    assert (test.path, test.page) == (run.eval / "summary.json", run.report)
    assert (dev.path, dev.page) == (run.eval / "dev/summary.json", run.eval / "dev/report.html")
    assert (test.summary["name"], dev.summary["name"]) == (None, "dev")
    assert "dev" in dev.page.read_text()
    for name in ("qrels.trec", "raw-question/run.trec"):
        assert (run.eval / name).read_text() != "" != (run.eval / "dev" / name).read_text()
    test.page.unlink()
    assert all(evaluate(recipe, run, report=write_report).already for recipe in recipes)
    assert test.page.is_file()  # written again
    evaluate(but(recipes[0], resamples=30), run)
    assert delivered().endswith("policies/mine")


def test_files_that_were_touched_or_lost_cost_no_call_and_a_damaged_one_is_refused(run, tmp_path):
    evaluate(BASE, run)
    for change, name in ((os.utime, "program.py"), (os.utime, "corpus.jsonl"), (os.utime, "questions.jsonl"),
                         (Path.unlink, "run/program/program.json"), (Path.unlink, "run/eval/qrels.trec")):  # fmt: skip
        change(tmp_path / name)
        report = evaluate(BASE, run)
        assert (report.already, report.asked, (tmp_path / name).is_file()) == (False, (), True)
    assert evaluate(BASE, run).already
    path = run.eval / "base/per_question.parquet"
    path.write_bytes(b"junk")
    with pytest.raises(RunError, match=f"{path} cannot be read"):
        evaluate(BASE, run)


def test_the_name_follows_from_split_and_questions_and_is_one_directory():
    files = None, "/data/v1.2-hard.jsonl.gz", "a.csv.gz"
    assert [EvalRecipe(questions=file).evaluation_name for file in files] == [None, "v1.2-hard", "a"]
    assert EvalRecipe(split="all", questions="hard.jsonl").evaluation_name == "all-hard"
    for name in ("../x", "", "a/b", ".x"):
        with pytest.raises(ValueError, match="evaluation"):
            EvalRecipe(evaluation=name)


def test_an_evaluation_and_a_system_share_no_directory(run):
    with pytest.raises(ConfigError, match="evaluation: 'base' names both a system"):
        evaluate(but(SMALL, evaluation="base"), run)
    evaluate(but(SMALL, evaluation="mine"), run)
    train(run, "mine", 1)
    with pytest.raises(ConfigError, match="evaluation: 'mine' names both a system"):
        evaluate(SMALL, run)


def test_a_run_names_no_path_of_the_machine_and_moves_with_its_data(run, tmp_path):
    first = evaluate(BASE, run, report=write_report)
    texts = [run.manifest_path, run.report, *run.program.iterdir(), *run.path.rglob("*.json"), *run.path.rglob("*.md")]
    assert not [path for path in texts if str(tmp_path) in path.read_text()]
    assert "path: $RUN/../program.py:MultiHop" in run.manifest_path.read_text()
    assert run.manifest.sampling["data"]["corpus"] == f"{tmp_path}/corpus.jsonl"
    moved = tmp_path.rename(f"{tmp_path}-moved")
    again = evaluate(BASE, Run.open(moved / "run"))
    assert (again.asked, again.summary["rows"]) == ((), first.summary["rows"])


def test_one_table_has_the_same_systems_on_several_retrievers(run):
    pair = [{"kind": "bm25", "k1": 0.5}, {"kind": "tantivy"}]
    recipe = asks("raw-question", "base", limit=4, retrievers={"both": {"kind": "hybrid", "engines": pair}})
    assert estimate(recipe, run).to_ask == ("raw-question", "base", "raw-question@both", "base@both")
    assert not (run.cache / "eval").exists()  # an estimate builds no index
    rows = {row["system"]: row for row in evaluate(recipe, run, report=write_report).summary["rows"]}
    assert {name: row["retriever"] for name, row in rows.items() if row["retriever"]} == {
        "raw-question@both": "both",
        "base@both": "both",
    }
    scores = [read_rows(run.eval / name / "per_question.parquet")[0].scores for name in list(rows)[::2]]
    assert scores[0] != scores[1]
    assert "hybrid" in run.report.read_text()
    assert evaluate(recipe, run).already
    changed = recipe.model_copy(update={"retrievers": {"both": TantivySettings()}})
    assert evaluate(changed, run).asked == ("raw-question@both", "base@both")
    with pytest.raises(ValidationError, match=r"cannot set k; set retriever\.k"):
        asks("base", retrievers={"x": {"kind": "bm25", "k": 5}})


def test_a_state_file_is_a_prompt_and_a_saved_program_brings_its_policy(run, tmp_path):
    train(run, "sft", 1)
    evaluate(asks("policies", limit=4), run)
    program = load_program(tmp_path / "program.py", "MultiHop", {}, k=3, exclude_seen=False)
    program.write_query.demos = [{"question": "who ?", "context": [], "query": "song"}]
    program.save(tmp_path / "state.json")
    dspy.ChainOfThought("question -> answer").save(tmp_path / "other.json")
    demos = {"state": str(tmp_path / "state.json"), "saved": str(run.program)}
    summary = evaluate(asks("base", "sft", limit=4, demos=demos, evaluation="more"), run).summary
    rows = {row["system"]: row for row in summary["rows"]}
    files = {name: run.eval / "more" / name / "per_question.parquet" for name in rows}
    texts = {name: [row.completion for row in read_rows(file)] for name, file in files.items()}
    assert texts["saved"] == texts["sft"] != texts["base"] != texts["state"]
    assert (rows["saved"]["policy"], rows["state"]["policy"], rows["state"]["prompt"]) == ("saved", "base", "state")
    with pytest.raises(ConfigError, match=r"demos\.x: unknown predictor 'predict'; in the program: write_query"):
        evaluate(asks("base", demos={"x": str(tmp_path / "other.json")}, evaluation="y"), run)
