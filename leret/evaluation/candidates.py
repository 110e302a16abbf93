"""BM25 over candidates: what picks without learning, and what makes candidates of a corpus."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

from leret.core.errors import RetrievalError
from leret.core.files import write_atomically
from leret.core.types import STOP, Choice, Document, Task
from leret.datasets.corpus import Corpus
from leret.datasets.load import Data
from leret.datasets.splits import rank_of
from leret.retrieval.engines.bm25 import BM25

_RANKINGS = 512
"""Of the last choices, kept for the picks that follow."""


class CandidateRanking:
    """The candidates of each choice in BM25's order for the question: title and text, as of documents."""

    def __init__(self) -> None:
        self._rankings: OrderedDict[tuple[str, str, int], list[str]] = OrderedDict()

    def first(self, task: Task, choice: Choice) -> str:
        """The id of the best one that was not picked before."""
        left = {one.id: one for one in choice.candidates if one is not STOP}
        everyone = left | {one.id: one for one in choice.picked}
        key = task.id, choice.predictor, hash(frozenset(everyone))
        if key not in self._rankings:
            query = str(choice.context.get("question") or task.text)
            documents = [Document(one.id, one.title, one.text) for one in everyone.values()]
            self._rankings[key] = ranked(query, documents)
        self._rankings.move_to_end(key)
        if len(self._rankings) > _RANKINGS:
            self._rankings.popitem(last=False)
        return next(id for id in self._rankings[key] if id in left)


def ranked(query: str, documents: list[Document]) -> list[str]:
    """Ids in BM25's order; those that share no word with the query stand last, in their own order."""
    try:
        [found] = BM25.build(Corpus(documents)).search([query], len(documents))
    except RetrievalError:  # no word in any of them
        found = ()
    return list(dict.fromkeys([*(passage.doc_id for passage in found), *(one.doc_id for one in documents)]))


def write_episodes(data: Data, path: Path, n: int = 10) -> int:
    """Write tasks with candidates of a corpus, as JSON lines of kind chunks; returns how many.

    The candidates of a task are its gold documents and the first others that BM25 finds for its question, ``n`` in
    all, in an order drawn by the task's id. Figures on them are not those on a data set's own paragraphs: the gold
    documents are always there, and the others are near the question.
    """
    tasks = [task for task in data.tasks if task.gold]
    rankings = BM25.build(data.corpus).search([task.text for task in tasks], n)
    lines = []
    for task, ranking in zip(tasks, rankings, strict=True):
        found = [passage.doc_id for passage in ranking if passage.doc_id not in task.gold]
        ids = sorted([*task.gold, *found[: max(0, n - len(task.gold))]], key=lambda id: rank_of(id, 0, task.id))
        chunks = [{"id": id, "title": data.corpus[id].title, "text": data.corpus[id].text} for id in ids]
        known = {"answers": list(task.answers), "type": task.type, "hops": task.hops, "split": task.split}
        line = {"id": task.id, "question": task.text, "chunks": chunks, "support": list(task.gold), **known}
        lines.append(json.dumps({name: value for name, value in line.items() if value}, ensure_ascii=False) + "\n")
    write_atomically(path, "".join(lines))
    return len(lines)
