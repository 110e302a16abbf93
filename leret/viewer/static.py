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
    """Write the pages of runs and return their number.

    The first ``limit`` sampled and evaluated questions have pages. ``scratch`` is a directory for
    temporary files. The new directory appears when it is complete.
    """
    if directory.exists():
        raise ConfigError(f"--static {directory} already exists; choose another directory")
    require_writable(directory, "--static")
    for name, index in runs.items():
        complete(index, scratch / f"{name}.db")
    sql = "SELECT question_id FROM questions WHERE (n > 0) = ? ORDER BY rowid LIMIT ?"
    ids: set[str] = set()
    for index in runs.values():
        evaluated_only = index.read(sql, (0, limit))
        sampled = index.read(sql, (1, limit))
        ids |= {row["question_id"] for row in evaluated_only + sampled}
    pages = Pages(runs, {}, ids)
    n = 0
    busy = RunError(
        f"{directory} is being written by another process; wait, or choose another directory"
    )
    with atomic_directory(directory, "static", busy) as target:
        shutil.copytree(ASSETS, target / "assets", ignore=shutil.ignore_patterns("*.j2"))
        for number, (name, index) in enumerate(runs.items()):
            prefix: Parts = ("r", name) if number else ()
            for parts in _pages(index, prefix, ids):
                file = _file(parts)
                page = pages.page(parts, {}, partial(_url, len(file.parts) - 1))
                if page is None:
                    continue
                path = target / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(page), "utf-8", "replace")
                n += 1
    return n


def _pages(index: RunIndex, prefix: Parts, question_ids: Iterable[str]) -> Iterator[Parts]:
    yield prefix
    for page in ("overview.csv", *MENU):
        yield (*prefix, page)
    for name in LISTS:
        yield (*prefix, f"{name}.csv")
    sql = "SELECT DISTINCT state_id FROM groups WHERE question_id = ?"
    for question_id in question_ids:
        yield (*prefix, "q", question_id)
        for [state_id] in index.read(sql, (question_id,)):
            yield (*prefix, "q", question_id, state_id)


def _file(parts: Parts) -> Path:
    """Return the file of a page or an asset; a long name is cut, and its digest added."""
    names: list[str] = []
    for part in parts:
        name = quote(segment(part), safe=" ")
        if len(name) > _LONGEST_NAME:
            name = f"{name[:60]}-{sha256(name.encode()).hexdigest()[:16]}"
        names.append(name)
    is_asset = parts[:1] == ("assets",)
    is_csv = "q" not in parts[:3:2] and "".join(parts[-1:]).endswith(".csv")
    if is_asset or is_csv:
        return Path(*names)
    return Path(*names, "index.html")


def _url(depth: int, *parts: str, anchor: str = "", **query: Any) -> str:
    """Return the relative address of a page from a page ``depth`` directories down."""
    url = "../" * depth + quote(str(_file(parts)))
    if anchor:
        url += f"#{anchor}"
    return url
