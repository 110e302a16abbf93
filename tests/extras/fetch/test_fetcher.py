import asyncio
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import zlib
from collections import Counter

import pytest
from aiohttp import web

from leret.core.errors import DataError
from leret.core.progress import Progress
from leret.extras.fetch.__main__ import main
from leret.extras.fetch.content import PageError, main_text
from leret.extras.fetch.corpus import fetch, read_list
from leret.extras.fetch.fetcher import Fetcher, FetchSettings
from tests.datasets.writing import json_lines
from tests.extras.fetch.site import BOMB, WORDS, Site, html, sites
from tests.first_steps import read_lines

pytest.importorskip("trafilatura")

SETTINGS = FetchSettings(rate=1e6, timeout_s=2.0, max_bytes=1 << 20)
TEXT = web.Response(text="Only 404 words.", content_type="text/plain")
PACKED = html("Packed", WORDS).body
PADDED = gzip.compress(PACKED[:200]) + bytes(5) + gzip.compress(PACKED[200:])
GZIP = {"Content-Type": "text/html", "Content-Encoding": "gzip"}


def run(site_urls, directory, settings=SETTINGS, failures=()):
    return fetch({url: url for url in site_urls}, failures, directory, settings, Progress())


def fetched(directory, *servers, settings=SETTINGS, **keys):
    """Fetch all pages of the servers with a fetcher whose waits the caller controls."""
    with sites(*servers):
        urls = {server.url + path for server in servers for path in server.pages}
        fetcher = Fetcher(directory, settings, urls, Progress(), **keys)
        asyncio.run(fetcher.run())
    return fetcher


def kinds(report):
    return {url.rpartition("/")[2]: kind for url, kind, _ in report.failures}


def hostile(elsewhere):
    return Site(
        {
            "/good": html("Error 404 explained", f"A page about 404. {WORDS}"), "/plain": TEXT, "/moved": "/good",
            "/packed": web.Response(body=PADDED, headers=GZIP),
            "/deflated": web.Response(body=zlib.compress(PACKED), headers=GZIP | {"Content-Encoding": "deflate"}),
            "/br": web.Response(body=b"x", headers=GZIP | {"Content-Encoding": "br"}),
            "/hang": "hang", "/endless": "endless", "/loop": "/loop", "/away": f"{elsewhere}/x", "/file": "file:///etc/passwd",
            "/bomb": web.Response(body=BOMB, headers=GZIP),
            "/cut": web.Response(body=gzip.compress(html("Cut", WORDS).body)[:-20], headers=GZIP),
            "/pdf": web.Response(body=b"%PDF-1.7", content_type="application/pdf"),
            "/menu": web.Response(text="<html><body></body></html>", content_type="text/html"),
            "/private/x": html("Private", WORDS),
        },
        web.Response(text="User-agent: *\nDisallow: /private/\n"),
    )  # fmt: skip


def test_a_hostile_site_is_read_to_the_end_and_every_failure_has_its_reason(tmp_path):
    elsewhere = Site({"/x": html("Elsewhere", WORDS)})
    with sites(elsewhere):
        site = hostile(elsewhere.url)
        with sites(site):
            names = [*site.pages, "/gone"]
            report = run([site.url + name for name in names], tmp_path)
            assert kinds(report) == {
                "hang": "timeout", "endless": "size", "loop": "redirect", "away": "redirect", "file": "redirect",
                "bomb": "size", "cut": "connection", "pdf": "type", "br": "type", "menu": "text", "x": "robots",
                "gone": "status 404",
            }  # fmt: skip
            first = Counter(request.path for request in site.requests)
            assert (elsewhere.requests, first["/private/x"], first["/robots.txt"]) == ([], 0, 1)
            again = run([site.url + name for name in names], tmp_path)
            new = Counter(request.path for request in site.requests) - first
    lines = {line["url"].removeprefix(site.url): line for line in read_lines(tmp_path / "corpus.jsonl")}
    assert list(lines) == ["/good", "/plain", "/moved", "/packed", "/deflated"]
    assert lines["/packed"]["text"] == lines["/deflated"]["text"]
    assert (lines["/good"]["title"], "about 404" in lines["/good"]["text"]) == ("Error 404 explained", True)
    assert (lines["/plain"]["text"], lines["/moved"]["text"]) == ("Only 404 words.", lines["/good"]["text"])
    table = [line.split("\t") for line in (tmp_path / "failures.tsv").read_text().splitlines()]
    assert table == [["url", "kind", "reason"], *map(list, report.failures)]
    assert set(new) == {"/robots.txt", "/hang", "/cut"}  # only pages that another attempt may change
    assert (again.n_requested, again.failures) == (2, report.failures)


