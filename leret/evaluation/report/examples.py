"""The questions that a policy gained and lost most on, hop by hop: R/eval/examples.json."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from leret.core.types import Document, Task
from leret.evaluation.results import ScoredHop

MEASURE = "ap"
"""What a gain is counted in: it also sees where in the ranking a document stands."""


def examples(
    policy: tuple[str, Sequence[ScoredHop]],
    rival: tuple[str, Sequence[ScoredHop]],
    questions: Sequence[Task],
    corpus: Mapping[str, Document],
    n: int,
) -> dict[str, Any]:
    """Up to ``n`` most improved and ``n`` most worsened questions, the widest differences first.

    Args:
        policy: name and rows of the system that is looked at.
        rival: name and rows of the one it is compared with.
        questions: by which texts and gold documents are shown.
        corpus: for the titles.
        n: examples of either sort.

    Returns:
        ``{"policy", "rival", "measure", "improved": [...], "worsened": [...]}``, JSON values throughout.
    """
    ours, theirs = _first_runs(policy[1]), _first_runs(rival[1])
    gains = []
    for question in questions:
        if question.id in ours and question.id in theirs:
            gain = _last(ours[question.id]) - _last(theirs[question.id])
            gains.append((gain, question.id, question))
    best = sorted((g for g in gains if g[0] > 0), key=lambda g: (-g[0], g[1]))[:n]
    worst = sorted((g for g in gains if g[0] < 0), key=lambda g: (g[0], g[1]))[:n]

    def show(gain: float, question: Task) -> dict[str, Any]:
        return {
            "question_id": question.id,
            "question": question.text,
            "answer": question.answers[0] if question.answers else None,
            "type": question.type,
            "gold": [_title(corpus, doc_id) for doc_id in question.gold],
            "difference": round(gain, 6),
            "policy": [_hop(row, before, question, corpus) for row, before in _with_before(ours[question.id])],
            "rival": [_hop(row, before, question, corpus) for row, before in _with_before(theirs[question.id])],
        }

    return {
        "policy": policy[0],
        "rival": rival[0],
        "measure": MEASURE,
        "improved": [show(gain, question) for gain, _, question in best],
        "worsened": [show(gain, question) for gain, _, question in worst],
    }


def _first_runs(rows: Sequence[ScoredHop]) -> dict[str, list[ScoredHop]]:
    """The first run's rows by question, in the order of the hops; runs that failed are left out."""
    runs: dict[str, list[ScoredHop]] = defaultdict(list)
    for row in rows:
        if row.sample == 0:
            runs[row.question_id].append(row)
    return {
        question_id: sorted(run, key=lambda row: row.hop)
        for question_id, run in runs.items()
        if not any(row.failure for row in run)
    }


def _last(run: Sequence[ScoredHop]) -> float:
    return run[-1].measures.get(MEASURE, 0.0)


def _with_before(run: Sequence[ScoredHop]) -> list[tuple[ScoredHop, frozenset[str]]]:
    """Each row with the documents of the row before it."""
    before = [frozenset[str](), *(frozenset(row.doc_ids) for row in run)]
    return list(zip(run, before, strict=False))


def _hop(row: ScoredHop, before: frozenset[str], question: Task, corpus: Mapping[str, Document]) -> dict[str, Any]:
    return {
        "hop": row.hop,
        "query": row.query,
        "completion": row.completion,
        "unparsed": row.unparsed,
        "recall": row.measures.get("recall"),
        "ap": row.measures.get("ap"),
        "found": [
            {"title": _title(corpus, doc_id), "gold": doc_id in question.gold}
            for doc_id in row.doc_ids
            if doc_id not in before
        ],
    }


def _title(corpus: Mapping[str, Document], doc_id: str) -> str:
    document = corpus.get(doc_id)
    return (document.title if document else "") or doc_id
