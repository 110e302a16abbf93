"""Fetch the web pages of a list, and write their main texts as a corpus, for `leret data fetch`.

::

    DIR/pages/<digest of the URL>.json   main text of a page, or why there is none
    DIR/corpus.jsonl                     doc_id, title, text, url of each page
    DIR/failures.tsv                     URL, kind and reason of each failure

Only http and https URLs are requested, and only from the list's hosts and ``allow_hosts``;
redirects elsewhere are failures. robots.txt is obeyed. Status and content type decide whether a
page is accepted, not words in its text.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.robotparser import RobotFileParser

from leret import __version__
from leret.core.aio import for_each, started
from leret.core.errors import DataError, import_optional, reason
from leret.core.files import atomic_file, locked, write_atomically
from leret.core.progress import Progress
from leret.core.types import digest, storable
from leret.datasets.formats.base import text as text_field
from leret.datasets.records import BadRecord, Problems, lines, records
from leret.http.client import retry_after_s
from leret.http.endpoints import Clock, RateLimit

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

_AGENT = "leret"
_TEXT = "text/plain"
_HTML = ("text/html", "application/xhtml+xml")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FAILURE = ("kind", "reason", "transient", "limits")  # of a page without text
_HOSTS = 32  # maximum number of hosts in flight
_PER_HOST = 4  # maximum number of pages per host in flight
_RETRIES = 2
_BACKOFF_S = 2.0
_LONGEST_DELAY_S = 60.0  # maximum Crawl-delay

Fault = tuple[str, str, str]
"""URL (or place in the list), kind of failure, and reason."""

Body = tuple[bytes, str, str | None]  # content, type, charset


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Limits of `fetch`.

    A page with a permanent failure is fetched again only with other limits.
    """

    rate: float = 1.0  # requests per second to one site
    timeout_s: float = 30.0  # per page, including redirects
    max_bytes: int = 10 << 20  # size of a page after decompression
    max_redirects: int = 5
    allow_hosts: tuple[str, ...] = ()  # more hosts (HOST or HOST:PORT) to which pages may redirect


@dataclass(frozen=True, slots=True)
class FetchReport:
    """Result of `fetch`. ``n_requested`` counts the pages that were not in the cache."""

    n_documents: int
    n_requested: int
    failures: tuple[Fault, ...]


class PageError(Exception):
    """A page without text.

    If ``wait_s`` is not 0, `fetch` tries again; if ``transient``, the next `fetch` does.
    """

    def __init__(
        self, kind: str, why: str, *, transient: bool = False, status: int = 0, wait_s: float = 0.0
    ) -> None:
        super().__init__(why)
        self.kind = kind
        self.transient = transient
        self.status = status
        self.wait_s = wait_s


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
            _web_url(url)
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
        pages = {str(_web_url(url)) for url in urls.values()}
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


