"""Lists of the viewer: questions, groups without spread, pairs, and missing gold documents.

A list is one query over the index with filters, an order and a page. The same definition serves
pages and CSV files.
"""

from __future__ import annotations

import csv
import io
import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from leret.core.errors import ConfigError
from leret.viewer.index import RunIndex

PAGE = 50
_CSV_ROWS = 2000
_FORMULA = re.compile(
    r"[\s\x00-\x20\xad\u200b-\u200f\u2060-\u2064\ufeff]*"
    r"[=+@\-\u2212\ufe62\ufe63\ufe66\ufe6b\uff0b\uff0d\uff1d\uff20]|[\t\r\n]"
)
"""Start of a text that a spreadsheet may run: the signs in any width, also after spaces and
invisible characters."""
_SORTABLE = ("question", "policy", "reason")  # and numbers


@dataclass(frozen=True)
class Filter:
    """A field of the filter form.

    ``sql`` is its condition, or the condition of each option; empty: no condition.
    """

    name: str
    label: str
    sql: str | Mapping[str, str] = ""
    kind: str = "text"  # text, number, choice, or system


@dataclass(frozen=True)
class Listing:
    """A list.

    ``columns`` map a name to its label and SQL; a label that starts with ``#`` marks a number.
    """

    title: str
    note: str
    source: str
    columns: Mapping[str, tuple[str, str]]
    filters: Sequence[Filter]
    key: str  # row id, and the default order
    links: str  # columns that links need
    where: str = "true"

    @property
    def sortable(self) -> list[str]:
        return [
            name
            for name, (label, _) in self.columns.items()
            if label[0] == "#" or name in _SORTABLE
        ]


_SEARCH = Filter(
    "search",
    "search",
    "(instr(lower(q.text), lower(:search)) OR instr(lower(q.question_id), lower(:search)))",
)
_REASONS = {
    "no rewards": "g.rewarded = 0",
    "equal completions": "g.texts = 1",
    "all find every gold document": "g.least_recall = 1",
    "none finds a gold document": "g.recall = 0",
    "equal rewards": "true",
}
_REASON = f"CASE {' '.join(f'WHEN {sql} THEN {reason!r}' for reason, sql in _REASONS.items())} END"
_SYSTEM_RECALL = "(SELECT max(r.recall) FROM facts.results r WHERE r.question_id = q.question_id)"

_RETRIEVED = (
    "SELECT value FROM policies p CROSS JOIN run.samples s ON s.policy_digest = p.digest AND "
    "s.question_id = q.question_id, json_each(s.doc_ids) "
    "UNION SELECT value FROM facts.results r, json_each(r.doc_ids) WHERE r.question_id = "
    "q.question_id"
)
_MISSING = (
    "(SELECT group_concat(ifnull(nullif(d.title, ''), g.doc_id) || iif(g.in_corpus = 0, ' (not in "
    "the corpus)', ''), '; ') "
    "FROM facts.gold g LEFT JOIN facts.documents d ON d.doc_id = g.doc_id WHERE g.question_id = "
    f"q.question_id AND g.doc_id NOT IN (SELECT ifnull(d.parent, value) FROM ({_RETRIEVED}) "
    "LEFT JOIN facts.documents d ON d.doc_id = value))"
)

