"""`leret eval` on a small run: real policies, real index, all of its files."""

import json
import random
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote

import ir_measures
import pytest

from leret.config.evaluation import EvalRecipe
from leret.config.sampling import SamplingRecipe
from leret.core.errors import ConfigError, DataError, RunError
from leret.core.runs import Run
from leret.core.types import State
from leret.evaluation.plan import plan
from leret.evaluation.results import read_rows
from leret.evaluation.stage import evaluate
from leret.programs.prompts import Prompt
from leret.sampling.store.store import Store
from tests.tiny import WORDS, tiny_policy

ROOT = Path(__file__).parents[2]

NAMES = [word for word in WORDS if word.isalpha()][40:100]
SMALL = {"resamples": 200, "systems": ("raw-question", "oracle-titles", "base", "bank", "policies")}


CONTRACT = {
    *("schema", "measures", "n_questions", "n_by_type", "n_hops", "baseline", "confidence", "resamples", "rows"),
    *("comparisons", "comparisons_by_hop", "comparisons_by_type", "name", "data", "focus", "split", "temperature"),
    *("samples", "seed", "when", "key"),
}
"""Keys of summary.json: some may be added, none goes."""


def write_data(directory):
    rng = random.Random(0)
    with (directory / "corpus.jsonl").open("w") as file:
        for i, name in enumerate(NAMES):
            other = NAMES[(i + 7) % len(NAMES)]
            text = f"{name} wrote a song for {other} " + " ".join(rng.choices(NAMES, k=3))
            file.write(json.dumps({"doc_id": f"the {name}", "title": name, "text": text}) + "\n")
    with (directory / "questions.jsonl").open("w") as file:
        for i, name in enumerate(NAMES):
            gold = [f"the {name}", f"the {NAMES[(i + 7) % len(NAMES)]}"]
            kind = ("bridge", "comparison")[i % 2]
            line = {"id": f"q {i}", "question": f"who wrote a song for the friend of {name} ?", "answer": "x"}
            file.write(json.dumps({**line, "relevant_doc_ids": gold, "type": kind}) + "\n")


def train(run, name, seed, parent="base", **recipe):
    directory = tiny_policy(run.policies / name, seed=seed)
    record = {
        "parent": parent,
        "key": {"recipe": {"algorithm": "sft", "learning_rate": 0.001, "seed": 0, **recipe}},
        "examples": 10,
        "steps": 4,
        "seconds": 1.0,
        "log_history": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}],
    }
    (directory / "training.json").write_text(json.dumps(record))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("base"))


def sampling_recipe(base, program, folder):
    return SamplingRecipe.model_validate(
        {
            "data": {"corpus": f"{folder}corpus.jsonl", "questions": f"{folder}questions.jsonl"},
            "retriever": {"k": 2},
            "policy": {"model": str(base), "max_tokens": 6},
            "program": {"path": f"{program}:MultiHop", "adapter": {"kind": "compact"}},
        }
    )


@pytest.fixture
def run(tmp_path, base):
    write_data(tmp_path)
    run = Run.create(tmp_path / "run")
    recipe = sampling_recipe(base, ROOT / "pipelines/multihop.py", f"{tmp_path}/")
    run.update(sampling=recipe.model_dump(mode="json"))
    run.prompts.mkdir()
    Prompt("1", {"write_query": [{"question": "who ?", "query": "song"}]}, score=0.5).save(run.prompts / "1.json")
    return run


def test_everything_is_written_and_nothing_is_done_twice(run):
    train(run, "sft", 1)
    report = evaluate(EvalRecipe(**SMALL), run)
    names = ["raw-question", "oracle-titles", "base", "bank:1", "sft"]
    assert report.asked == tuple(names)
    summary = json.loads((run.eval / "summary.json").read_text())
    assert summary.keys() >= CONTRACT
    assert [row["system"] for row in summary["rows"]] == names
    assert {(c["a"], c["b"]) for c in summary["comparisons"]} >= {("sft", "base"), ("sft", "raw-question")}
    assert (summary["focus"], summary["n_hops"]) == ("sft", 2)
    assert set(summary["n_by_type"]) == {"bridge", "comparison"}
    assert all((run.eval / name / file).is_file() for name in names for file in ("run.trec", "per_question.parquet"))
    assert "sft" in run.report.read_text()
    assert (run.program / "policy.json").is_file()
    rows = {row["system"]: row for row in summary["rows"]}
    assert rows["oracle-titles"]["hops"][1]["recall"] > rows["raw-question"]["hops"][1]["recall"]
    assert (rows["raw-question"]["lm_calls"], rows["base"]["prompt"], rows["bank:1"]["prompt"]) == (0, "0", "1")
    assert rows["base"]["lm_calls"] > 0
    again = evaluate(EvalRecipe(**SMALL), run)
    assert (again.already, again.asked, again.summary) == (True, (), summary)