class Fetcher:
    """Fetches pages into a directory, with a rate limit and a robots.txt per site.

    A site is a scheme, a host and a port.
    """

    def __init__(
        self,
        pages: Path,
        settings: FetchSettings,
        urls: set[str],
        progress: Progress,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._pages = pages
        self._settings = settings
        self._progress = progress
        self._clock = clock
        self._sleep = sleep
        self._hosts = {_host(_web_url(url)) for url in urls}
        self._hosts |= {host.lower() for host in settings.allow_hosts}
        self._key = digest(asdict(settings), sorted(self._hosts))
        self._rates: dict[URL, RateLimit] = {}
        self._robots: dict[URL, asyncio.Task[RobotFileParser]] = {}
        self.missing = sorted(url for url in urls if self._is_missing(url))

    def record(self, url: str) -> dict[str, Any] | None:
        """Return a page's record; None if it has not been fetched or its file is damaged."""
        try:
            value = json.loads(self._path(url).read_text(encoding="utf-8"))
            names = _FAILURE if "kind" in value else ("title", "text")
            record = {name: value[name] for name in ("url", *names)}
        except (FileNotFoundError, LookupError, RecursionError, TypeError, ValueError):
            return None
        are_valid = all(isinstance(item, str | bool) for item in record.values())
        if not are_valid or record["url"] != str(_web_url(url)):
            return None
        return record

    async def run(self) -> None:
        """Fetch the missing pages."""
        import aiohttp

        by_site = groupby(self.missing, key=lambda url: _web_url(url).origin())
        sites = [list(urls) for _, urls in by_site]
        async with aiohttp.ClientSession(
            headers={"User-Agent": f"{_AGENT}/{__version__}", "Accept-Encoding": "gzip"},
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # `_read` stops at the limit
            timeout=aiohttp.ClientTimeout(),  # `_request` has a limit
        ) as self._session:
            await for_each(sites, lambda urls: for_each(urls, self._store, _PER_HOST), _HOSTS)

    def _path(self, url: str) -> Path:
        return self._pages / f"{digest(str(_web_url(url)))}.json"

    def _is_missing(self, url: str) -> bool:
        record = self.record(url)
        if record is None:
            return True
        if "kind" not in record:
            return False
        return bool(record["transient"] or record["limits"] != self._key)

    async def _store(self, url: str) -> None:
        record: dict[str, Any] = {"url": url}
        try:
            body = await self._get(_web_url(url), is_page=True)
            record["title"], record["text"] = await asyncio.to_thread(main_text, *body)
        except PageError as error:
            record |= {
                "kind": error.kind,
                "reason": str(error),
                "transient": error.transient,
                "limits": self._key,
            }
        write_atomically(self._path(url), storable(json.dumps(record, ensure_ascii=False)))
        self._progress.advance(1)

    async def _get(self, url: URL, *, is_page: bool) -> Body:
        """Return the body of a page or a robots.txt.

        Try again after a failed connection or a busy server.
        """
        for _ in range(_RETRIES):
            try:
                return await self._follow(url, is_page)
            except PageError as error:
                if not error.wait_s:
                    raise
                await self._sleep(error.wait_s)
        return await self._follow(url, is_page)

    async def _follow(self, url: URL, is_page: bool) -> Body:
        left_s = self._settings.timeout_s
        for _ in range(self._settings.max_redirects + 1):
            host = _host(url)
            if host not in self._hosts:
                raise PageError(
                    "redirect", f"redirects to {host}, which is not in the list (see --allow-host)"
                )
            if is_page:
                await self._require_permission(url)
            rate = self._rates.setdefault(url.origin(), RateLimit(self._settings.rate, self._clock))
            while (wait_s := rate.wait_s()) > 0:
                await self._sleep(wait_s)
            began = self._clock()
            answer = await self._request(url, left_s, is_page)
            if isinstance(answer, tuple):
                return answer
            url = answer
            left_s -= self._clock() - began
        raise PageError("redirect", f"more than {self._settings.max_redirects} redirects")

    async def _request(self, url: URL, left_s: float, is_page: bool) -> Body | URL:
        """Send one request; return the body, or the URL of a redirect."""
        import aiohttp

        try:
            async with (
                asyncio.timeout(left_s),
                self._session.get(url, allow_redirects=False) as response,
            ):
                if response.status in _REDIRECTS and "Location" in response.headers:
                    return _web_url(response.headers["Location"], url)
                if response.status != 200:
                    raise _refused(response)
                kind = response.content_type
                if is_page and kind not in (_TEXT, *_HTML):
                    raise PageError("type", f"{kind} instead of HTML or plain text")
                content = await self._read(response)
                return content, kind, response.charset
        except TimeoutError as error:
            why = f"more than {self._settings.timeout_s:g} s"
            raise PageError("timeout", why, transient=True) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PageError(
                "connection", reason(error), transient=True, wait_s=_BACKOFF_S
            ) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        header = response.headers.get("Content-Encoding", "identity")
        encoding = header.strip().lower().removeprefix("x-")
        if encoding not in {"identity", "gzip", "deflate"}:
            raise PageError("type", f"compressed as {encoding} instead of gzip or deflate")
        unzip = None if encoding == "identity" else _Unzip()
        limit = self._settings.max_bytes
        content = bytearray()
        try:
            async for chunk in response.content.iter_any():
                if unzip is None:
                    content += chunk
                else:
                    content += unzip.decompress(chunk, limit + 1 - len(content))
                if len(content) > limit:
                    raise PageError("size", f"more than {limit:,} bytes")
        except zlib.error as error:
            raise PageError("type", f"broken compression ({error})") from error
        if unzip is not None and not unzip.is_complete:
            raise PageError("connection", "the compressed page ends early", transient=True)
        return bytes(content)

    async def _require_permission(self, url: URL) -> None:
        origin = url.origin()
        if origin not in self._robots:
            self._robots[origin] = started(self._read_robots(origin))
        rules = await self._robots[origin]
        if not rules.can_fetch(_AGENT, str(url)):
            raise PageError("robots", "robots.txt forbids this page")

    async def _read_robots(self, origin: URL) -> RobotFileParser:
        """Read robots.txt.

        If a site has none, everything is allowed; if it cannot be read, nothing is.
        """
        rules = RobotFileParser()
        try:
            content, _, _ = await self._get(origin / "robots.txt", is_page=False)
            rules.parse(content.decode("utf-8-sig", "replace").splitlines())
        except PageError as error:
            if error.transient or error.status in {0, 401, 403}:
                why = f"robots.txt cannot be read ({error.kind}: {error})"
                raise PageError("robots", why, transient=error.transient) from error
            rules.parse(())
        except ValueError as error:  # Crawl-delay: ²
            raise PageError("robots", f"robots.txt cannot be read ({error})") from error
        delay_s = min(int(rules.crawl_delay(_AGENT) or 0), _LONGEST_DELAY_S)
        if delay_s:
            rate = min(self._settings.rate, 1 / delay_s)
            self._rates[origin] = RateLimit(rate, self._clock)
        return rules


def _refused(response: aiohttp.ClientResponse) -> PageError:
    """Return the error for a failed status."""
    status = response.status
    is_busy = status == 429 or status >= 500
    wait_s = 0.0
    if is_busy:
        wait_s = max(_BACKOFF_S, retry_after_s(response.headers) or 0.0)
    why = response.reason or ""
    return PageError(f"status {status}", why, transient=is_busy, status=status, wait_s=wait_s)


class _Unzip:
    """Decompresses zlib, or one or more gzip members. Ignores other bytes after the end."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip or zlib

    @property
    def is_complete(self) -> bool:
        return self._member.eof

    def decompress(self, chunk: bytes, limit: int) -> bytes:
        """Return at most ``limit`` bytes."""
        content = self._member.decompress(chunk, limit)
        while len(content) < limit:
            rest = self._member.unused_data.lstrip(b"\0")
            if not rest.startswith(b"\x1f\x8b"):
                break
            self._member = zlib.decompressobj(zlib.MAX_WBITS | 32)
            content += self._member.decompress(rest, limit - len(content))
        return content


def main_text(content: bytes, kind: str, charset: str | None) -> tuple[str, str]:
    """Return the title and the main text of a page. PageError if it has no text."""
    if (charset or "").lower() in {"punycode", "idna"}:  # decoding them takes quadratic time
        charset = None
    try:
        text = content.decode(charset or "utf-8", "replace")
    except (LookupError, ValueError):  # a charset that Python does not know
        return main_text(content, kind, None)
    title = ""
    if kind != _TEXT:
        trafilatura = import_optional("trafilatura", "trafilatura", "fetch")
        source = text if charset else content
        try:
            page: Any = trafilatura.bare_extraction(
                source, include_comments=False, with_metadata=True
            )
        except Exception as error:
            raise PageError("text", f"cannot be parsed ({reason(error)})") from error
        title = getattr(page, "title", None) or ""
        text = getattr(page, "text", None) or ""
    if not text.strip():
        raise PageError("text", "no main text")
    return title, text


def _rows(
    path: Path, url_field: str | None, problems: Problems
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if url_field is None:
        for number, line in lines(path, problems):
            yield f"{path}:{number}", {"url": line}
        return
    for record in records(path, problems):
        yield record.place, record.value


def _web_url(text: str, base: URL | None = None) -> URL:
    """Return a URL (relative to ``base``) without its fragment.

    PageError if it is not a plain http or https URL.
    """
    from yarl import URL

    try:
        url = URL(text)
        if base is not None:
            url = base.join(url)
        if url.scheme in {"http", "https"} and url.host and "@" not in url.raw_authority:
            return url.with_fragment(None)
    except ValueError:
        pass
    fault = f"{text[:200]!r}, which is not an http or https URL without user and password"
    if base is None:
        raise PageError("list", fault)
    raise PageError("redirect", f"redirects to {fault}")


def _host(url: URL) -> str:
    host = str(url.host).lower()
    return host if url.is_default_port() else f"{host}:{url.port}"


def _write_corpus(urls: Mapping[str, str], fetcher: Fetcher, path: Path) -> Iterator[Fault]:
    with atomic_file(path) as corpus:
        for doc_id, url in urls.items():
            page = {"doc_id": doc_id, **(fetcher.record(url) or {})}
            if "kind" in page:
                yield url, page["kind"], page["reason"]
            else:
                corpus.write(storable(json.dumps(page, ensure_ascii=False)) + "\n")
