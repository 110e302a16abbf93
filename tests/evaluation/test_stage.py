import json
from pathlib import Path

import ir_measures
import pytest

from leret.config.evaluation import ReaderSettings
from leret.config.policy import PolicySettings
from leret.core.errors import ConfigError, DataError, RunError
from leret.core.runs import Run
from leret.core.types import State
from leret.evaluation.plan import estimate
from leret.evaluation.results import read_rows
from leret.evaluation.stage import evaluate
from leret.extras.score import score
from leret.sampling.store.store import Store
from leret.viewer.report import write_report
from tests.datasets.writing import json_lines
from tests.evaluation.eval_fakes import asks, train
from tests.sampling.fakes import DOCS

ALL = asks("raw-question", "oracle-titles", "base", "bank", "policies")
RAW = asks("raw-question", limit=1)
CONTRACT = {*("schema", "measures", "n_questions", "n_by_type", "n_hops", "baseline", "confidence", "resamples"),
            *("rows", "comparisons", "comparisons_by_hop", "comparisons_by_type", "name", "data", "focus", "split"),
            *("temperature", "samples", "seed", "when", "key")}  # fmt: skip


def test_everything_is_written_and_nothing_is_done_twice(run):
    train(run, "sft", 1)
    names = ["raw-question", "oracle-titles", "base", "bank:1", "sft"]
    plan = estimate(ALL, run)
    assert (plan.to_ask, plan.steps, plan.lm_calls) == (tuple(names), 2, 3 * 2 * plan.questions)
    assert not run.eval.exists()
    assert not run.cache.exists()
    report = evaluate(ALL, run, report=write_report)
    summary = json.loads((run.eval / "summary.json").read_text())
    rows = {row["system"]: row for row in summary["rows"]}
    assert (list(report.asked), list(rows)) == (names, names)
    assert summary.keys() >= CONTRACT
    assert (summary["focus"], summary["n_hops"]) == ("sft", 2)
    assert (run.program / "program.json").is_file()
    assert "sft" in run.report.read_text()
    assert [rows[name]["hops"][1]["recall"] for name in names[:2]] == [0.5, 1.0]
    assert [rows[name]["lm_calls"] for name in names[:2]] == [0, 0]
    assert [rows[name]["prompt"] for name in names] == [None, None, "0", "1", "0"]
    qrels = list(ir_measures.read_trec_qrels(str(run.eval / "qrels.trec")))
    for name in names:
        check_trec_file(run.eval / name, qrels)
    assert estimate(ALL, run).done
    again = evaluate(ALL, run)
    assert (again.already, again.asked, again.summary) == (True, (), summary)
    other = evaluate(ALL.model_copy(update={"resamples": 30}), run)  # other statistics ask nothing
    assert (other.already, other.asked, other.summary["resamples"]) == (False, (), 30)


def check_trec_file(directory, qrels):
    """Check that a standard tool computes the measures of a system's rows from its TREC files."""
    measures = {ir_measures.AP: "ap", ir_measures.R @ 1000: "recall"}
    ranked = list(ir_measures.read_trec_run(str(directory / "run.trec")))
    found = ir_measures.iter_calc(list(measures), qrels, ranked)
    theirs = {(metric.query_id, measures[metric.measure]): metric.value for metric in found}
    rows = read_rows(directory / "per_question.parquet")  # the last hop of a question stands last
    ours = {(row.question_id, name): row.measures[name] for row in rows for name in measures.values()}
    assert ours == pytest.approx(theirs, abs=1e-12)


def test_the_policy_that_finds_most_on_dev_is_delivered(run):
    for place, name in enumerate(("sft", "ipo"), 1):
        train(run, name, place)
    recipe = asks("policies", choose_on="dev", baseline="sft")
    assert estimate(recipe, run).choose_on.lm_calls > 0
    summary = evaluate(recipe, run).summary
    on_dev = json.loads((run.eval / "dev" / "summary.json").read_text())
    recall = {row["system"]: row["hops"][-1]["recall"] for row in on_dev["rows"]}
    assert summary["chosen_on"] == recall
    assert recall.keys() == {"sft", "ipo"}
    assert recall[summary["focus"]] == max(recall.values())
    assert on_dev["focus"] == summary["focus"]  # the report of dev marks the policy that is delivered
    delivered = json.loads((run.program / "program.json").read_text())["lms"][0]["policy"]["model"]
    assert delivered.endswith(f"policies/{summary['focus']}")
    assert evaluate(recipe, run).already
    named = evaluate(recipe.model_copy(update={"evaluation": "named"}), run)
    assert (named.path.parent.name, (run.eval / "named-dev" / "summary.json").is_file()) == ("named", True)


