"""R/report.html: the overview of a run's pages as one file, with trees of selected questions."""

from __future__ import annotations

import tempfile
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

from leret.core.files import write_atomically
from leret.core.runs import Run
from leret.evaluation.report.comparison import read_summary
from leret.viewer.collect import complete
from leret.viewer.index import RunIndex
from leret.viewer.lists import select
from leret.viewer.pages import Pages, systems_of

MAX_BYTES = 5_000_000
MAX_TREES = 200
_LISTS: tuple[tuple[int, dict[str, str]], ...] = (
    (40, {"change": "improved", "sort": "difference", "desc": "1"}),
    (40, {"change": "worsened", "sort": "difference"}),
    (40, {"failures": "yes", "sort": "failures", "desc": "1"}),
    (MAX_TREES, {"sort": "spread", "desc": "1"}),
)
"""Filters and order of the list of questions to take trees from, with the number of trees to take.
"""


def write_report(run: Run, evaluation: str | None = None) -> Path:
    """Write the report of an evaluation (default: the main one), and return its path.

    Trees that do not fit into `MAX_BYTES` are left out. RunError if the run has no such evaluation.
    """
    run.sampling()
    read_summary(run, evaluation)
    name = evaluation or ""
    path = run.eval / name / "report.html" if evaluation else run.report
    with tempfile.TemporaryDirectory(prefix="leret-report-") as scratch:
        files = Path(scratch)
        with closing(RunIndex(run, files / "index.db")) as index:
            complete(index, files / "facts.db")
            page = _page(index, name)
    with run.writing():
        write_atomically(path, page)
    return path


def _page(index: RunIndex, evaluation: str) -> str:
    run = index.run.path.resolve().name
    pages = Pages({run: index}, {})
    values: dict[str, Any] = {
        "defaults": systems_of(index, evaluation)[1],
        "total": index.one("SELECT count(*) FROM questions"),
    }
    empty = pages.report(evaluation, trees=(), too_large=MAX_TREES, **values)
    room = MAX_BYTES - len(empty.encode()) - MAX_TREES  # line ends
    trees: list[str] = []
    too_large = 0
    for number, row in enumerate(selected(index, evaluation)):
        tree = pages.fold(run, number, row)
        n_bytes = len(tree.encode())
        if n_bytes > room:
            too_large += 1
            continue
        trees.append(tree)
        room -= n_bytes
    return pages.report(evaluation, trees=trees, too_large=too_large, **values)


def selected(index: RunIndex, evaluation: str = "") -> list[dict[str, Any]]:
    """Return the questions to show, as rows of the list of questions.

    Their order is: most improved, most worsened, most failures, largest spread of rewards.
    """
    systems, defaults = systems_of(index, evaluation)
    ids: list[int] = []
    for n, query in _LISTS:
        listed = select("questions", query, systems, defaults).ids(index)
        ids += [row_id for row_id in listed if row_id not in ids][:n]
    whole = select("questions", {}, systems, defaults)
    return whole.rows(index, array("q", ids[:MAX_TREES]))
