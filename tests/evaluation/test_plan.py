"""`leret eval` after program, corpus, questions or gold have changed, and evaluations side by side."""

import json
import os

import pytest

from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError, RunError
from leret.core.runs import Run
from leret.evaluation.plan import plan, resolve
from leret.evaluation.stage import evaluate
from leret.sampling.stage import sample
from tests.evaluation import test_stage
from tests.evaluation.test_stage import ROOT, sampling_recipe, train, write_data

SMALL = EvalRecipe(systems=("raw-question",), resamples=20)
BASE = EvalRecipe(systems=("raw-question", "base"), resamples=20, limit=4)


base = test_stage.base


@pytest.fixture
def run(tmp_path, base):
    """Sampled by `leret sample`, and not evaluated."""
    write_data(tmp_path)
    (tmp_path / "program.py").write_text((ROOT / "pipelines/multihop.py").read_text())
    recipe = sampling_recipe(base, "program.py", "")
    data, sampling = recipe.data.model_copy(update={"limit": 4}), recipe.sampling.model_copy(update={"prompts": 1})
    run = Run.create(tmp_path / "run")
    sample(recipe.model_copy(update={"data": data, "sampling": sampling}), run, base_dir=tmp_path)
    return run


def rewrite(run, name, **changes):
    """Every line of a file of data with other values; a value may be made of the old line."""
    path = run.path.parent / name
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [{**row, **{key: make(row) for key, make in changes.items()}} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_program(run):
    path = run.path.parent / "program.py"
    path.write_text(path.read_text() + "\n# searches for something else\n")


CHANGES = {
    "program": change_program,
    "data.corpus": lambda run: rewrite(run, "corpus.jsonl", text=lambda row: "zzz"),
    "data.questions": lambda run: rewrite(run, "questions.jsonl", question=lambda row: f"zzz {row['id']}"),
    "data.questions (gold)": lambda run: rewrite(
        run, "questions.jsonl", relevant_doc_ids=lambda row: [f"the {row['question'].split()[-2]}"]
    ),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_changed_since_an_evaluation_is_named_and_refused(run, key):
    evaluate(SMALL, run)
    CHANGES[key](run)
    for recipe in (SMALL, SMALL.model_copy(update={"systems": ("raw-question", "oracle-titles")})):
        for stage in (evaluate, plan):
            with pytest.raises(RunError, match=rf"{key.split()[0].split('.')[-1]}: its content"):
                stage(recipe, run)


def test_files_that_were_only_touched_cost_no_call(run):
    evaluate(BASE, run)
    for name in ("program.py", "corpus.jsonl", "questions.jsonl"):
        os.utime(run.path.parent / name)
    report = evaluate(BASE, run)
    assert (report.already, report.asked) == (False, ())
    assert evaluate(BASE, run).already


def test_a_held_out_question_that_changed_is_refused(run):
    asked = evaluate(SMALL, run).summary
    path = run.path.parent / "other.jsonl"
    path.write_text((run.path.parent / "questions.jsonl").read_text())
    other = SMALL.model_copy(update={"questions": str(path)})
    assert evaluate(other, run).summary["n_questions"] == asked["n_questions"]
    rewrite(run, "other.jsonl", relevant_doc_ids=lambda row: row["relevant_doc_ids"][:1])
    with pytest.raises(RunError, match=r"(?s)eval/other was .*questions: its content.*--set evaluation="):
        evaluate(other, run)
    assert evaluate(other.model_copy(update={"evaluation": "one-gold"}), run).asked == SMALL.systems


def test_another_temperature_wants_a_name(run):
    evaluate(SMALL, run)
    warm = SMALL.model_copy(update={"temperature": 0.7})
    with pytest.raises(RunError, match=r"(?s)temperature: 0\.0 in the run.*evaluation="):
        evaluate(warm, run)
    warm = warm.model_copy(update={"evaluation": "warm"})
    assert evaluate(warm, run).asked == SMALL.systems
    with pytest.raises(RunError, match=r"(?s)eval/warm .*seed: 0 in the run"):
        evaluate(warm.model_copy(update={"seed": 1}), run)
    assert evaluate(SMALL, run).already
    assert not evaluate(SMALL.model_copy(update={"seed": 1}), run).asked


def test_splits_lie_side_by_side_and_going_back_asks_nothing(run):
    test = evaluate(BASE, run)
    dev = evaluate(BASE.model_copy(update={"split": "dev"}), run)
    assert (test.path, test.page) == (run.eval / "summary.json", run.report)
    assert (dev.path, dev.page) == (run.eval / "dev/summary.json", run.eval / "dev/report.html")
    assert (test.summary["name"], dev.summary["name"]) == (None, "dev")
    assert (run.eval / "dev/base/run.trec").is_file()
    assert "dev" in dev.page.read_text()
    for name in ("qrels.trec", "examples.json"):
        assert (run.eval / name).read_text() != "" != (run.eval / "dev" / name).read_text()
    assert evaluate(BASE, run).already
    assert evaluate(BASE.model_copy(update={"split": "dev"}), run).already


def policy_of_the_program(run):
    return json.loads((run.program / "policy.json").read_text())["policy"]["model"]


def test_the_program_is_that_of_the_runs_own_test_questions(run):
    train(run, "mine", 1)
    dev = BASE.model_copy(update={"split": "dev"})
    test = BASE.model_copy(update={"systems": ("base", "mine")})
    evaluate(dev, run)
    assert (run.program / "policy.json").is_file()  # of the only evaluation that there is
    evaluate(test, run)
    assert policy_of_the_program(run).endswith("policies/mine")
    evaluate(dev.model_copy(update={"resamples": 30}), run)
    assert policy_of_the_program(run).endswith("policies/mine")
    assert evaluate(test, run).already


def test_a_lost_file_is_written_again_and_a_damaged_one_is_refused(run):
    evaluate(BASE, run)
    for lost in ("program/policy.json", "eval/qrels.trec"):
        (run.path / lost).unlink()
        report = evaluate(BASE, run)
        assert (report.already, report.asked, (run.path / lost).is_file()) == (False, (), True)
    path = run.eval / "base/per_question.parquet"
    path.write_bytes(b"junk")
    with pytest.raises(RunError, match=f"{path} cannot be read"):
        evaluate(BASE, run)


def test_a_folder_of_questions_is_read_again_when_a_file_in_it_changes(run):
    folder = run.path.parent / "beir"
    (folder / "qrels").mkdir(parents=True)
    other = BASE.model_copy(update={"questions": str(folder)})
    key = resolve(other, run).key
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    assert resolve(other, run).key != key


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, None),
        ({"split": "dev"}, "dev"),
        ({"questions": "/data/hard.jsonl.gz"}, "hard"),
        ({"split": "all", "questions": "hard.jsonl"}, "all-hard"),
        ({"split": "dev", "evaluation": "mine"}, "mine"),
        ({"questions": "v1.2-questions.jsonl"}, "v1.2-questions"),
    ],
)
def test_the_name_follows_from_split_and_questions(keys, name):
    assert EvalRecipe(**keys).evaluation_name == name
    for path in ("../x", "", "a/b", ".x"):  # it is one directory
        with pytest.raises(ValueError, match="evaluation"):
            EvalRecipe(evaluation=path)


def test_an_evaluation_and_a_system_have_no_directory_in_common(run):
    with pytest.raises(ConfigError, match="evaluation: 'base' is a system"):
        evaluate(SMALL.model_copy(update={"evaluation": "base"}), run)
    evaluate(SMALL.model_copy(update={"evaluation": "mine"}), run)
    train(run, "mine", 1)
    with pytest.raises(ConfigError, match="evaluation: 'mine' is a system"):
        evaluate(SMALL, run)


def test_a_run_names_no_path_of_the_machine_and_moves_with_its_data(run, tmp_path):
    first = evaluate(BASE, run)
    place = str(tmp_path)
    texts = [run.manifest_path, run.report, *run.program.iterdir(), *run.path.rglob("*.json"), *run.path.rglob("*.md")]
    assert not [path for path in texts if place in path.read_text()]
    assert "path: $RUN/../program.py:MultiHop" in run.manifest_path.read_text()
    assert run.manifest()["sampling"]["data"]["corpus"] == f"{place}/corpus.jsonl"
    moved = tmp_path.rename(f"{tmp_path}-moved")
    again = evaluate(BASE, Run.open(moved / "run"))
    assert (again.asked, again.summary["rows"]) == ((), first.summary["rows"])