def test_a_question_that_was_sampled_by_its_id_or_its_text_is_refused(run):
    evaluate(RAW, run)
    asked = read_rows(run.eval / "raw-question" / "per_question.parquet")[0].question_id
    file = Path(run.manifest.sampling["data"]["questions"])
    double = next(row for row in map(json.loads, file.read_text().splitlines()) if row["id"] == asked)
    file.write_text(file.read_text() + json.dumps({**double, "id": "double"}) + "\n")
    same_text = f"1 questions .*have the same text as a training question: '{asked}'"
    same_id = "1 questions are in both the training data and the evaluation split"
    for sampled, says in (("double", same_text), (asked, same_id)):
        with Store(run.store) as store:
            store.put_state(State(f"state of {sampled}", sampled, 0, "write_query", {}, ()))
        with pytest.raises(DataError, match=says):
            evaluate(RAW.model_copy(update={"evaluation": "again"}), run)


def test_chunks_of_whole_documents_give_the_evaluation_of_the_documents(run, tmp_path):
    before = evaluate(asks("raw-question", "oracle-titles"), run).summary
    lines = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    json_lines(tmp_path / "corpus.jsonl", [{**x, "doc_id": f"{x['doc_id']}#0", "parent": x["doc_id"]} for x in lines])
    chunked, sampling = Run.create(tmp_path / "chunked"), run.manifest.sampling
    chunked.update(sampling={**sampling, "data": {**sampling["data"], "gold": "parent"}})
    after = evaluate(asks("raw-question", "oracle-titles"), chunked).summary
    assert [row["hops"] for row in after["rows"]] == [row["hops"] for row in before["rows"]]
    for name in ("raw-question/run.trec", "qrels.trec"):
        assert (chunked.eval / name).read_text() == (run.eval / name).read_text()


