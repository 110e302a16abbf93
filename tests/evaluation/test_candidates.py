"""BM25 over candidates, as a rule and as their maker."""

import json

from leret.config.data import DataSettings
from leret.core.types import STOP, Candidate, Choice, Document, Task
from leret.datasets import load, load_tasks
from leret.evaluation.baselines import CandidateRanking, rank
from leret.evaluation.picking.episodes import write_episodes

ONES = tuple(Candidate(str(i), text) for i, text in enumerate(["the sea", "milk and more", "where is milk", "?"]))
TASK = Task.question("q", "where is the milk")


def test_picks_follow_bm25_and_then_the_order_of_the_candidates():
    candidates, left, picked = CandidateRanking(), list(ONES), []
    for _ in ONES:
        id = candidates.first(TASK, Choice("pick", {"question": TASK.text}, (*left, STOP), tuple(picked)))
        picked.append(next(one for one in left if one.id == id))
        left.remove(picked[-1])
    assert [one.id for one in picked][2:] == ["0", "3"]
    assert {one.id for one in picked[:2]} == {"1", "2"}
    assert rank("milk", [Document("a", "", "?"), Document("b", "", "!")]) == ["a", "b"]  # no word in any


def test_candidates_of_a_corpus_are_the_gold_documents_and_the_first_others(tmp_path):
    corpus = [{"doc_id": f"d{i}", "title": "T", "text": f"milk {i} " + "sea " * i} for i in range(8)]
    asked = [{"id": "q", "question": "milk?", "answer": "x", "relevant_doc_ids": ["d7"]}]
    for name, rows in (("c", corpus), ("q", asked)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(corpus=f"{tmp_path}/c", questions=f"{tmp_path}/q", split="all")
    assert write_episodes(load(data), tmp_path / "e", 4) == 1
    [task] = load_tasks(DataSettings(kind="chunks", questions=f"{tmp_path}/e", split="all"))
    assert sorted(chunk["id"] for chunk in task.inputs["chunks"]) == ["d0", "d1", "d2", "d7"]
    assert (task.gold, task.answers) == (("d7",), ("x",))
