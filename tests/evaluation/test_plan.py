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
from tests.evaluation.eval_fakes import asks, train

SMALL = asks("raw-question")
BASE = asks("raw-question", "base", limit=4)


def but(recipe, **keys):
    return recipe.model_copy(update=keys)


@pytest.fixture
def run(tmp_path, sampling_recipe):
    """Sampled by `leret sample`, and not evaluated."""
    run = Run.create(tmp_path / "run")
    data, sampling = but(sampling_recipe.data, limit=4), but(sampling_recipe.sampling, prompts=1)
    sample(but(sampling_recipe, data=data, sampling=sampling), run, base_dir=tmp_path)
    return run


def rewrite(path, **changes):
    """Every line of a file of data with another value of a key, made of the old line."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [{**row, **{key: make(row) for key, make in changes.items()}} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("program.py", None),
        ("corpus.jsonl", {"text": lambda row: "zzz"}),
        ("questions.jsonl", {"question": lambda row: f"zzz {row['id']}"}),
        ("questions.jsonl", {"relevant_doc_ids": lambda row: [f"the {row['question'].split()[-2]}"]}),
    ],
)
def test_what_changed_since_an_evaluation_is_named_and_refused(run, tmp_path, file, changes):
    evaluate(SMALL, run)
    path = tmp_path / file
    if changes:
        rewrite(path, **changes)
    else:
        path.write_text(path.read_text() + "\n# searches for something else\n")
    for recipe in (SMALL, but(SMALL, systems=("raw-question", "oracle-titles"))):
        for stage in (evaluate, plan):
            with pytest.raises(RunError, match=f"{path.stem}: its content"):
                stage(recipe, run)


def test_files_that_were_only_touched_cost_no_call(run, tmp_path):
    evaluate(BASE, run)
    for name in ("program.py", "corpus.jsonl", "questions.jsonl"):
        os.utime(tmp_path / name)
    report = evaluate(BASE, run)
    assert (report.already, report.asked) == (False, ())
    assert evaluate(BASE, run).already


def test_a_held_out_question_that_changed_is_refused(run, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text((tmp_path / "questions.jsonl").read_text())
    other = but(SMALL, questions=str(path))
    evaluate(other, run)
    rewrite(path, relevant_doc_ids=lambda row: row["relevant_doc_ids"][:1])
    with pytest.raises(RunError, match=r"(?s)eval/other was .*questions: its content.*--set evaluation="):
        evaluate(other, run)
    assert evaluate(but(other, evaluation="one-gold"), run).asked == SMALL.systems


def test_another_temperature_wants_a_name_and_a_seed_only_where_it_is_warm(run):
    evaluate(SMALL, run)
    warm = but(SMALL, temperature=0.7)
    with pytest.raises(RunError, match=r"(?s)temperature: 0\.0 in the run.*evaluation="):
        evaluate(warm, run)
    assert evaluate(but(warm, evaluation="warm"), run).asked == SMALL.systems
    with pytest.raises(RunError, match=r"(?s)eval/warm .*seed: 0 in the run"):
        evaluate(but(warm, evaluation="warm", seed=1), run)
    assert evaluate(SMALL, run).already
    assert not evaluate(but(SMALL, seed=1), run).asked


def test_splits_lie_side_by_side_and_going_back_asks_nothing(run):
    recipes = BASE, but(BASE, split="dev")
    test, dev = (evaluate(recipe, run) for recipe in recipes)
    assert (test.path, test.page) == (run.eval / "summary.json", run.report)
    assert (dev.path, dev.page) == (run.eval / "dev/summary.json", run.eval / "dev/report.html")
    assert (test.summary["name"], dev.summary["name"]) == (None, "dev")
    assert "dev" in dev.page.read_text()
    for name in ("qrels.trec", "examples.json", "base/run.trec"):
        assert (run.eval / name).read_text() != "" != (run.eval / "dev" / name).read_text()
    assert all(evaluate(recipe, run).already for recipe in recipes)


def test_the_program_is_that_of_the_runs_own_test_questions(run):
    def delivered():
        return json.loads((run.program / "policy.json").read_text())["policy"]["model"]

    train(run, "mine", 1)
    dev, test = but(BASE, split="dev"), but(BASE, systems=("base", "mine"))
    evaluate(dev, run)
    assert not delivered().endswith("policies/mine")  # of the only evaluation that there is
    for recipe in (test, but(dev, resamples=30)):
        evaluate(recipe, run)
        assert delivered().endswith("policies/mine")
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


def test_a_folder_of_questions_is_read_again_when_a_file_in_it_changes(run, tmp_path):
    file = tmp_path / "beir/qrels/test.tsv"
    file.parent.mkdir(parents=True)
    other = but(BASE, questions=str(tmp_path / "beir"))
    key = resolve(other, run).key
    file.write_text("query-id\tcorpus-id\tscore\n")
    assert resolve(other, run).key != key


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, None),
        ({"questions": "/data/v1.2-hard.jsonl.gz"}, "v1.2-hard"),
        ({"split": "all", "questions": "hard.jsonl"}, "all-hard"),
        ({"split": "dev", "evaluation": "mine"}, "mine"),
    ],
)
def test_the_name_follows_from_split_and_questions(keys, name):
    assert EvalRecipe(**keys).evaluation_name == name


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".x"])
def test_a_name_is_one_directory(name):
    with pytest.raises(ValueError, match="evaluation"):
        EvalRecipe(evaluation=name)


def test_an_evaluation_and_a_system_have_no_directory_in_common(run):
    with pytest.raises(ConfigError, match="evaluation: 'base' is a system"):
        evaluate(but(SMALL, evaluation="base"), run)
    evaluate(but(SMALL, evaluation="mine"), run)
    train(run, "mine", 1)
    with pytest.raises(ConfigError, match="evaluation: 'mine' is a system"):
        evaluate(SMALL, run)


def test_a_run_names_no_path_of_the_machine_and_moves_with_its_data(run, tmp_path):
    first = evaluate(BASE, run)
    texts = [run.manifest_path, run.report, *run.program.iterdir(), *run.path.rglob("*.json"), *run.path.rglob("*.md")]
    assert not [path for path in texts if str(tmp_path) in path.read_text()]
    assert "path: $RUN/../program.py:MultiHop" in run.manifest_path.read_text()
    assert run.manifest()["sampling"]["data"]["corpus"] == f"{tmp_path}/corpus.jsonl"
    moved = tmp_path.rename(f"{tmp_path}-moved")
    again = evaluate(BASE, Run.open(moved / "run"))
    assert (again.asked, again.summary["rows"]) == ((), first.summary["rows"])
