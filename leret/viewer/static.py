"""`leret view --static`: the pages as files that need no server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from leret.core.errors import ConfigError, RunError
from leret.core.files import atomic_directory
from leret.viewer.collect import command
from leret.viewer.index import RunIndex
from leret.viewer.lists import LISTS
from leret.viewer.pages import ASSETS, MENU, Pages, Parts

_LONGEST_NAME = 100


def write_site(runs: Mapping[str, RunIndex], directory: Path, limit: int, scratch: Path) -> int:
    """Write the pages of runs and return their number; of the questions, only the first ``limit`` have pages.

    ``scratch`` is a directory for temporary files. The new directory appears when it is complete.
    """
    if directory.exists():
        raise ConfigError(f"--static {directory} already exists; choose another directory")
    for name, index in runs.items():
        while not index.complete:
            index.advance()
        subprocess.run(command(index.run, scratch / f"{name}.db"), check=True)
        index.use(scratch / f"{name}.db")
    pages, n = Pages(runs, {}, limit), 0
    busy = RunError(f"{directory} is being written by another process; wait, or choose another directory")
    with atomic_directory(directory, "static", busy) as target:
        shutil.copytree(ASSETS, target / "assets", ignore=shutil.ignore_patterns("*.j2"))
        for name, index in runs.items():
            for parts in _pages(index, () if index is next(iter(runs.values())) else ("r", name), limit):
                page, file = pages.page(parts, {}, partial(_url, len(_file(parts).parts) - 1)), target / _file(parts)
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("w", encoding="utf-8", errors="replace") as out:
                    out.writelines([page] if isinstance(page, str) else page or [])
                n += 1
    return n


def _pages(index: RunIndex, prefix: Parts, limit: int) -> Iterator[Parts]:
    for page in ((), ("overview.csv",), *((page,) for page in MENU), *((f"{name}.csv",) for name in LISTS)):
        yield (*prefix, *page)
    for [question_id] in index.read("SELECT question_id FROM questions ORDER BY rowid LIMIT ?", (limit,)):
        yield (*prefix, "q", question_id)
        for [state_id] in index.read("SELECT DISTINCT state_id FROM groups WHERE question_id = ?", (question_id,)):
            yield (*prefix, "q", question_id, state_id)


def _file(parts: Parts) -> Path:
    """Return the file of a page or an asset; a long name is cut, and its digest added."""
    names = [quote(part, safe=" ") for part in parts]
    names = [n if len(n) <= _LONGEST_NAME else f"{n[:60]}-{sha256(n.encode()).hexdigest()[:16]}" for n in names]
    is_page = parts[:1] != ("assets",) and ("q" in parts[:3:2] or not "".join(parts[-1:]).endswith(".csv"))
    return Path(*names, "index.html") if is_page else Path(*names)


def _url(depth: int, *parts: str, anchor: str = "", **query: Any) -> str:
    """Return the relative address of a page from a page ``depth`` directories down."""
    return "../" * depth + quote(str(_file(parts))) + (f"#{anchor}" if anchor else "")
