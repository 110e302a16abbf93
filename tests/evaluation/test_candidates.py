"""BM25 over candidates as a rule."""

from leret.core.types import STOP, Candidate, Choice, Document, Task
from leret.evaluation.baselines import CandidateRanking, rank

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
