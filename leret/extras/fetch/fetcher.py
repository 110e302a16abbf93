"""Download pages into a cache, with a rate limit and a robots.txt per site."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.robotparser import RobotFileParser

from leret import __version__
from leret.core.aio import for_each, started
from leret.core.errors import reason
from leret.core.files import write_atomically
from leret.core.progress import Progress
from leret.core.types import digest, storable
from leret.extras.fetch.content import TEXT, Body, PageError, Unzip, main_text
from leret.http.client import retry_after_s
from leret.http.endpoints import Clock, RateLimit

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

_AGENT = "leret"
_HTML = ("text/html", "application/xhtml+xml")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FAILURE = ("kind", "reason", "transient", "limits")  # of a page without text
_HOSTS = 32  # maximum number of hosts in flight
_PER_HOST = 4  # maximum number of pages per host in flight
_RETRIES = 2
_BACKOFF_S = 2.0
_LONGEST_DELAY_S = 60.0  # maximum Crawl-delay


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Limits of `leret.extras.fetch.corpus.fetch`.

    A page with a permanent failure is fetched again only with other limits.
    """

    rate: float = 1.0  # requests per second to one site
    timeout_s: float = 30.0  # per page, including redirects
    max_bytes: int = 10 << 20  # size of a page after decompression
    max_redirects: int = 5
    allow_hosts: tuple[str, ...] = ()  # more hosts (HOST or HOST:PORT) to which pages may redirect


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
        self._hosts = {_host(web_url(url)) for url in urls}
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
        if not are_valid or record["url"] != str(web_url(url)):
            return None
        return record

    async def run(self) -> None:
        """Fetch the missing pages."""
        import aiohttp

        by_site = groupby(self.missing, key=lambda url: web_url(url).origin())
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
        return self._pages / f"{digest(str(web_url(url)))}.json"

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
            body = await self._get(web_url(url), is_page=True)
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
                    return web_url(response.headers["Location"], url)
                if response.status != 200:
                    raise _refused(response)
                kind = response.content_type
                if is_page and kind not in (TEXT, *_HTML):
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
        unzip = None if encoding == "identity" else Unzip()
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


def web_url(text: str, base: URL | None = None) -> URL:
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
