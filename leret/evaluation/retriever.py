"""Measures of rankings by ir_measures, under the names that the field knows them by."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leret.core.errors import ConfigError, DataError, RunError
from leret.core.files import write_atomically
from leret.core.progress import Progress, Silent
from leret.core.types import Ranking, Task
from leret.datasets.records import Problems, records
from leret.evaluation.results import strictly_decreasing, write_qrels, write_run
from leret.evaluation.statistics import bootstrap_intervals
from leret.retrieval.base import Retriever
from leret.retrieval.fusion import reciprocal_rank_fusion

_OURS = {"R": "recall", "AP": "ap", "RR": "rr", "nDCG": "ndcg", "Success": "success"}
"""ir_measures' name of a measure, and that of our reward function."""

_OTHERS = ("P", "Rprec")
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()} | {"map": "AP", "mrr": "RR", "precision": "P"}


def parse_measures(names: Sequence[str]) -> dict[str, Any]:
    """Measures of ir_measures (``R@10``, ``AP``) or leret's rewards (``recall@10``) by their canonical names, in order.

    A ConfigError lists all that are none.
    """
    import ir_measures

    found: dict[str, Any] = {}
    problems = []
    for name in names:
        base, at, text = name.strip().partition("@")
        base, cut = _THEIRS.get(base, base), int(text) if text.isdecimal() and len(text) < 10 else 0
        if base not in {*_OURS, *_OTHERS} or (at and not cut) or (base == "Rprec" and at):
            such = f"{', '.join([*_OURS, *_OTHERS])}, as in R@10 and AP, with cut-offs of 1 and more"
            problems.append(f"measures: {name!r} is none; there are {such}")
        elif base in {"R", "P", "Success"} and not at:
            problems.append(f"measures: {name} needs a cut-off; write {base}@10, say")
        else:
            measure = ir_measures.parse_measure(f"{base}@{cut}" if at else base)
            found[str(measure)] = measure
    if problems or not found:
        raise ConfigError(problems or "measures: none is named; write R@10,AP, say")
    return found


def values(measures: Mapping[str, Any], questions: Sequence[Task], rankings: Sequence[Ranking]) -> NDArray[np.float64]:
    """Every measure of every question: (n_questions, n_measures); an empty ranking counts with 0.

    Readers of TREC runs sort by score in single precision, so scores are made strictly decreasing.
    """
    import ir_measures

    column = {name: i for i, name in enumerate(measures)}
    qrels = [
        ir_measures.Qrel(str(place), doc_id, grade)
        for place, question in enumerate(questions)
        for doc_id, grade in question.grades.items()
    ]
    run = [
        ir_measures.ScoredDoc(str(place), passage.doc_id, score)
        for place, ranking in enumerate(rankings)
        for passage, score in zip(ranking, strictly_decreasing([p.score for p in ranking]), strict=True)
    ]
    found = np.zeros((len(questions), len(measures)))
    if run:
        for metric in ir_measures.iter_calc(list(measures.values()), qrels, run):
            found[int(metric.query_id), column[str(metric.measure)]] = metric.value
    return found


_BATCH = 256
_DEPTH = 100
"""Documents of a ranking where a measure looks at all of them."""


