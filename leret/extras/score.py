"""Score the answers in a file against references, with 95% intervals.

    python -m leret.extras.score FILE [--references FILE] [--measures f1,bleu] [--field NAME] [--json]

A file is text with one answer per line, or has records (JSON lines, a JSON array, CSV, Parquet),
such as ``eval/SYSTEM/answers.jsonl``. Records are matched by ``id`` if both files have ids, and
otherwise by their order. A blank answer is an empty answer, which is scored; null is a failure,
which is not. A blank reference is none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leret.config.evaluation import EvalRecipe
from leret.config.load import flag_settings
from leret.core.errors import ConfigError, DataError, LeretError
from leret.core.types import Outcome, Task
from leret.core.yaml import parse
from leret.datasets.formats.base import answers as reference_answers
from leret.datasets.formats.base import names_in
from leret.datasets.records import BadRecord, Problems, open_compressed, records
from leret.evaluation.measures import corpus_measures, scorings
from leret.evaluation.statistics import (
    Resampling,
    bootstrap_intervals,
    corpus_interval,
    json_number,
    nan_mean,
)
from leret.rewards.answers import answer_of

_ANSWERS = ("prediction", "answer", "reply", "text")
_REFERENCES = ("references", "answers", "reference", "answer", "text")
_Entry = tuple[str | None, Any]
"""Id, and an answer (None after a failure, or several texts) or references."""

_RECORDS = (".json", ".jsonl", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class ScoreReport:
    """Values of the measures with their intervals.

    ``n_failed`` answers are null, and ``n_without_reference`` have no reference answer; both are
    not scored.
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
        DataError: a file cannot be read, or the files do not have the same ids or numbers of
            answers.
        ConfigError: a measure is unknown or applies to none of the answers.
    """
    names = (field,) if field else _ANSWERS
    answers = _read(predictions, lambda record: _answer(record, names), str)
    texts = _read(references, _references, _line_answers)
    outcomes = []
    for i, (answer, expected) in enumerate(_matched(answers, texts, predictions, references)):
        outcomes.append(Outcome(Task(str(i), {}, answers=expected), prediction=answer))
    measures = scorings(recipe.specs, "--measures")
    corpus = corpus_measures(recipe.specs)
    resampling = Resampling(recipe.resamples, recipe.confidence, recipe.seed)
    values: dict[str, float | None] = {}
    intervals: dict[str, list[float | None]] = {}
    for name, measure in measures.items():
        if not any(measure.applies(outcome.task) for outcome in outcomes):
            raise ConfigError(
                f"--measures: {name} does not apply to answers and references; "
                "choose another measure"
            )
        scores = [measure(outcome) for outcome in outcomes]
        if name in corpus:
            whole, read = corpus[name]
            scored = [
                outcome
                for outcome, value in zip(outcomes, scores, strict=True)
                if value is not None
            ]
            predicted = [answer_of(outcome, read) or "" for outcome in scored]
            rows = whole.rows(predicted, [outcome.task.answers for outcome in scored])
            values[name] = json_number(whole.value(rows)) if scored else None
            intervals[name] = corpus_interval(rows, whole, resampling)
        else:
            column = np.array(scores, dtype=float)[:, None]  # None is NaN
            values[name] = json_number(nan_mean(column)[0])
            [bounds] = bootstrap_intervals(column, *resampling)
            intervals[name] = [json_number(bound) for bound in bounds]
    n_failed = sum(outcome.prediction is None for outcome in outcomes)
    n_without_reference = sum(not outcome.task.answers for outcome in outcomes)
    return ScoreReport(len(outcomes), n_failed, n_without_reference, values, intervals)


def _line_answers(line: str) -> tuple[str, ...]:
    return (line,) if line.strip() else ()


def _references(record: Mapping[str, Any]) -> Any:
    return reference_answers(record, _column(record, _REFERENCES))


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
    problems = Problems()
    entries: list[_Entry] = []
    for record in records(path, problems):
        id = record.value.get("id")
        if isinstance(id, str) and not id.strip():
            id = None
        try:
            value = of_record(record.value)
        except BadRecord as problem:
            problems.add(record.place, problem)
        else:
            entries.append((None if id is None else str(id), value))
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
    """Pair answers with references, by id if both have ids, or else by order.

    DataError if any has no partner.
    """
    answer_of_id = _by_id(answers, predictions)
    reference_of_id = _by_id(references, source)
    if None in answer_of_id or None in reference_of_id:
        if len(answers) != len(references):
            without_ids = predictions if None in answer_of_id else source
            raise DataError(
                f"{predictions} has {len(answers)} answers, but {source} has {len(references)} "
                f"references; add ids to {without_ids}, or write the same number in the same order"
            )
        pairs = zip(answers, references, strict=True)
        return [(answer, reference) for (_, answer), (_, reference) in pairs]
    _refuse_unmatched(answer_of_id, reference_of_id, predictions, source)
    _refuse_unmatched(reference_of_id, answer_of_id, source, predictions)
    return [(answer, reference_of_id[id]) for id, answer in answers]


def _by_id(entries: list[_Entry], path: Path) -> dict[str | None, Any]:
    """Map ids to values; the only key is None if no record has an id."""
    by_id = dict(entries)
    if None in by_id and len(by_id) > 1:
        raise DataError(
            f"{path}: some records have an id and others have none; add the missing ids"
        )
    if None not in by_id and len(by_id) < len(entries):
        counts = Counter(id for id, _ in entries)
        twice = next(id for id, n in counts.items() if n > 1)
        raise DataError(f"{path}: id {twice!r} occurs more than once; keep one answer per id")
    return by_id


def _refuse_unmatched(
    values: Mapping[str | None, Any],
    partners: Mapping[str | None, Any],
    path: Path,
    partner_path: Path,
) -> None:
    missing = [id for id in values if id not in partners]
    if missing:
        raise DataError(
            f"{len(missing)} ids of {path} are not in {partner_path}, for example {missing[0]!r}; "
            "add or remove them"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser("python -m leret.extras.score", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("answers", type=Path, metavar="FILE")
    parser.add_argument("--references", type=Path, metavar="FILE", help="default: FILE")
    parser.add_argument("--measures", default="f1", help="names, or a YAML list as in a recipe")
    parser.add_argument("--field", metavar="NAME", help="column with the answers")
    parser.add_argument("--resamples", type=int, default=10_000, help="bootstrap resamples")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args(arguments)
    try:
        names: Any = [name.strip() for name in flags.measures.split(",")]
        if flags.measures.lstrip().startswith(("[", "{")):
            names = parse(flags.measures, "--measures").value
        values = {"measures": names, "resamples": flags.resamples, "seed": flags.seed}
        recipe = flag_settings(EvalRecipe, values, {name: f"--{name}" for name in values})
        report = score(flags.answers, flags.references or flags.answers, recipe, flags.field)
    except LeretError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: stopped; run the same command again", file=sys.stderr)
        return 130
    _print(report, flags.json)
    return 0


def _print(report: ScoreReport, as_json: bool) -> None:
    if as_json:
        return print(json.dumps(asdict(report)))
    for name, value in report.measures.items():
        low, high = report.intervals[name]
        text = "-" if value is None else f"{value:.4f}"
        print(f"{name:20} {text}" if low is None else f"{name:20} {text} [{low:.4f}, {high:.4f}]")
    print(
        f"{report.n_answers:,} answers; {report.n_failed:,} are null and "
        f"{report.n_without_reference:,} have no reference, which are not scored"
    )


if __name__ == "__main__":
    sys.exit(main())
