"""`leret view --static`: the pages as files that need no server."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from leret.core.errors import ConfigError, RunError
from leret.core.files import atomic_directory, require_writable
from leret.viewer.collect import complete
from leret.viewer.index import RunIndex
from leret.viewer.lists import LISTS
from leret.viewer.pages import ASSETS, MENU, Pages, Parts, segment

_LONGEST_NAME = 100


def write_site(runs: Mapping[str, RunIndex], directory: Path, limit: int, scratch: Path) -> int:
    """Write the pages of runs and return their number; the first ``limit`` sampled and evaluated questions have pages.

    ``scratch`` is a directory for temporary files. The new directory appears when it is complete.
    """
    if directory.exists():
        raise ConfigError(f"--static {directory} already exists; choose another directory")
    require_writable(directory, "--static")
    for name, index in runs.items():
        complete(index, scratch / f"{name}.db")
    sql = "SELECT question_id FROM questions WHERE (n > 0) = ? ORDER BY rowid LIMIT ?"
    ids = {
        row[0]
        for index in runs.values()
        for sampled in (0, 1)
        for row in index.read(sql, (sampled, limit))
    }
    pages, n = Pages(runs, {}, ids), 0
    busy = RunError(
        f"{directory} is being written by another process; wait, or choose another directory"
    )
    with atomic_directory(directory, "static", busy) as target:
        shutil.copytree(ASSETS, target / "assets", ignore=shutil.ignore_patterns("*.j2"))
        for name, index in runs.items():
            for parts in _pages(
                index, () if index is next(iter(runs.values())) else ("r", name), ids
            ):
                page, file = (
                    pages.page(parts, {}, partial(_url, len(_file(parts).parts) - 1)),
                    target / _file(parts),
                )
                if page is not None:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(
                        page if isinstance(page, str) else "".join(page), "utf-8", "replace"
                    )
                    n += 1
    return n


def _pages(index: RunIndex, prefix: Parts, question_ids: Iterable[str]) -> Iterator[Parts]:
    for page in (
        (),
        ("overview.csv",),
        *((page,) for page in MENU),
        *((f"{name}.csv",) for name in LISTS),
    ):
        yield (*prefix, *page)
    for question_id in question_ids:
        yield (*prefix, "q", question_id)
        for [state_id] in index.read(
            "SELECT DISTINCT state_id FROM groups WHERE question_id = ?", (question_id,)
        ):
            yield (*prefix, "q", question_id, state_id)


def _file(parts: Parts) -> Path:
    """Return the file of a page or an asset; a long name is cut, and its digest added."""
    names = [quote(segment(part), safe=" ") for part in parts]
    names = [
        n if len(n) <= _LONGEST_NAME else f"{n[:60]}-{sha256(n.encode()).hexdigest()[:16]}"
        for n in names
    ]
    is_page = parts[:1] != ("assets",) and (
        "q" in parts[:3:2] or not "".join(parts[-1:]).endswith(".csv")
    )
    return Path(*names, "index.html") if is_page else Path(*names)


def _url(depth: int, *parts: str, anchor: str = "", **query: Any) -> str:
    """Return the relative address of a page from a page ``depth`` directories down."""
    return "../" * depth + quote(str(_file(parts))) + (f"#{anchor}" if anchor else "")
