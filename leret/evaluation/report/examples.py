"""The questions on which a policy differs most from the baseline, for examples.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leret.core.types import Document, Task
from leret.datasets.corpus import find
from leret.evaluation.results import ScoredHop, first_runs, prediction_of


def examples(
    policy: tuple[str, Sequence[ScoredHop]],
    rival: tuple[str, Sequence[ScoredHop]],
    questions: Sequence[Task],
    corpus: Mapping[str, Document],
    n: int,
    measure: str = "ap",
) -> dict[str, Any]:
    """Select the ``n`` questions that a policy wins by most, and those that it loses by most."""
    policy_runs = _finished(policy[1])
    rival_runs = _finished(rival[1])

    def show(gain: float, question: Task) -> dict[str, Any]:
        policy_run = policy_runs[question.id]
        rival_run = rival_runs[question.id]
        return {
            "question_id": question.id,
            "question": question.inputs.get("question", question.text),
            "answer": " / ".join(question.answers) or None,
            "type": question.type,
            "gold": [_title(doc_id, corpus) for doc_id in question.gold],
            "difference": round(gain, 6),
            "policy": _hops(policy_run, question, corpus),
            "rival": _hops(rival_run, question, corpus),
            "answers": {"policy": _answer(policy_run[-1]), "rival": _answer(rival_run[-1])},
        }

    improved = []
    worsened = []
    for question in questions:
        if question.id not in policy_runs or question.id not in rival_runs:
            continue
        value = policy_runs[question.id][-1].measures.get(measure)
        rival_value = rival_runs[question.id][-1].measures.get(measure)
        if value is None or rival_value is None:
            continue
        gain = value - rival_value
        if gain > 0:
            improved.append((gain, question))
        elif gain < 0:
            worsened.append((gain, question))
    improved.sort(key=lambda pair: (-pair[0], pair[1].id))
    worsened.sort(key=lambda pair: (pair[0], pair[1].id))
    return {
        "policy": policy[0],
        "rival": rival[0],
        "measure": measure,
        "improved": [show(*pair) for pair in improved[:n]],
        "worsened": [show(*pair) for pair in worsened[:n]],
    }


def _finished(rows: Sequence[ScoredHop]) -> dict[str, list[ScoredHop]]:
    """Map question ids to the first run on each question, without runs that failed."""
    runs = {}
    for question_id, run in first_runs(rows).items():
        if not any(row.failure for row in run):
            runs[question_id] = run
    return runs


def _answer(row: ScoredHop) -> str | None:
    answer = prediction_of(row)
    if isinstance(answer, dict):
        return "; ".join(f"{name}: {text}" for name, text in answer.items())
    return answer


def _title(doc_id: str, corpus: Mapping[str, Document]) -> str:
    document = find(corpus, doc_id)
    return (document.title if document else "") or doc_id


def _hops(
    run: Sequence[ScoredHop], question: Task, corpus: Mapping[str, Document]
) -> list[dict[str, Any]]:
    hops = []
    before: Sequence[str] = ()
    for row in run:
        documents = []
        for doc_id in row.doc_ids:
            if doc_id not in before:
                is_gold = question.parents.get(doc_id, doc_id) in question.gold
                documents.append({"title": _title(doc_id, corpus), "gold": is_gold})
        hop = {
            "hop": row.hop,
            "query": row.query,
            "completion": row.completion,
            "unparsed": row.unparsed,
            "recall": row.measures.get("recall"),
            "ap": row.measures.get("ap"),
            "found": documents,
        }
        hops.append(hop)
        before = row.doc_ids
    return hops
