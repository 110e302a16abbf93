"""`leret search --questions`: evaluate a retriever's rankings with ir_measures."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leret.core.errors import ConfigError, DataError, RunError
from leret.core.files import write_atomically
from leret.core.progress import Progress
from leret.core.types import Ranking, Task
from leret.evaluation.results import gold_scores, strictly_decreasing, write_qrels, write_run
from leret.evaluation.statistics import bootstrap_intervals
from leret.retrieval.base import Retriever

_MEASURE = re.compile(r"(R|P|Success)@[1-9][0-9]{0,5}|(AP|RR|nDCG)(@[1-9][0-9]{0,5})?|Rprec")
_BATCH = 256
_DEPTH = 100  # documents to retrieve for a measure without a cut-off
_SYSTEM = "raw-question"


@dataclass(frozen=True)
class RetrieverReport:
    """Results of a retriever: ``values`` (n_questions, n_measures).

    Means (``measures``) and their ``intervals``.
    """

    retriever: str
    questions: tuple[Task, ...]
    rankings: tuple[Ranking, ...]
    measures: Mapping[str, float]
    values: NDArray[np.float64]
    intervals: Mapping[str, tuple[float, float]]
    depth: int
    seconds: float

    @property
    def n_empty(self) -> int:
        return sum(not ranking for ranking in self.rankings)

    def brief(self) -> dict[str, Any]:
        """Return the values printed by ``--json``."""
        return {"n_questions": len(self.questions), "measures": dict(self.measures)}

    def save(self, directory: Path) -> None:
        """Write summary.json, run.trec, qrels.trec and per_question.jsonl."""
        rankings = []
        for question, ranking in zip(self.questions, self.rankings, strict=True):
            rankings.append((question.id, _scores(question, ranking)))
        lines = []
        for question, values in zip(self.questions, self.values, strict=True):
            row = dict(zip(self.measures, map(float, values), strict=True))
            lines.append(json.dumps({"id": question.id, **row}) + "\n")
        summary = {
            **self.brief(),
            "intervals": {name: list(bounds) for name, bounds in self.intervals.items()},
            "system": _SYSTEM,
            "retriever": self.retriever,
            "depth": self.depth,
            "n_empty": self.n_empty,
            "seconds": round(self.seconds, 3),
        }
        try:
            write_run(directory / "run.trec", _SYSTEM, rankings)
            write_qrels(directory / "qrels.trec", self.questions)
            write_atomically(directory / "per_question.jsonl", "".join(lines))
            write_atomically(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            raise RunError(
                f"{directory} cannot be written ({error.strerror or error}); use another --out"
            ) from error


def evaluate_retriever(
    retriever: Retriever,
    questions: Sequence[Task],
    measures: Sequence[str],
    progress: Progress | None = None,
) -> RetrieverReport:
    """Search to the depth of the largest cut-off, and score the rankings.

    A measure without a cut-off counts as 100.

    Raises:
        DataError: there are no questions, or a question has no gold documents.
        ConfigError: a measure is unknown.
    """
    names = parse_measures(measures)
    bare = [question.id for question in questions if not question.gold]
    if bare:
        raise DataError(
            f"{len(bare)} of {len(questions)} questions have no relevant documents, "
            f"for example {bare[0]!r}; "
            "add relevant_doc_ids to these questions, or remove the questions"
        )
    depth = max(int(name.partition("@")[2] or _DEPTH) for name in names)
    began = time.monotonic()
    progress = progress or Progress()
    progress.start("searching", len(questions))
    rankings: list[Ranking] = []
    for start in range(0, len(questions), _BATCH):
        rankings += retriever.search(
            [question.text for question in questions[start : start + _BATCH]], depth
        )
        progress.advance(len(rankings) - start)
    progress.finish()
    seconds = time.monotonic() - began
    values = measure(names, questions, rankings)
    return RetrieverReport(
        retriever=retriever.digest,
        questions=tuple(questions),
        rankings=tuple(rankings),
        measures=dict(zip(names, map(float, values.mean(axis=0)), strict=True)),
        values=values,
        intervals={
            n: (float(a), float(b))
            for n, (a, b) in zip(names, bootstrap_intervals(values), strict=True)
        },
        depth=depth,
        seconds=seconds,
    )


def parse_measures(names: Sequence[str]) -> tuple[str, ...]:
    """Return the measure names without duplicates; ConfigError for unknown measures."""
    measures = tuple(dict.fromkeys(name.strip() for name in names))
    supported = "R@k, P@k, Success@k, AP[@k], RR[@k], nDCG[@k] and Rprec, where k is at least 1"
    problems = []
    for name in measures:
        if not _MEASURE.fullmatch(name):
            problems.append(f"measures: unknown measure {name!r}; available: {supported}")
    if problems:
        raise ConfigError(problems)
    return measures


def measure(
    names: Sequence[str], questions: Sequence[Task], rankings: Sequence[Ranking]
) -> NDArray[np.float64]:
    """Return each ranking's measures, (n_questions, n_measures); an empty ranking scores 0.

    TREC tools sort by score in single precision, so scores are made strictly decreasing to keep the
    ranks.
    """
    import ir_measures

    qrels = []
    run = []
    for i, (question, ranking) in enumerate(zip(questions, rankings, strict=True)):
        for doc_id, grade in question.grades.items():
            qrels.append(ir_measures.Qrel(str(i), doc_id, grade))
        scores = _scores(question, ranking)
        decreasing = strictly_decreasing(scores.values())
        for doc_id, score in zip(scores, decreasing, strict=True):
            run.append(ir_measures.ScoredDoc(str(i), doc_id, score))
    values = np.zeros((len(questions), len(names)))
    if run:
        column = {name: i for i, name in enumerate(names)}
        measures = [ir_measures.parse_measure(name) for name in names]
        for metric in ir_measures.iter_calc(measures, qrels, run):
            values[int(metric.query_id), column[str(metric.measure)]] = metric.value
    return values


def _scores(question: Task, ranking: Ranking) -> dict[str, float]:
    doc_ids = [passage.doc_id for passage in ranking]
    return gold_scores(question, doc_ids, [passage.score for passage in ranking])
