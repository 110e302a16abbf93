import json
from pathlib import Path

from leret.core.runs import Run
from leret.core.types import State
from leret.datasets.leaks import FINGERPRINTS
from leret.evaluation.results import read_rows
from leret.evaluation.stage import evaluate
from leret.programs.prompts import Prompt
from leret.sampling.store.store import Store
from leret.viewer.report import write_report
from models.fingerprints import write_fingerprints
from tests.datasets.writing import json_lines
from tests.evaluation.eval_fakes import asks, train


def test_leaks_through_other_runs_demos_and_pretraining_are_reported(run, tmp_path):
    asked = evaluate(asks("raw-question", limit=3), run).summary
    assert asked["leaks"]["by_kind"] == dict.fromkeys(asked["leaks"]["by_kind"], 0)
    assert asked["leaks"]["unknown"] == []  # no policy was evaluated
    known = evaluate(asks("raw-question", "base", limit=3), run).summary["leaks"]
    assert known["unknown"] == [Path(run.manifest.sampling["policy"]["model"]).name]
    tests = read_rows(run.eval / "raw-question" / "per_question.parquet")
    first, second, third = dict.fromkeys(row.question_id for row in tests)
    texts = {row["id"]: row["question"] for row in map(json.loads, (tmp_path / "questions.jsonl").open())}

    other, sampling = Run.create(tmp_path / "other"), run.manifest.sampling
    json_lines(tmp_path / "theirs.jsonl", [{"id": "a", "question": texts[first].upper(), "relevant_doc_ids": ["beta"]}])
    data = {**sampling["data"], "questions": str(tmp_path / "theirs.jsonl")}
    other.update(sampling={**sampling, "data": data}, digests={"corpus": "theirs"})
    train(other, "sft", 1)
    with Store(other.store) as store:
        store.put_state(State("state", "a", 0, "write_query", {}, ()))
    demo = {"question": " ".join(reversed(texts[second].split())), "query": "song"}
    Prompt("mine", {"write_query": [demo]}).save(tmp_path / "mine.json")
    write_fingerprints(Path(sampling["policy"]["model"]), [texts[third]])
    extra = {"demos": {"mine": str(tmp_path / "mine.json")}, "actors": {"sft": {"model": str(other.policies / "sft")}}}
    try:
        leaks = evaluate(asks("base", limit=3, **extra), run, report=write_report).summary["leaks"]
    finally:
        (Path(sampling["policy"]["model"]) / FINGERPRINTS).unlink()
    pairs = {one["id"]: (one["kind"], one["training_id"]) for one in leaks["examples"]}
    assert pairs == {first: ("text", "other: a"), second: ("words", "a demo of mine"), third: ("pretraining", None)}
    assert leaks["unknown"] == []
    assert leaks["verdict"].removeprefix("leak") in run.report.read_text()


def test_gold_documents_that_the_corpus_lacks_are_a_note(run, tmp_path):
    assert evaluate(asks("raw-question"), run).summary["gold_coverage"] == 1
    lost = {"id": "lost", "question": "Who?", "relevant_doc_ids": ["alpha", "lost"]}
    more = tmp_path / "more.jsonl"
    more.write_text((tmp_path / "questions.jsonl").read_text() + json.dumps(lost))
    data = {**run.manifest.sampling["data"], "skip_invalid": True}
    run.update(sampling={**run.manifest.sampling, "data": data})
    summary = evaluate(asks("raw-question", questions=str(more)), run).summary
    assert summary["gold_coverage"] == 6 / 7
    assert "the corpus lacks 1 of 7 gold documents" in summary["notes"]
