"""Scored hops of a system, the Parquet file that stores them, and TREC files for other tools.

Each system has one table with a row per question, sample and hop. The rest of the evaluation reads
only this table.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from leret.core.errors import RunError
from leret.core.files import atomic_file, write_atomically
from leret.core.types import Task


@dataclass(frozen=True, slots=True)
class ScoredHop:
    """One hop (one search) of one run on one question.

    A run has an additional last row if it failed (``failure`` is set, and there are no measures),
    stopped at a completion that does not parse (``unparsed`` is set), or never searched (neither is
    set).

    Attributes:
        hop: hop number, from 1.
        query: query text; if there are several queries, they are joined by spaces. None in the
            additional row.
        completion: completion of the LM call before the search.
        doc_ids: accumulated ranking, best first.
        lm_calls: LM calls since the previous row; the last row of a run includes LM calls after its
            search.
        n_tokens: tokens of these calls, prompts included.
        value: Q-value of a picker's choice before the search.
        prediction: JSON of the program's answer (`leret.rewards.answers.answer_texts`), in the last
            row.
        picked: ids that the program picked, in the last row.
    """

    question_id: str
    type: str | None
    sample: int
    hop: int
    query: str | None
    completion: str | None
    doc_ids: tuple[str, ...]
    scores: tuple[float, ...]
    measures: Mapping[str, float]
    lm_calls: int = 0
    unparsed: bool = False
    failure: str | None = None
    value: float | None = None
    prediction: str | None = None
    picked: tuple[str, ...] = ()
    n_tokens: int = 0


_FIXED = {
    "question_id": pa.string(),
    "type": pa.string(),
    "sample": pa.int32(),
    "hop": pa.int32(),
    "query": pa.string(),
    "completion": pa.string(),
    "doc_ids": pa.list_(pa.string()),
    "scores": pa.list_(pa.float64()),
    "lm_calls": pa.int32(),
    "unparsed": pa.bool_(),
    "failure": pa.string(),
    "value": pa.float64(),
    "prediction": pa.string(),
    "picked": pa.list_(pa.string()),
    "n_tokens": pa.int64(),
}
_TUPLES = ("doc_ids", "scores", "picked")


def write_rows(path: Path, rows: Iterable[ScoredHop], measures: Sequence[str]) -> None:
    """Write per_question.parquet atomically."""
    records = []
    for row in rows:
        record: dict[str, Any] = dict(row.measures)
        for name in _FIXED:
            record[name] = _plain(getattr(row, name))
        records.append(record)
    schema = pa.schema([*_FIXED.items(), *((name, pa.float64()) for name in measures)])
    with atomic_file(path, "wb") as file:
        pq.write_table(pa.Table.from_pylist(records, schema), file)


def read_rows(path: Path) -> list[ScoredHop]:
    """Read the rows written by `write_rows`, in the same order."""
    try:
        return [_row(record) for record in pq.read_table(path).to_pylist()]
    except (OSError, pa.ArrowException, KeyError) as error:
        raise RunError(
            f"{path} cannot be read ({error}); delete {path.parent} and run `leret eval` again"
        ) from error


def _row(record: dict[str, Any]) -> ScoredHop:
    fixed = {name: record.pop(name) for name in _FIXED}
    return ScoredHop(
        **fixed | {name: tuple(fixed[name]) for name in _TUPLES},
        measures={name: value for name, value in record.items() if value is not None},
    )


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def first_runs(rows: Iterable[ScoredHop]) -> dict[str, list[ScoredHop]]:
    """Map each question id to the rows of the first run on the question, in hop order."""
    runs: dict[str, list[ScoredHop]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.hop):
        if row.sample == 0:
            runs[row.question_id].append(row)
    return runs


@dataclass
class SystemResults:
    """Rows of one system; ``key`` is a digest of all inputs that determine the rows."""

    key: str
    rows: list[ScoredHop] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def lm_calls(self) -> int:
        return sum(row.lm_calls for row in self.rows)

    def cost(self, n: int) -> dict[str, float]:
        """Return LM calls, tokens, searches and seconds by ``n``."""
        return {
            "lm_calls": self.lm_calls / n,
            "tokens": sum(row.n_tokens for row in self.rows) / n,
            "searches": sum(row.query is not None for row in self.rows) / n,
            "seconds": round(self.seconds, 3) / n,  # as stored
        }

    def only(self, question_ids: Sequence[str], samples: int) -> SystemResults:
        """Select the runs on ``question_ids``, in this order, that did not fail.

        Runs are numbered from 0; those from ``samples`` are left out.
        """
        failed = {(row.question_id, row.sample) for row in self.rows if row.failure is not None}
        rows = [
            row
            for row in self.rows
            if row.sample < samples and (row.question_id, row.sample) not in failed
        ]
        requested = set(question_ids)
        selection = SystemResults(
            self.key, [row for row in rows if row.question_id in requested], self.seconds
        )
        selection.sort(question_ids)
        return selection

    def sort(self, question_ids: Sequence[str]) -> None:
        """Sort the rows by sample, then by question (in the given order), then by hop."""
        order = {question_id: i for i, question_id in enumerate(question_ids)}
        self.rows.sort(key=lambda row: (row.sample, order[row.question_id], row.hop))

    def runs(self) -> set[tuple[str, int]]:
        """Return (question id, sample) for every run."""
        return {(row.question_id, row.sample) for row in self.rows}


def read_results(directory: Path, key: str) -> SystemResults:
    """Read the stored results; return empty results if none are stored or their key differs."""
    try:
        note = json.loads((directory / "evaluated.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return SystemResults(key)
    if not isinstance(note, dict) or note.get("key") != key:
        return SystemResults(key)
    return SystemResults(
        key, read_rows(directory / "per_question.parquet"), float(note.get("seconds", 0.0))
    )


def write_results(directory: Path, results: SystemResults, measures: Sequence[str]) -> None:
    """Write the rows, then evaluated.json with the key of the results."""
    note = directory / "evaluated.json"
    note.unlink(missing_ok=True)
    write_rows(directory / "per_question.parquet", results.rows, measures)
    write_atomically(
        note, json.dumps({"key": results.key, "seconds": round(results.seconds, 3)}) + "\n"
    )


def write_answers(path: Path, questions: Mapping[str, Task], rows: Iterable[ScoredHop]) -> None:
    """Write answers.jsonl with a line per run, if any program returned a text.

    ``prediction`` is null after a failure.

    If the program ended at a completion that does not parse, the prediction is the empty text.
    """
    last = {(row.question_id, row.sample): row for row in rows}
    if any(row.prediction is not None for row in last.values()):
        lines = (_answer(questions[row.question_id], row) for row in last.values())
        text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
        write_atomically(path, _plain(text))


def _answer(question: Task, row: ScoredHop) -> dict[str, Any]:
    inputs = question.inputs if isinstance(question.inputs, dict) else {"question": question.text}
    answer: dict[str, Any] = {
        "id": row.question_id,
        "inputs": inputs,
        "prediction": prediction_of(row),
        "references": question.answers,
        "found": row.doc_ids,
    }
    for name in ("picked", "measures", "sample", "unparsed", "failure"):
        value = getattr(row, name)
        if value:
            answer[name] = value
    return answer


def prediction_of(row: ScoredHop) -> str | dict[str, str] | None:
    """Return the answer of a run, given its last row.

    This is its only text or ``answer``, or else its texts by field.
    """
    texts: str | dict[str, str] | None = None
    if row.prediction is not None:
        texts = json.loads(row.prediction)
    if texts is None and row.unparsed:
        return ""
    if isinstance(texts, dict) and "answer" in texts:
        return texts["answer"]
    if isinstance(texts, dict) and len(texts) == 1:
        return next(iter(texts.values()))
    return texts


_UNSAFE = re.compile(r"[\s%\x00-\x20\x7f-\xa0\u200b\ufeff\ud800-\udfff]")


def escape(text: str) -> str:
    """Escape an id for TREC files, which separate fields by white space.

    `urllib.parse.unquote` reverses the escaping.

    >>> escape("Ed Wood (film) 100%")
    'Ed%20Wood%20(film)%20100%25'
    """
    return _UNSAFE.sub(_percent_code, text)


def _percent_code(match: re.Match[str]) -> str:
    code = match[0].encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in code)


def write_run(path: Path, tag: str, rankings: Iterable[tuple[str, Mapping[str, float]]]) -> None:
    """Write ``qid Q0 docid rank score tag`` lines.

    ``rankings`` are (question id, scores by document id, best first). Scores are made strictly
    decreasing, because other tools sort by score and break ties differently.
    """
    lines = []
    for question_id, scores in rankings:
        decreasing = strictly_decreasing(scores.values())
        for rank, (doc_id, score) in enumerate(zip(scores, decreasing, strict=True), start=1):
            ids = f"{escape(question_id)} Q0 {escape(doc_id)}"
            lines.append(f"{ids} {rank} {score:.9g} {escape(tag)}\n")
    write_atomically(path, "".join(lines))


def gold_scores(
    question: Task, doc_ids: Sequence[str], scores: Sequence[float]
) -> dict[str, float]:
    """Return scores by id, best first.

    Parents replace chunks if the question's gold ids are parents.
    """
    best: dict[str, float] = {}
    for doc_id, score in zip(doc_ids, scores, strict=True):
        best.setdefault(question.parents.get(doc_id, doc_id), score)
    return best


def write_qrels(path: Path, questions: Iterable[Task]) -> None:
    """Write a ``qid 0 docid grade`` line per gold document."""
    lines = []
    for question in questions:
        for doc_id, grade in question.grades.items():
            lines.append(f"{escape(question.id)} 0 {escape(doc_id)} {grade}\n")
    write_atomically(path, "".join(lines))


def strictly_decreasing(scores: Iterable[float]) -> Iterator[float]:
    """Yield scores in single precision, each at least one float32 step below the previous score."""
    last = np.float32(np.inf)
    for score in scores:
        value = np.float32(score)
        if not value < last:
            value = np.nextafter(last, np.float32(-np.inf))
        last = value
        yield float(value)
