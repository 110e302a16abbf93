"""`leret score`: measures of the answers in a file, compared with the references in another file.

A file is text with one answer per line, or has records (JSON lines, a JSON array, CSV, Parquet), such as
``eval/SYSTEM/answers.jsonl``. Records are matched by ``id`` if both files have ids, and otherwise by their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError, DataError
from leret.core.types import Outcome, Task
from leret.datasets.formats.base import text_list
from leret.datasets.records import BadRecord, Problems, open_compressed, records
from leret.evaluation.measures import corpus_measures, scorings
from leret.evaluation.statistics import bootstrap_intervals, corpus_interval, json_number, nan_mean
from leret.rewards.answers import answer_of

_ANSWERS = ("prediction", "answer", "reply", "text")
_REFERENCES = ("references", "answers", "reference", "answer", "text")
_RECORDS = (".json", ".jsonl", ".csv", ".tsv", ".parquet")


class Entry(NamedTuple):
    """An answer (None after a failure, or a mapping of texts) or the references of one task."""

    place: str
    id: str | None
    value: Any


@dataclass(frozen=True)
class ScoreReport:
    """Values of the measures with their intervals. ``n_failed`` answers are null, and not scored."""

    n_answers: int
    n_failed: int
    measures: Mapping[str, float | None]
    intervals: Mapping[str, Sequence[float | None]]


def score(predictions: Path, references: Path, recipe: EvalRecipe, field: str | None = None) -> ScoreReport:
    """Score answers with ``recipe.measures``; ``field`` names the column of the answers.

    Raises:
        DataError: a file cannot be read, or the files do not have the same ids or numbers of answers.
        ConfigError: a measure is unknown or applies to none of the answers.
    """
    names = (field,) if field else _ANSWERS
    pairs = matched(read_answers(predictions, names), read_references(references), predictions, references)
    tasks = [Task(answer.id or str(i), {}, answers=given.value) for i, (answer, given) in enumerate(pairs)]
    outcomes = [Outcome(task, prediction=answer.value) for task, (answer, _) in zip(tasks, pairs, strict=True)]
    corpus, values, intervals = corpus_measures(recipe.specs), dict[str, float | None](), dict[str, Any]()
    for name, measure in scorings(recipe.specs, "--measures").items():
        if not any(map(measure.applies, tasks)):
            raise ConfigError(f"--measures: {name} does not apply to answers and references; choose another measure")
        scores = [measure(outcome) for outcome in outcomes]
        if name in corpus:
            whole, read = corpus[name]
            known = [outcome for outcome, value in zip(outcomes, scores, strict=True) if value is not None]
            rows = whole.rows([answer_of(one, read) or "" for one in known], [one.task.answers for one in known])
            values[name] = json_number(whole.value(rows)) if known else None
            intervals[name] = corpus_interval(rows, whole, recipe)
        else:
            column = np.array([[np.nan if value is None else value] for value in scores])
            values[name] = json_number(nan_mean(column)[0])
            bounds = bootstrap_intervals(column, recipe.resamples, recipe.confidence, recipe.seed)
            intervals[name] = list(map(json_number, bounds[0]))
    return ScoreReport(len(pairs), sum(outcome.prediction is None for outcome in outcomes), values, intervals)


def read_answers(path: Path, names: Sequence[str]) -> list[Entry]:
    """Return the answers in a file, in order; ``names`` are the columns to look for in its records."""

    def answer(record: Mapping[str, Any]) -> Any:
        value = record[_column(record, names)]
        if value is not None and not isinstance(value, str | dict):
            raise BadRecord("wrong type", f"the answer is {value!r:.60}; it should be a text")
        return value

    return _entries(path, answer) or [Entry(place, None, line) for place, line in _lines(path)]


def read_references(path: Path) -> list[Entry]:
    """Return the reference answers in a file, in order, each as a tuple of texts."""
    entries = _entries(path, lambda record: text_list(record, _column(record, _REFERENCES)))
    return entries or [Entry(place, None, (line,)) for place, line in _lines(path)]


def _column(record: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in record:
            return name
    fields = ", ".join(map(repr, record))
    raise BadRecord("missing field", f"no field {' or '.join(map(repr, names))}; the fields are {fields}")


def _entries(path: Path, read: Any) -> list[Entry]:
    """Return the records of a file; empty if it is text."""
    if not any(suffix in path.suffixes for suffix in _RECORDS):
        return []
    problems, entries = Problems(), list[Entry]()
    for record in records(path, problems):
        id = record.value.get("id")
        try:
            entries.append(Entry(record.place, None if id is None else str(id), read(record.value)))
        except BadRecord as problem:
            problems.add(record.place, problem)
    problems.check(str(path), skip_invalid=False)
    return entries


def _lines(path: Path) -> list[tuple[str, str]]:
    """Return all lines of a text file, blank ones too, with their places."""
    with open_compressed(path) as file:
        try:
            text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    lines = text.removesuffix("\n").split("\n")
    if not text:
        raise DataError(f"{path} is empty; write one answer per line")
    return [(f"{path}:{number}", line.removesuffix("\r")) for number, line in enumerate(lines, 1)]


def matched(
    answers: Sequence[Entry], references: Sequence[Entry], predictions: Path, source: Path
) -> list[tuple[Entry, Entry]]:
    """Pair answers with references, by id if both have ids, or else by order; DataError if any has no partner."""
    for entries, path in ((answers, predictions), (references, source)):
        known = [entry.id for entry in entries if entry.id is not None]
        if 0 < len(known) < len(entries):
            raise DataError(f"{path}: {len(entries) - len(known)} of {len(entries)} records have no id; add their ids")
        if twice := next((id for id in known if known.count(id) > 1), None) if len(set(known)) < len(known) else None:
            raise DataError(f"{path}: id {twice!r} occurs more than once; keep one answer per id")
    if answers[0].id is None or references[0].id is None:
        if len(answers) != len(references):
            bare = predictions if answers[0].id is None else source
            raise DataError(
                f"{predictions} has {len(answers)} answers, but {source} has {len(references)} references; add ids to "
                f"{bare}, or write the same number in the same order"
            )
        return list(zip(answers, references, strict=True))
    by_id = {entry.id: entry for entry in references}
    ids = {entry.id for entry in answers}
    faults = [
        f"{len(missing)} ids of {one} are not in {other}, for example {missing[0]!r}"
        for one, other, missing in (
            (predictions, source, [id for id in ids if id not in by_id]),
            (source, predictions, [id for id in by_id if id not in ids]),
        )
        if missing
    ]
    if faults:
        raise DataError(f"{'; '.join(faults)}; score the same tasks in both files")
    return [(entry, by_id[entry.id]) for entry in answers]
