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
from leret.extras.fetch.corpus import fetch, read_list
from leret.extras.fetch.fetcher import Fetcher, FetchSettings
from tests.datasets.writing import json_lines
from tests.extras.fetch.site import BOMB, WORDS, Site, html, sites
from tests.first_steps import read_lines

pytest.importorskip("trafilatura")

SETTINGS = FetchSettings(rate=1e6, timeout_s=5.0, max_bytes=1 << 20)
TEXT = web.Response(text="Only 404 words.", content_type="text/plain")
GZIP = {"Content-Type": "text/html", "Content-Encoding": "gzip"}


def run(site_urls, directory, settings=SETTINGS, failures=()):
    return fetch({url: url for url in site_urls}, failures, directory, settings, Progress())


def kinds(report):
    return {url.rpartition("/")[2]: kind for url, kind, _ in report.failures}


def hostile(elsewhere):
    return Site(
        {
            "/good": html("Error 404 explained", f"A page about 404. {WORDS}"), "/plain": TEXT, "/moved": "/good",
            "/packed": web.Response(body=gzip.compress(html("Packed", WORDS).body), headers=GZIP),
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
                "bomb": "size", "cut": "connection", "pdf": "type", "menu": "text", "x": "robots", "gone": "status 404",
            }  # fmt: skip
            first = Counter(request.path for request in site.requests)
            assert (elsewhere.requests, first["/private/x"], first["/robots.txt"]) == ([], 0, 1)
            again = run([site.url + name for name in names], tmp_path)
            new = Counter(request.path for request in site.requests) - first
    lines = {line["url"].removeprefix(site.url): line for line in read_lines(tmp_path / "corpus.jsonl")}
    assert list(lines) == ["/good", "/plain", "/moved", "/packed"]
    assert (lines["/good"]["title"], "about 404" in lines["/good"]["text"]) == ("Error 404 explained", True)
    assert (lines["/plain"]["text"], lines["/moved"]["text"]) == ("Only 404 words.", lines["/good"]["text"])
    table = [line.split("\t") for line in (tmp_path / "failures.tsv").read_text().splitlines()]
    assert table == [["url", "kind", "reason"], *map(list, report.failures)]
    assert set(new) == {"/robots.txt", "/hang", "/cut"}  # only pages that another attempt may change
    assert (again.n_requested, again.failures) == (2, report.failures)


HEAD, TAIL = html("Parts", WORDS).body[:200], html("Parts", WORDS).body[200:]


@pytest.mark.parametrize(
    ("encoding", "body", "kind"),
    [
        ("gzip", gzip.compress(HEAD) + gzip.compress(TAIL), None),
        ("x-gzip", gzip.compress(HEAD) + bytes(5) + gzip.compress(TAIL), None),
        ("deflate", zlib.compress(HEAD + TAIL), None),
        ("gzip", gzip.compress(HEAD) + gzip.compress(TAIL)[:-12], "connection"),
        ("gzip", gzip.compress(HEAD) + BOMB, "size"),
        ("br", b"x", "type"),
        ("gzip, gzip", gzip.compress(gzip.compress(HEAD + TAIL)), "type"),
    ],
)
def test_a_compressed_page_is_whole_or_refused(tmp_path, encoding, body, kind):
    page = web.Response(body=body, headers=GZIP | {"Content-Encoding": encoding})
    with sites(site := Site({"/x": page, "/whole": html("Parts", WORDS)})):
        report = run([f"{site.url}/x", f"{site.url}/whole"], tmp_path)
    assert kinds(report) == ({"x": kind} if kind else {})
    texts = {line["url"].rpartition("/")[2]: line["text"] for line in read_lines(tmp_path / "corpus.jsonl")}
    assert kind or texts["x"] == texts["whole"]


@pytest.mark.parametrize(
    "content",
    [
        '{"url": "x', "[[" * 10_000, "{}",
        '{"doc_id": "HIJACK", "url": "http://evil.example/", "title": "", "text": "x"}',
        '{"url": "URL", "title": null, "text": "x"}',
        '{"url": "URL", "kind": "text", "reason": "no main text"}',
    ],
)  # fmt: skip
def test_a_damaged_page_in_the_cache_is_fetched_again(tmp_path, content):
    with sites(site := Site({"/x": html("Page", WORDS)})):
        run([f"{site.url}/x"], tmp_path)
        before = (tmp_path / "corpus.jsonl").read_text()
        [path] = (tmp_path / "pages").glob("*.json")
        path.write_text(content.replace("URL", f"{site.url}/x"))
        assert run([f"{site.url}/x"], tmp_path).n_requested == 1
    assert (tmp_path / "corpus.jsonl").read_text() == before


def test_the_list_decides_the_id_of_a_page(tmp_path):
    with sites(site := Site({"/x": html("Page", WORDS)})):
        run([f"{site.url}/x"], tmp_path)
        [path] = (tmp_path / "pages").glob("*.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"doc_id": "HIJACK", "parent": "HIJACK"}))
        assert run([f"{site.url}/x"], tmp_path).n_requested == 0
    assert [list(line) for line in read_lines(tmp_path / "corpus.jsonl")] == [["doc_id", "url", "title", "text"]]
    assert read_lines(tmp_path / "corpus.jsonl")[0]["doc_id"] == f"{site.url}/x"


@pytest.mark.parametrize("login", ["user", ":", "a%40b:c"])
def test_a_url_with_a_login_is_refused(tmp_path, login):
    urls = tmp_path / "list.txt"
    with sites(site := Site({"/x": html("Page", WORDS)})):
        private = site.url.replace("://", f"://{login}@") + "/x"
        urls.write_text(f"{site.url}/away\n{private}\n")
        site.pages["/away"] = private
        listed, faults = read_list(urls, None, None)
        assert (list(listed), [kind for _, kind, _ in faults]) == ([f"{site.url}/away"], ["list"])
        with pytest.raises(DataError, match="no page could be fetched"):
            run(listed, tmp_path)
    assert "redirect" in (tmp_path / "failures.tsv").read_text()
    assert {request.path for request in site.requests} == {"/robots.txt", "/away"}


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

    with sites(site):
        fetcher = Fetcher(tmp_path, SETTINGS, {f"{site.url}/x"}, Progress(), sleep=sleep)
        asyncio.run(fetcher.run())
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

    with sites(site):
        urls = {f"{site.url}/{i}" for i in range(4)}
        fetcher = Fetcher(tmp_path, FetchSettings(rate=2.0), urls, Progress(), clock=lambda: now, sleep=sleep)
        asyncio.run(fetcher.run())
    assert (len(site.requests), now) == (5, pytest.approx(seconds))  # the first request does not wait


def test_other_hosts_are_asked_only_if_the_caller_allows_them(tmp_path):
    elsewhere = Site({"/x": html("Elsewhere", WORDS)})
    with sites(elsewhere):
        site = Site({"/away": f"{elsewhere.url}/x"})
        with sites(site):
            with pytest.raises(DataError, match=r"failures\.tsv"):
                run([f"{site.url}/away"], tmp_path)
            assert elsewhere.requests == []
            host = elsewhere.url.removeprefix("http://")
            report = run([f"{site.url}/away"], tmp_path, FetchSettings(rate=1e6, allow_hosts=(host,)))
    assert (report.n_documents, [request.path for request in elsewhere.requests]) == (1, ["/robots.txt", "/x"])


@pytest.mark.parametrize(
    ("robots", "kind"),
    [(web.Response(status=404), None), (web.Response(status=403), "robots"), (web.Response(status=500), "robots"),
     (web.Response(text="User-agent: *\nCrawl-delay: ²\n"), "robots"),
     (web.Response(text="User-agent: leret\nDisallow: /"), "robots"), ("https://example.org/robots.txt", "robots")],
)  # fmt: skip
def test_a_robots_txt_that_cannot_be_read_forbids_and_a_missing_one_allows(tmp_path, robots, kind):
    site = Site({"/x": html("Page", WORDS)}, robots)

    async def sleep(seconds):
        pass

    with sites(site):
        fetcher = Fetcher(tmp_path, SETTINGS, {f"{site.url}/x"}, Progress(), sleep=sleep)
        asyncio.run(fetcher.run())
    assert fetcher.record(f"{site.url}/x").get("kind") == kind
    assert ("/x" in [request.path for request in site.requests]) == (kind is None)