@dataclass(frozen=True)
class RetrieverReport:
    """What a retriever reached: ``values`` are (n_questions, n_measures), the measures their means, with intervals.

    ``system`` says what was searched for: raw-question, rewritten, or fused.
    """

    system: str
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
        """Questions for which nothing was found."""
        return sum(not ranking for ranking in self.rankings)

    @property
    def finds_gold(self) -> bool:
        """Was a gold document found, of any question?"""
        pairs = zip(self.questions, self.rankings, strict=True)
        return any(passage.doc_id in question.gold for question, ranking in pairs for passage in ranking)

    def brief(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {"n_questions": len(self.questions), "measures": dict(self.measures)}

    def save(self, directory: Path) -> None:
        """Write summary.json, run.trec, qrels.trec and per_question.jsonl."""
        rankings = (
            (question.id, [p.doc_id for p in ranking], [p.score for p in ranking])
            for question, ranking in zip(self.questions, self.rankings, strict=True)
        )
        rows = (
            json.dumps({"id": q.id, **dict(zip(self.measures, map(float, values), strict=True))}) + "\n"
            for q, values in zip(self.questions, self.values, strict=True)
        )
        summary = {
            **self.brief(),
            "intervals": {name: list(bounds) for name, bounds in self.intervals.items()},
            "system": self.system,
            "retriever": self.retriever,
            "depth": self.depth,
            "n_empty": self.n_empty,
            "seconds": round(self.seconds, 3),
        }
        try:
            write_run(directory / "run.trec", self.system, rankings)
            write_qrels(directory / "qrels.trec", self.questions)
            write_atomically(directory / "per_question.jsonl", "".join(rows))
            write_atomically(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            raise RunError(f"{directory} cannot be written ({error.strerror or error}); name another --out") from error


def evaluate_retriever(
    retriever: Retriever,
    questions: Sequence[Task],
    measures: Sequence[str],
    *,
    rewrites: Mapping[str, str] | None = None,
    fuse: bool = False,
    depth: int | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    progress: Progress | None = None,
) -> RetrieverReport:
    """Search for every question, and measure what is found.

    With ``rewrites``, queries by question id, these are searched for in the place of the questions. With ``fuse`` both
    are, and their rankings fused by reciprocal rank; both are asked for 100 documents at least, so that up to there a
    measure is the same whatever other measures are named. ``depth`` is as for `depth_for`; the rest is the bootstrap's.

    Raises:
        DataError: a question has no gold documents, or no rewrite.
        ConfigError: there is no measure of a name, or one looks deeper than ``depth``.
    """
    wanted = parse_measures(measures)
    _check(questions, rewrites)
    depth = depth_for(list(wanted), depth)
    asked = max(depth, _DEPTH) if fuse else depth
    texts = [question.text for question in questions]
    rewritten = None if rewrites is None else [rewrites[question.id] for question in questions]
    began = time.monotonic()
    progress = progress or Silent()
    progress.start("searching", len(questions))
    rankings: list[Ranking] = []
    for start in range(0, len(questions), _BATCH):
        batch = slice(start, start + _BATCH)
        found = retriever.search((rewritten or texts)[batch], asked)
        if fuse and rewritten is not None:
            raw = retriever.search(texts[batch], asked)
            found = [reciprocal_rank_fusion(pair, (1, 1))[:depth] for pair in zip(raw, found, strict=True)]
        rankings += found
        progress.advance(len(found))
    progress.finish()
    seconds = time.monotonic() - began
    scores = values(wanted, questions, rankings)
    means = {name: float(scores[:, i].sum() / len(questions)) for i, name in enumerate(wanted)}
    bounds = bootstrap_intervals(scores, resamples, seed=seed)
    return RetrieverReport(
        system="raw-question" if rewritten is None else "fused" if fuse else "rewritten",
        retriever=retriever.digest,
        questions=tuple(questions),
        rankings=tuple(rankings),
        measures=means,
        values=scores,
        intervals={name: (float(low), float(high)) for name, (low, high) in zip(wanted, bounds, strict=True)},
        depth=depth,
        seconds=seconds,
    )


def depth_for(measures: Sequence[str], depth: int | None = None) -> int:
    """Documents of a ranking that measures need; by default the deepest cut-off, 100 where a measure has none.

    A measure that looks deeper than ``depth`` is refused.
    """
    cuts = {name: int(cut) if (cut := name.partition("@")[2]) else None for name in measures}
    if depth is None:
        return max(cut or _DEPTH for cut in cuts.values())
    deeper = [name for name, cut in cuts.items() if cut is not None and cut > depth]
    if deeper:
        raise ConfigError(
            f"depth: {depth} documents are too few for {', '.join(deeper)}; ask for more, or measure less"
        )
    return depth


def read_rewrites(path: Path) -> dict[str, str]:
    """Queries by question id, from JSON lines ``{"id": ..., "query": ...}``."""
    found: dict[str, str] = {}
    problems = Problems()
    for record in records(path, problems):
        id, query = record.value.get("id"), record.value.get("query")
        if not isinstance(id, str) or not isinstance(query, str) or id in found:
            what = str(record.value)[:60]
            raise DataError(f'{record.place}: write {{"id": ..., "query": ...}}, texts both, and an id once: {what}')
        found[id] = query
    problems.check(str(path), skip_invalid=False, any_good=False)
    return found


def _check(questions: Sequence[Task], rewrites: Mapping[str, str] | None) -> None:
    if not questions:
        raise DataError("there is no question to evaluate on")
    bare = [question.id for question in questions if not question.gold]
    if bare:
        raise DataError(
            f"{len(bare)} of {len(questions)} questions name no relevant document, {bare[0]!r} first; they cannot be "
            "scored: leave them out of the file, or add their relevant_doc_ids"
        )
    lacking = [question.id for question in questions if rewrites is not None and question.id not in rewrites]
    if lacking:
        raise DataError(
            f"{len(lacking)} questions have no rewritten query, {lacking[0]!r} first; add them to --rewrites"
        )