def test_questions_without_gold_documents_are_evaluated_by_their_answers(answer_run):
    train(answer_run, "sft", 1)
    train(answer_run, "ipo", 2)
    recipe = asks("base", "policies", measures=("f1", "em", "recall"), choose_on="dev")
    summary = evaluate(recipe, answer_run, report=write_report).summary
    assert summary["measures"] == ["f1", "em"]
    assert summary["n_by_measure"] == {"f1": summary["n_questions"], "em": summary["n_questions"]}
    assert {c["measure"] for c in summary["comparisons"]} == {"f1", "em"}
    assert all(row["hops"][-1]["f1"] is not None and "recall" not in row["hops"][-1] for row in summary["rows"])
    assert any("recall applies to 0 of" in note for note in summary["notes"])
    dev = json.loads((answer_run.eval / "dev" / "summary.json").read_text())
    assert summary["chosen_on"] == {row["system"]: row["hops"][-1]["f1"] for row in dev["rows"]}
    shown = answer_run.report.read_text().partition('id="trees"')[0].partition("</style>")[2]
    shown = shown.replace("recall applies to 0 of", "")
    assert ("recall" in shown, "gold documents" in shown, "f1" in shown) == (False, False, True)

    answers = [json.loads(line) for line in (answer_run.eval / "sft" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == summary["n_questions"]
    assert answers[0].keys() == {"id", "inputs", "prediction", "references", "found", "measures"}
    mean = sum(answer["measures"]["f1"] for answer in answers) / len(answers)
    [sft] = [row for row in summary["rows"] if row["system"] == "sft"]
    file = answer_run.eval / "sft" / "answers.jsonl"  # holds answers and references
    again = score(file, file, recipe.model_copy(update={"measures": ("f1",)}))
    assert [sft["hops"][-1]["f1"], again.measures["f1"]] == pytest.approx([mean] * 2, abs=1e-6)


def test_a_question_counts_for_the_measures_that_it_has_labels_for(answer_run, tmp_path):
    file = tmp_path / "questions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = [{"answers": None}, {"relevant_doc_ids": ["alpha"]}, {"relevant_doc_ids": ["beta"], "answers": None}]
    rows = [{**row, **(kinds[0] | kinds[1], {}, kinds[1], kinds[2])[i % 4]} for i, row in enumerate(rows)]
    file.write_text("".join(json.dumps({k: v for k, v in row.items() if v}) + "\n" for row in rows))
    every = evaluate(asks("raw-question", "base", measures=("f1", "recall")), answer_run).summary
    n = every["n_by_measure"]
    assert 0 < n["f1"] < every["n_questions"] > n["recall"] > 0
    assert len([note for note in every["notes"] if " applies to " in note]) == 2
    searches = evaluate(asks("base", measures=("recall",), evaluation="found"), answer_run).summary
    assert searches["n_questions"] == n["recall"]


def test_a_system_that_only_searches_and_its_measures_need_gold_documents(answer_run):
    for name in ("raw-question", "hyde"):
        with pytest.raises(ConfigError, match=rf"systems: .*{name}.*gold documents.*systems: \[base\]"):
            evaluate(asks("base", name, measures=("f1",)), answer_run)
    with pytest.raises(DataError, match=r"none of its \d+ questions has labels for recall, ap.*measures: \[f1\]"):
        evaluate(asks("base"), answer_run)


def test_a_reader_makes_answers_for_systems_that_only_search_and_another_one_needs_a_name(answer_run):
    reader = ReaderSettings(policy=answer_run.manifest.sampling["policy"])
    recipe = asks("raw-question", measures=("f1",), limit=2, reader=reader)
    assert estimate(recipe, answer_run).lm_calls == 2
    summary = evaluate(recipe, answer_run, report=write_report).summary
    assert (summary["rows"][0]["lm_calls"], summary["reader"]["passages"], summary["measures"]) == (2, 6, ["f1"])
    assert f"the reader {summary['reader']['model']} wrote all answers" in answer_run.report.read_text()
    other = recipe.model_copy(update={"reader": reader.model_copy(update={"passages": 1})})
    with pytest.raises(RunError, match=r"(?s)reader.passages: 6 in the run, 1 in the recipe.*evaluation=NAME"):
        evaluate(other, answer_run)
    assert evaluate(other.model_copy(update={"evaluation": "one"}), answer_run).asked == ("raw-question",)
    with pytest.raises(ConfigError, match="oracle-titles"):
        evaluate(recipe.model_copy(update={"systems": ("oracle-titles",)}), answer_run)


NAMES = """
import dspy, leret
from leret.core.types import Candidate

class Names(dspy.Module):
    def __init__(self):
        super().__init__()
        self.search, self.pick = leret.Search(k=1), leret.Pick()

    def forward(self, question):
        picked = self.pick([Candidate(id, title="t", text=id) for id in IDS], [], question=question)
        return self.search(f"{question} {picked.text}")
"""


@pytest.mark.parametrize(("ids", "is_bound"), [(["name 1", "name 2"], False), (list(DOCS), True)])
def test_an_oracle_is_shown_only_if_it_can_pick_gold_documents(run, tmp_path, ids, is_bound):
    (tmp_path / "names.py").write_text(NAMES.replace("IDS", repr(ids)))
    sampling = run.manifest.sampling
    policy = PolicySettings.model_validate({"kind": "features", "features": "mentions"}).model_dump(mode="json")
    run.update(sampling={**sampling, "program": {"path": f"{tmp_path}/names.py:Names"}, "policy": policy})
    summary = evaluate(asks("raw-question", "oracle-titles", baseline="raw-question"), run).summary
    assert ("oracle-titles" in [row["system"] for row in summary["rows"]]) is is_bound
    assert any("oracle-titles is left out" in note for note in summary["notes"]) is not is_bound
