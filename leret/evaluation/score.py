"""`leret score`: compare the answers in a file with the references in another file.

A file is text with one answer per line, or has records (JSON lines, a JSON array, CSV, Parquet), such as
``eval/SYSTEM/answers.jsonl``. Records are matched by ``id`` if both files have ids, and otherwise by their order. A
blank answer is an empty answer, which is scored; null is a failure, which is not. A blank reference is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError, DataError
from leret.core.types import Outcome, Task
from leret.datasets.formats.base import answers as reference_answers
from leret.datasets.formats.base import names_in
from leret.datasets.records import BadRecord, Problems, open_compressed, records
from leret.evaluation.measures import corpus_measures, scorings
from leret.evaluation.statistics import bootstrap_intervals, corpus_interval, json_number, nan_mean
from leret.rewards.answers import answer_of

_ANSWERS = ("prediction", "answer", "reply", "text")
_REFERENCES = ("references", "answers", "reference", "answer", "text")
_Entry = tuple[
    str | None, Any
]  # id, and an answer (None after a failure, or several texts) or references
_RECORDS = (".json", ".jsonl", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class ScoreReport:
    """Values of the measures with their intervals.

    ``n_failed`` answers are null, and ``n_without_reference`` have no reference answer; both are not scored.
    """

    n_answers: int
    n_failed: int
    n_without_reference: int
    measures: Mapping[str, float | None]
    intervals: Mapping[str, Sequence[float | None]]


def score(
    predictions: Path, references: Path, recipe: EvalRecipe, field: str | None = None
) -> ScoreReport:
    """Score answers with ``recipe.measures``; ``field`` names the column of the answers.

    Raises:
        DataError: a file cannot be read, or the files do not have the same ids or numbers of answers.
        ConfigError: a measure is unknown or applies to none of the answers.
    """
    names = (field,) if field else _ANSWERS
    answers = _read(predictions, lambda record: _answer(record, names), str)
    known = _read(
        references,
        lambda record: reference_answers(record, _column(record, _REFERENCES)),
        _line_answers,
    )
    pairs = _matched(answers, known, predictions, references)
    tasks = [Task(str(i), {}, answers=texts) for i, (_, texts) in enumerate(pairs)]
    outcomes = [
        Outcome(task, prediction=answer) for task, (answer, _) in zip(tasks, pairs, strict=True)
    ]
    measures = scorings(recipe.specs, "--measures")
    corpus, values, intervals = (
        corpus_measures(recipe.specs),
        dict[str, float | None](),
        dict[str, Any](),
    )
    for name, measure in measures.items():
        if not any(map(measure.applies, tasks)):
            raise ConfigError(
                f"--measures: {name} does not apply to answers and references; choose another measure"
            )
        scores = [measure(outcome) for outcome in outcomes]
        if name in corpus:
            whole, read = corpus[name]
            scored = [
                outcome
                for outcome, value in zip(outcomes, scores, strict=True)
                if value is not None
            ]
            rows = whole.rows(
                [answer_of(one, read) or "" for one in scored], [one.task.answers for one in scored]
            )
            values[name] = json_number(whole.value(rows)) if scored else None
            intervals[name] = corpus_interval(rows, whole, recipe)
        else:
            column = np.array([[np.nan if value is None else value] for value in scores])
            values[name] = json_number(nan_mean(column)[0])
            bounds = bootstrap_intervals(column, recipe.resamples, recipe.confidence, recipe.seed)
            intervals[name] = list(map(json_number, bounds[0]))
    n_failed = sum(answer is None for answer, _ in pairs)
    n_without_reference = sum(not texts for _, texts in pairs)
    return ScoreReport(len(pairs), n_failed, n_without_reference, values, intervals)


def _line_answers(line: str) -> tuple[str, ...]:
    return (line,) if line.strip() else ()


def _answer(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    value = record[_column(record, names)]
    if value is not None and not isinstance(value, str | dict):
        raise BadRecord("wrong type", f"the answer is {value!r:.60}; it should be a text")
    return value


def _column(record: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in record:
            return name
    expected = " or ".join(map(repr, names))
    raise BadRecord("missing field", f"no field {expected}; the fields are {names_in(record)}")


def _read(
    path: Path, of_record: Callable[[Mapping[str, Any]], Any], of_line: Callable[[str], Any]
) -> list[_Entry]:
    """Return the entries of a file, in order."""
    if not any(suffix in path.suffixes for suffix in _RECORDS):
        return [(None, of_line(line)) for line in _lines(path)]
    problems, entries = Problems(), list[_Entry]()
    for record in records(path, problems):
        id = record.value.get("id")
        if isinstance(id, str) and not id.strip():
            id = None
        try:
            entries.append((None if id is None else str(id), of_record(record.value)))
        except BadRecord as problem:
            problems.add(record.place, problem)
    problems.check(str(path), skip_invalid=False)
    return entries


def _lines(path: Path) -> list[str]:
    """Return all lines of a text file, blank ones too."""
    with open_compressed(path) as file:
        try:
            text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8"
            ) from error
    if not text:
        raise DataError(f"{path} is empty; write one answer per line")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _matched(
    answers: list[_Entry], references: list[_Entry], predictions: Path, source: Path
) -> list[tuple[Any, Any]]:
    """Pair answers with references, by id if both have ids, or else by order; DataError if any has no partner."""
    sides = [
        (dict(entries), entries, path)
        for entries, path in ((answers, predictions), (references, source))
    ]
    for known, entries, path in sides:
        if None in known and len(known) > 1:
            raise DataError(
                f"{path}: some records have an id and others have none; add the missing ids"
            )
        if None not in known and len(known) < len(entries):
            twice = next(id for id, n in Counter(id for id, _ in entries).items() if n > 1)
            raise DataError(f"{path}: id {twice!r} occurs more than once; keep one answer per id")
    mine, theirs = (known for known, *_ in sides)
    if None in mine or None in theirs:
        if len(answers) != len(references):
            raise DataError(
                f"{predictions} has {len(answers)} answers, but {source} has {len(references)} references; add ids to "
                f"{predictions if None in mine else source}, or write the same number in the same order"
            )
        return [(one[1], other[1]) for one, other in zip(answers, references, strict=True)]
    for one, other, path, place in (
        (mine, theirs, predictions, source),
        (theirs, mine, source, predictions),
    ):
        if missing := [id for id in one if id not in other]:
            raise DataError(
                f"{len(missing)} ids of {path} are not in {place}, for example {missing[0]!r}; add or remove them"
            )
    return [(answer, theirs[id]) for id, answer in answers]
