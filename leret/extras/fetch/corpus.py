"""Fetch the pages of a list, and write their main texts as a corpus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leret.core.errors import DataError, import_optional
from leret.core.files import atomic_file, locked, write_atomically
from leret.core.progress import Progress
from leret.core.types import storable
from leret.datasets.formats.base import text as text_field
from leret.datasets.records import BadRecord, Problems, lines, records
from leret.extras.fetch.content import PageError
from leret.extras.fetch.fetcher import Fetcher, FetchSettings, web_url

Fault = tuple[str, str, str]
"""URL (or place in the list), kind of failure, and reason."""


@dataclass(frozen=True, slots=True)
class FetchReport:
    """Result of `fetch`. ``n_requested`` counts the pages that were not in the cache."""

    n_documents: int
    n_requested: int
    failures: tuple[Fault, ...]


def read_list(
    path: Path, url_field: str | None, id_field: str | None
) -> tuple[dict[str, str], list[Fault]]:
    """Return the URL by document id (default: the URL), and the entries without a valid URL.

    A list is JSON lines or CSV with the column ``url_field``, or has one URL per line. DataError if
    no URL is valid.
    """
    problems = Problems()
    urls: dict[str, str] = {}
    failures: list[Fault] = []
    for place, row in _rows(path, url_field, problems):
        try:
            url = text_field(row, url_field or "url").strip()
            doc_id = text_field(row, id_field) if id_field else url
            web_url(url)
            first = urls.setdefault(doc_id, url)
            if first != url:
                raise BadRecord("id", f"document {doc_id!r} has two URLs: {first} and {url}")
        except (BadRecord, PageError) as error:
            fault = str(error)
            failures.append((place, "list", fault))
            problems.add(place, BadRecord("list", fault))
    problems.check(str(path), skip_invalid=True, any_good=bool(urls))
    return urls, failures


def fetch(
    urls: Mapping[str, str],
    faults: Sequence[Fault],
    directory: Path,
    settings: FetchSettings,
    progress: Progress,
) -> FetchReport:
    """Fetch the pages of a list that are not in the cache, then write the corpus and all failures.

    A page is written whole, as soon as it has been fetched. After a kill, repeat the call to
    continue.

    Raises:
        DataError: another process is fetching into ``directory``, or no page has a text.
        MissingDependency: trafilatura is not installed.
    """
    import_optional("trafilatura", "trafilatura", "fetch")
    busy = DataError(
        f"another process is fetching into {directory}; wait for it, or use another --out"
    )
    with locked(directory / ".lock", busy):
        pages = {str(web_url(url)) for url in urls.values()}
        fetcher = Fetcher(directory / "pages", settings, pages, progress)
        progress.start("fetching", len(fetcher.missing))
        asyncio.run(fetcher.run())
        progress.finish()
        failures = [*faults, *_write_corpus(urls, fetcher, directory / "corpus.jsonl")]
        lines = []
        for row in [("url", "kind", "reason"), *failures]:
            cells = [" ".join(cell.split()) for cell in row]
            lines.append("\t".join(cells) + "\n")
        write_atomically(directory / "failures.tsv", storable("".join(lines)))
    n = len(urls) + len(faults) - len(failures)
    if not n:
        raise DataError(
            f"no page could be fetched; {directory / 'failures.tsv'} has the reasons"
        ).failed()
    return FetchReport(n, len(fetcher.missing), tuple(failures))


def _rows(
    path: Path, url_field: str | None, problems: Problems
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if url_field is None:
        for number, line in lines(path, problems):
            yield f"{path}:{number}", {"url": line}
        return
    for record in records(path, problems):
        yield record.place, record.value


def _write_corpus(urls: Mapping[str, str], fetcher: Fetcher, path: Path) -> Iterator[Fault]:
    with atomic_file(path) as corpus:
        for doc_id, url in urls.items():
            page = {"doc_id": doc_id, **(fetcher.record(url) or {})}
            if "kind" in page:
                yield url, page["kind"], page["reason"]
            else:
                corpus.write(storable(json.dumps(page, ensure_ascii=False)) + "\n")