def test_a_new_policy_and_changed_weights_are_all_that_is_asked_again(run):
    train(run, "sft", 1)
    evaluate(EvalRecipe(**SMALL), run)
    tiny_policy(run.policies / "sft", seed=5)
    train(run, "ipo", 2, parent="sft", algorithm="ipo")
    report = evaluate(EvalRecipe(**SMALL), run)
    assert report.asked == ("sft", "ipo")
    assert report.summary["focus"] == "ipo"
    assert {(c["a"], c["b"]) for c in report.summary["comparisons"]} >= {("ipo", "sft"), ("ipo", "base")}
    assert json.loads((run.program / "policy.json").read_text())["policy"]["model"].endswith("policies/ipo")


def test_other_statistics_ask_nothing(run):
    recipe = EvalRecipe(**SMALL | {"systems": ("base",)})
    evaluate(recipe, run)
    report = evaluate(recipe.model_copy(update={"resamples": 300}), run)
    assert (report.already, report.asked, report.summary["resamples"]) == (False, (), 300)


def test_trec_files_carry_the_same_measures_as_the_summary(run):
    assert evaluate(EvalRecipe(**SMALL), run).summary["focus"] is None  # nothing is trained
    assert json.loads((run.eval / "examples.json").read_text()) is None
    qrels = list(ir_measures.read_trec_qrels(str(run.eval / "qrels.trec")))
    for system in ("raw-question", "oracle-titles", "base", "bank:1"):
        theirs = defaultdict(dict)
        ranked = list(ir_measures.read_trec_run(str(run.eval / system / "run.trec")))
        for metric in ir_measures.iter_calc([ir_measures.AP, ir_measures.R @ 1000], qrels, ranked):
            theirs[unquote(metric.query_id)][str(metric.measure)] = metric.value
        last = {row.question_id: row.measures for row in read_rows(run.eval / system / "per_question.parquet")}
        assert {q: v["ap"] for q, v in last.items()} == pytest.approx(
            {q: v["AP"] for q, v in theirs.items()}, abs=1e-12
        )
        assert {q: v["recall"] for q, v in last.items()} == pytest.approx({q: v["R@1000"] for q, v in theirs.items()})


def test_a_question_that_was_sampled_is_refused(run):
    summary = evaluate(EvalRecipe(**SMALL | {"systems": ("raw-question",)}), run).summary
    assert summary["n_questions"] > 0
    asked = read_rows(run.eval / "raw-question" / "per_question.parquet")[0].question_id
    with Store(run.store) as store:
        store.put_state(State("s", asked, 0, "write_query", {}, ()))
    with pytest.raises(DataError, match=r"1 questions are in the training data and in the evaluation split"):
        evaluate(EvalRecipe(**SMALL), run)


def test_a_question_whose_text_was_sampled_is_refused(run):
    evaluate(EvalRecipe(**SMALL | {"systems": ("raw-question",), "limit": 1}), run)
    asked = read_rows(run.eval / "raw-question" / "per_question.parquet")[0].question_id
    lines = Path(run.manifest()["sampling"]["data"]["questions"])
    text = next(row["question"] for row in map(json.loads, lines.read_text().splitlines()) if row["id"] == asked)
    with lines.open("a") as file:
        file.write(json.dumps({"id": "double", "question": text, "relevant_doc_ids": [f"the {NAMES[0]}"]}) + "\n")
    with Store(run.store) as store:
        store.put_state(State("s", "double", 0, "write_query", {}, ()))
    with pytest.raises(DataError, match=f"1 questions .*have the text of one in the training data: '{asked}'"):
        evaluate(EvalRecipe(**SMALL | {"systems": ("raw-question",), "evaluation": "again"}), run)


def test_unknown_systems_baselines_and_measures_are_refused_before_anything_is_opened(run):
    with pytest.raises(ConfigError, match="'ipo' is not in this run"):
        evaluate(EvalRecipe(systems=("ipo",)), run)
    with pytest.raises(ConfigError, match="baseline: 'bass' is not in this run"):
        evaluate(EvalRecipe(baseline="bass"), run)
    with pytest.raises(ConfigError, match="measures: unknown measure 'recal'"):
        evaluate(EvalRecipe(measures=("recal",)), run)
    with pytest.raises(RunError, match="run `leret sample RECIPE"):
        evaluate(EvalRecipe(), Run.create(run.path.parent / "new"))
    assert not run.eval.exists()


def test_a_plan_says_what_is_left_and_writes_nothing(run):
    recipe = EvalRecipe(**SMALL)
    before = plan(recipe, run)
    assert (before.to_ask, before.steps) == (("raw-question", "oracle-titles", "base", "bank:1"), 2)
    assert before.lm_calls == 2 * 2 * before.questions
    assert not run.eval.exists()
    assert not run.cache.exists()
    evaluate(recipe, run)
    assert plan(recipe, run).done
    train(run, "sft", 1)
    after = plan(recipe, run)
    assert (after.to_ask, after.lm_calls, after.done) == (("sft",), 2 * after.questions, False)
