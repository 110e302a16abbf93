"""Trees of selected questions in report.html, and `leret view --report`, which writes the report again."""

from __future__ import annotations

import json
import tempfile
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

from leret.core.runs import Run
from leret.evaluation.report.comparison import read_summary
from leret.evaluation.report.page import write_page
from leret.viewer.collect import complete
from leret.viewer.index import RunIndex
from leret.viewer.lists import select
from leret.viewer.pages import ASSETS, NOTES, Pages, systems_of

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
    """Write the report of an evaluation (default: the main one) again, and return its path.

    RunError if none.
    """
    run.section("sampling", "leret sample RECIPE")
    summary = read_summary(run, evaluation)
    shown = run.eval / (evaluation or "") / "examples.json"
    examples = json.loads(shown.read_text(encoding="utf-8")) if shown.is_file() else None
    page = run.report
    if evaluation:
        page = run.eval / evaluation / "report.html"
    write_page(run, page, summary, examples, trees)
    return page


def trees(run: Run, evaluation: str, room: int) -> str:
    """Return a section of HTML with the trees of up to `MAX_TREES` questions.

    "" for a run without samples. ``evaluation`` compares the systems ("": the main one). Trees that
    do not fit into ``room`` bytes are left out.
    """
    if not run.store.is_file():
        return ""
    with tempfile.TemporaryDirectory(prefix="leret-report-") as scratch:
        files = Path(scratch)
        with closing(RunIndex(run, files / "index.db")) as index:
            complete(index, files / "facts.db", plots=False)
            return _section(index, evaluation, room)


def _section(index: RunIndex, evaluation: str, room: int) -> str:
    pages = Pages({"": index}, {})
    values: dict[str, Any] = {
        "run": index.run.path.resolve().name,
        "systems": systems_of(index, evaluation)[1],
        "total": index.one("SELECT count(*) FROM questions"),
        "notes": [text for [text] in index.read(NOTES)],
        "style": (ASSETS / "tree.css").read_text(encoding="utf-8"),
    }
    empty = pages.part("report", trees=(), too_large=MAX_TREES, **values)
    room -= len(empty.encode()) + MAX_TREES  # line ends
    shown: list[str] = []
    too_large = 0
    for number, row in enumerate(selected(index, evaluation)):
        question = pages.question("", row["question_id"]) or {}
        tree = pages.part("fold", prefix=f"t{number}-", row=row, **question)
        n_bytes = len(tree.encode())
        if n_bytes > room:
            too_large += 1
            continue
        shown.append(tree)
        room -= n_bytes
    return pages.part("report", trees=shown, too_large=too_large, **values)


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