LISTS = {
    "questions": Listing(
        "Questions",
        "All sampled and evaluated questions. A and B are evaluated systems, compared after the "
        "last hop by AP (by the first measure if there are no gold documents).",
        "questions q LEFT JOIN facts.ends a ON a.system = :a AND a.question_id = q.question_id "
        "LEFT JOIN facts.ends b ON b.system = :b AND b.question_id = q.question_id",
        {
            "question": ("question", "q.text"), "steps": ("#steps", "nullif(q.steps, 0)"),
            "n": ("#samples", "nullif(q.n, 0)"), "best": ("#best reward", "q.best"), "mean": ("#mean", "q.mean"),
            "spread": ("#spread", "q.spread"), "failures": ("#failures", "nullif(q.failures, 0)"),
            "a": ("#A", "a.value"), "b": ("#B", "b.value"),
            "difference": ("#A - B", "a.value - b.value"),
        },
        (
            _SEARCH,
            Filter("steps", "steps", "q.steps = :steps", "number"),
            Filter("min", "best reward from", "q.best >= :min", "number"),
            Filter("max", "to", "q.best <= :max", "number"),
            Filter("spread", "spread", {"yes": "q.spread > 0", "no": "q.spread = 0"}, "choice"),
            Filter("failures", "failures", {"yes": "q.failures > 0", "no": "q.failures = 0"}, "choice"),
            Filter("a", "A", kind="system"),
            Filter("b", "B", kind="system"),
            Filter("change", "A against B", {
                "improved": "a.value > b.value", "worsened": "a.value < b.value",
                "equal": "a.value = b.value", "failed": "(a.system NOTNULL AND a.value IS NULL)",
            }, "choice"),
        ),
        "q.rowid",
        "q.question_id",
    ),
    "groups": Listing(
        "Groups without spread",
        "States at which all samples of a policy have the same reward, so that they teach nothing.",
        "groups g LEFT JOIN questions q ON q.question_id = g.question_id "
        "LEFT JOIN policies p ON p.digest = g.policy_digest",
        {
            "question": ("question", "q.text"), "step": ("#step", "g.step + 1"), "policy": ("policy", "p.name"),
            "n": ("#samples", "g.n"), "texts": ("#distinct", "g.texts"), "best": ("#reward", "g.best"),
            "failures": ("#failures", "nullif(g.failures, 0)"), "reason": ("reason", _REASON),
        },
        (
            _SEARCH,
            Filter("step", "step", "g.step + 1 = :step", "number"),
            Filter("reason", "reason", {reason: f"{_REASON} = '{reason}'" for reason in _REASONS}, "choice"),
        ),
        "g.rowid",
        "g.question_id, g.state_id",
        "g.sampled AND g.best IS g.worst",
    ),
    "pairs": Listing(
        "Preference pairs",
        "Pairs in preferences/, as used for training.",
        "facts.pairs p LEFT JOIN questions q ON q.question_id = p.question_id "
        "LEFT JOIN run.samples c ON c.id = p.chosen_id LEFT JOIN run.samples r ON r.id = "
        "p.rejected_id",
        {
            "question": ("question", "q.text"), "step": ("#step", "p.step + 1"), "chosen": ("chosen", "c.completion"),
            "rejected": ("rejected", "r.completion"), "margin": ("#margin", "p.margin"),
        },
        (
            _SEARCH,
            Filter("step", "step", "p.step + 1 = :step", "number"),
            Filter("min", "margin from", "p.margin >= :min", "number"),
        ),
        "p.rowid",
        "p.question_id, p.state_id, p.chosen_id, p.rejected_id, p.chosen_id AS sample_id",
    ),
    "coverage": Listing(
        "Coverage",
        "Questions with gold documents that no sample and no system retrieved.",
        "questions q",
        {
            "question": ("question", "q.text"), "recall": ("#best recall, samples", "q.recall"),
            "systems": ("#best recall, systems", _SYSTEM_RECALL), "missing": ("gold documents not retrieved", _MISSING),
        },
        (
            _SEARCH,
            Filter("corpus", "in the corpus", {
                "no": "EXISTS (SELECT 1 FROM facts.gold g WHERE g.question_id = q.question_id AND g.in_corpus = 0)",
            }, "choice"),
        ),
        "q.rowid",
        "q.question_id",
        f"max(ifnull(q.recall, 0), ifnull({_SYSTEM_RECALL}, 0)) < 1 "
        "AND EXISTS (SELECT 1 FROM facts.gold g WHERE g.question_id = q.question_id)",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """A list with the filters, the order and the page of a request."""

    listing: Listing
    values: Mapping[str, Any]  # by filter; None if not set
    order: str
    where: str
    page: int  # from 0

    def ids(self, index: RunIndex) -> array[int]:
        """Return the row ids of the whole list, in order."""
        sql = (
            f"SELECT {self.listing.key} FROM {self.listing.source} WHERE {self.where} ORDER BY "
            f"{self.order}"
        )
        return index.cached(sql, self.values, lambda rows: array("q", (row[0] for row in rows)))

    def rows(self, index: RunIndex, ids: array[int]) -> list[dict[str, Any]]:
        """Return the rows with these ids, in order."""
        columns = ", ".join(f"{sql} AS {name}" for name, (_, sql) in self.listing.columns.items())
        source = (
            f"json_each(:ids) page CROSS JOIN {self.listing.source} WHERE {self.listing.key} = "
            "page.value"
        )
        sql = f"SELECT {columns}, {self.listing.links} FROM {source} ORDER BY page.key"
        values = {**self.values, "ids": json.dumps(ids.tolist())}
        return [dict(row) for row in index.read(sql, values)]

    def csv(self, index: RunIndex) -> Iterator[str]:
        """Yield the whole list as CSV in blocks of lines."""
        names = ["question_id", *self.listing.columns]
        cells = itemgetter(*names)
        ids = self.ids(index)
        yield csv_lines([names])
        for start in range(0, len(ids), _CSV_ROWS):
            rows = self.rows(index, ids[start : start + _CSV_ROWS])
            yield csv_lines([cells(row) for row in rows])


def select(
    name: str, query: Mapping[str, str], systems: Sequence[str], defaults: Mapping[str, str]
) -> Selection:
    """Read a list's filters, order (``sort``, ``desc``) and page from a URL.

    ConfigError for an invalid value.
    """
    listing = LISTS[name]
    values: dict[str, Any] = {}
    conditions = [listing.where]
    for field in listing.filters:
        text = query.get(field.name, "")
        if not text:
            values[field.name] = defaults.get(field.name)
            continue
        values[field.name] = _value(field, text, systems)
        condition = field.sql if isinstance(field.sql, str) else field.sql[text]
        if condition:
            conditions.append(condition)
    order = listing.key
    sort = query.get("sort", "")
    if sort:
        if sort not in listing.sortable:
            available = ", ".join(listing.sortable)
            raise ConfigError(f"sort: unknown column {sort!r}; available: {available}")
        _, column = listing.columns[sort]
        direction = "DESC" if query.get("desc") else "ASC"
        order = f"{column} {direction} NULLS LAST, {listing.key}"
    page = query.get("page") or "1"
    if not (page.isascii() and page.isdecimal() and int(page[:9]) > 0):
        raise ConfigError(f"page: {page!r} is not a page number; use 1 or more")
    return Selection(listing, values, order, " AND ".join(conditions), int(page[:9]) - 1)


def _value(field: Filter, text: str, systems: Sequence[str]) -> Any:
    options: Sequence[str] | None = None
    if field.kind == "system":
        options = systems
    elif isinstance(field.sql, Mapping):
        options = list(field.sql)
    if options is not None and text not in options:
        raise ConfigError(f"{field.name}: unknown value {text!r}; available: {', '.join(options)}")
    if field.kind != "number":
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{field.name}: {text!r} is not a number") from None


def csv_lines(rows: Sequence[Sequence[Any]]) -> str:
    """Return rows as CSV, without texts that a spreadsheet would run as formulas."""
    lines: list[str] = []
    for row in rows:
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\r\n")  # so that \r and \n are put in quotes
        writer.writerow(map(_safe, row))
        lines.append(file.getvalue().removesuffix("\r\n") + "\n")
    return "".join(lines)


def _safe(cell: Any) -> Any:
    if isinstance(cell, str) and _FORMULA.match(cell):
        return f"'{cell}"
    return cell