def test_a_damaged_page_in_the_cache_is_fetched_again_and_the_list_decides_its_id(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    with sites(site := Site({"/x": html("Page", WORDS)})):
        url = f"{site.url}/x"
        run([url], tmp_path)
        before = corpus.read_text()
        [path] = (tmp_path / "pages").glob("*.json")
        page = json.loads(path.read_text())
        for content in (
            '{"url": "x', "[[" * 10_000, "{}", json.dumps(page | {"url": "http://evil.example/"}),
            json.dumps(page | {"title": None}), json.dumps({"url": url, "kind": "text", "reason": "no main text"}),
        ):  # fmt: skip
            path.write_text(content)
            assert (run([url], tmp_path).n_requested, corpus.read_text()) == (1, before), content
        path.write_text(json.dumps(page | {"doc_id": "HIJACK", "parent": "HIJACK"}))
        assert (run([url], tmp_path).n_requested, corpus.read_text()) == (0, before)
    [line] = read_lines(corpus)
    assert (list(line), line["doc_id"]) == (["doc_id", "url", "title", "text"], url)


def test_a_url_with_a_login_is_refused(tmp_path):
    with sites(site := Site({"/x": html("Page", WORDS)})):
        private = [site.url.replace("://", f"://{login}@") + "/x" for login in ("user", ":", "a%40b:c")]
        site.pages |= {f"/{i}": url for i, url in enumerate(private)}
        public = [f"{site.url}/{i}" for i in range(3)]
        (tmp_path / "list.txt").write_text("\n".join([*public, *private]))
        listed, faults = read_list(tmp_path / "list.txt", None, None)
        assert (list(listed), [kind for _, kind, _ in faults]) == (public, ["list"] * 3)
        with pytest.raises(DataError, match="no page could be fetched"):
            run(listed, tmp_path)
    table = [line.split("\t")[1] for line in (tmp_path / "failures.tsv").read_text().splitlines()]
    assert table == ["kind", *["redirect"] * 3]
    assert {request.path for request in site.requests} == {"/robots.txt", "/0", "/1", "/2"}


def test_a_killed_fetch_loses_nothing_and_asks_only_for_the_rest(tmp_path):
    urls = [f"/{i}" for i in range(6)]
    site = Site({url: html(f"Page {url}", WORDS) for url in urls} | {"/5": ["wait", html("Page /5", WORDS)]})
    with sites(site) as portal:
        json_lines(tmp_path / "list.jsonl", [{"page": site.url + url, "n": f"d{url[1:]}"} for url in urls])
        command = "list.jsonl --url-field page --id-field n --out pages --rate 1000"
        process = subprocess.Popen(
            [sys.executable, "-m", "leret.extras.fetch", *command.split()], cwd=tmp_path, stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        portal.call(site.reached.wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = [json.loads(path.read_text()) for path in (tmp_path / "pages/pages").glob("*.json")]
        assert not (tmp_path / "pages/corpus.jsonl").exists()
        n_before = len(site.requests)
        with contextlib.chdir(tmp_path):
            assert main(command.split()) == 0
    n_pages = sum(request.path != "/robots.txt" for request in site.requests[n_before:])
    assert n_pages == 6 - len(done)
    assert [line["doc_id"] for line in read_lines(tmp_path / "pages/corpus.jsonl")] == [f"d{i}" for i in range(6)]


@pytest.mark.parametrize(
    ("fault", "says", "waits"),
    [("reset", "Late", {2.0}), (web.Response(status=503, headers={"Retry-After": "7"}), "Late", {7.0}),
     (web.Response(status=404), None, set())],
)  # fmt: skip
def test_a_busy_server_is_asked_again_after_the_time_that_it_names(tmp_path, fault, says, waits):
    site, slept = Site({"/x": [fault, fault, html("Late", WORDS)]}), []

    async def sleep(seconds):
        slept.append(seconds)

    fetcher = fetched(tmp_path, site, sleep=sleep)
    assert fetcher.record(f"{site.url}/x").get("title") == says
    assert {seconds for seconds in slept if seconds > 1} == waits


@pytest.mark.parametrize(("robots", "seconds"), [(None, 4 * 0.5), ("User-agent: leret\nCrawl-delay: 9\n", 3 * 9.0)])
def test_requests_to_a_site_keep_the_rate_and_the_delay_of_robots_txt(tmp_path, robots, seconds):
    site, now = Site({f"/{i}": html("Page", WORDS) for i in range(4)}, robots and web.Response(text=robots)), 0.0

    async def sleep(wait_s):
        nonlocal now
        end = now + wait_s
        await asyncio.sleep(0)
        now = max(now, end)

    fetched(tmp_path, site, settings=FetchSettings(rate=2.0), clock=lambda: now, sleep=sleep)
    assert (len(site.requests), now) == (5, pytest.approx(seconds))  # the first request does not wait


def test_other_hosts_are_asked_if_the_caller_allows_them(tmp_path):
    elsewhere = Site({"/x": html("Elsewhere", WORDS)})
    with sites(elsewhere):
        site = Site({"/away": f"{elsewhere.url}/x"})
        with sites(site):
            host = elsewhere.url.removeprefix("http://")
            report = run([f"{site.url}/away"], tmp_path, FetchSettings(rate=1e6, allow_hosts=(host,)))
    assert (report.n_documents, [request.path for request in elsewhere.requests]) == (1, ["/robots.txt", "/x"])


def test_a_robots_txt_that_cannot_be_read_forbids_and_a_missing_one_allows(tmp_path):
    answers = [
        (web.Response(status=404), None), (web.Response(status=403), "robots"), (web.Response(status=500), "robots"),
        (web.Response(text="User-agent: *\nCrawl-delay: ²\n"), "robots"),
        (web.Response(text="User-agent: leret\nDisallow: /"), "robots"), ("https://example.org/robots.txt", "robots"),
    ]  # fmt: skip
    servers = [Site({"/x": html("Page", WORDS)}, robots) for robots, _ in answers]

    async def sleep(seconds):
        pass

    fetcher = fetched(tmp_path, *servers, sleep=sleep)
    for site, (robots, kind) in zip(servers, answers, strict=True):
        assert fetcher.record(f"{site.url}/x").get("kind") == kind, robots
        assert ("/x" in [request.path for request in site.requests]) == (kind is None), robots


def test_text_is_decoded_by_the_header_or_the_page():
    page = "<html><head><meta charset='iso-8859-1'><title>Caf\u00e9</title></head><body><p>" + "Ein Caf\u00e9. " * 30
    assert main_text(page.encode("latin-1"), "text/html", None)[0] == "Caf\u00e9"
    assert main_text(page.encode("utf-8"), "text/html", "utf-8")[0] == "Caf\u00e9"
    for charset in ("no-such-charset", "base64", "undefined", "Punycode"):
        assert main_text("Caf\u00e9".encode(), "text/plain", charset) == ("", "Caf\u00e9")
    with pytest.raises(PageError, match="no main text"):
        main_text(b" ", "text/plain", None)
