"""``leret serve retriever``: its protocols, its limits, and how it ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from leret.config.retriever import RemoteSettings
from leret.core.errors import RetrievalError
from leret.core.types import Document, Passage
from leret.datasets.corpus import Corpus
from leret.retrieval.clients.leret import Remote
from leret.retrieval.engines.bm25 import BM25
from leret.retrieval.load import open_index
from leret.retrieval.server import app
from leret.retrieval.server.app import RetrieverServer, _is_named
from tests.retrieval.serving import Echo, Running, running, served, started


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("city", "river", "capital", "lake")
    corpus = Corpus(Document(f"d{i}", f"Title {i}", f"the {words[i % 4]} | {words[i % 3]} {i}") for i in range(30))
    path = tmp_path_factory.mktemp("index") / "bm25"
    BM25.build(corpus, path)
    return path


def test_a_full_queue_is_503_with_retry_after_and_nothing_else_is() -> None:
    engine = Echo()
    with running(engine, max_waiting=3) as server, ThreadPoolExecutor(8) as pool:
        engine.go.clear()
        taken = [ask(pool, server.url, "first")]
        wait_for(lambda: len(engine.batches) == 1)
        for n in range(1, 4):
            taken.append(ask(pool, server.url, f"q{n}"))
            wait_for(lambda n=n: server.server.batcher.n_waiting == n)
        refused = ask(pool, server.url, "late").result()
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"] is True
        engine.go.set()
        assert all(future.result().status_code == 200 for future in taken)
        assert ask(pool, server.url, "again").result().status_code == 200
        metrics = requests.get(f"{server.url}/metrics", timeout=20).text
    assert "leret_rejected_total 1.0\n" in metrics
    assert 'leret_requests_total{path="/search",status="503"} 1.0\n' in metrics


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_that_is_not_what_its_header_says_is_400(coding: str, caplog: pytest.LogCaptureFixture) -> None:
    with running(Echo()) as server:
        answer = requests.post(f"{server.url}/search", b"hello", headers={"Content-Encoding": coding}, timeout=20)
        assert (answer.status_code, answer.json()["error"]) == (400, True)
        assert "the body cannot be read" in answer.json()["message"]
    assert caplog.records == []


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /?query=" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: br\r\nContent-Length: 5\r\n\r\nhello",
    ],
    ids=["a long line", "two lengths", "a bad chunk", "an unknown coding"],
)
def test_what_is_no_http_is_400_and_does_not_fill_the_log(request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with running(Echo()) as server, connected(server.url) as connection:
        connection.sendall(request_)
        assert b" 400 " in connection.recv(1000)
    assert caplog.records == []


class Held(tuple[Passage, ...]):
    """A ranking that nobody gets through before ``go``."""

    go = threading.Event()

    def __iter__(self) -> Iterator[Passage]:
        assert self.go.wait(30)
        return super().__iter__()


def test_others_are_answered_while_a_large_answer_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Echo()
    with running(engine) as server, ThreadPoolExecutor(1) as pool:
        plain = engine.search
        monkeypatch.setattr(engine, "search", lambda queries, k: [Held(found) for found in plain(queries, k)])
        large = ask(pool, server.url, "large", k=1000)
        wait_for(lambda: len(engine.batches) == 1)
        time.sleep(0.1)  # the answer is being encoded
        assert requests.get(f"{server.url}/health", timeout=20).status_code == 200
        assert not large.done()
        Held.go.set()
        assert len(large.result().json()["rankings"][0]) == 1000


def test_an_engine_that_fails_is_500_and_an_outage_for_our_client() -> None:
    engine = Echo()
    with running(engine) as server:
        for error in (RetrievalError("the index is away"), RuntimeError("a bug")):
            engine.error = error
            answer = requests.get(f"{server.url}/?query=a&k=1", timeout=20)
            assert (answer.status_code, answer.json()["error"]) == (500, True)
            with pytest.raises(RetrievalError) as caught:
                Remote(RemoteSettings(urls=(server.url,), retry_for_s=0)).search(["a"], 1)
            assert caught.value.exit_code == 1
        engine.error, engine.score = None, float("nan")
        assert requests.get(f"{server.url}/?query=a&k=1", timeout=20).status_code == 500


def test_a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    with running(Echo(), token="s3cret") as server:
        assert requests.get(f"{server.url}/?query=a&k=1", timeout=20).status_code == 401
        assert requests.get(f"{server.url}/metrics", timeout=20).status_code == 401
        assert requests.get(f"{server.url}/health", timeout=20).json() == {"status": "ok"}
        for header in (b"Bearer wrong", b"Bearer", b"Basic s3cret", b"Basic !!!", "Bearer é".encode(), b"Bearer \xff"):
            bad = requests.get(f"{server.url}/?query=a", headers={"Authorization": header}, timeout=20)
            assert (bad.status_code, bad.json()["error"]) == (401, True)
            health = requests.get(f"{server.url}/health", headers={"Authorization": header}, timeout=20)
            assert health.json() == {"status": "ok"}
        counted = requests.get(f"{server.url}/metrics", headers={"Authorization": "Bearer s3cret"}, timeout=20).text
        assert 'leret_requests_total{path="/",status="401"} 7.0\n' in counted
        asker = Remote(RemoteSettings(urls=(server.url,), token_env="TOKEN", retry_for_s=0))
        assert asker.search(["a"], 1)[0][0].doc_id == "a#0"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("user@evil.example", 403),
        ("[::1", 403),
        ("", 200),
        ("localhost", 200),
        ("LOCALHOST:8893", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8893", 200),
        ("10.0.0.7", 200),
        ("Box.lan:8893", 200),
    ],
)
def test_without_a_token_only_names_of_this_machine_are_answered(name: str, status: int) -> None:
    assert _is_named(name, "Box.lan") is (status == 200)


@pytest.mark.parametrize("path", ["/health", "/?query=a", "/metrics"])
def test_a_page_of_another_name_reads_nothing_without_a_token(path: str) -> None:
    evil = {"Host": "evil.example", "Origin": "http://evil.example", "Authorization": "Bearer s3cret"}
    with running(Echo()) as server:
        answer = requests.get(f"{server.url}{path}", headers=evil, timeout=20)
        assert (answer.status_code, answer.json()["error"]) == (403, True)
    with running(Echo(), token="s3cret") as server:
        assert requests.get(f"{server.url}{path}", headers=evil, timeout=20).status_code == 200


def test_what_is_asked_before_the_stop_is_answered_and_then_it_drains() -> None:
    engine = Echo()
    with running(engine) as server, ThreadPoolExecutor(2) as pool:
        engine.go.clear()
        waiting = ask(pool, server.url, "before")
        wait_for(lambda: len(engine.batches) == 1)
        server.stop()
        engine.go.set()
        assert waiting.result().json()["rankings"][0][0]["doc_id"] == "before#0"
        server.join()
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{server.url}/health", timeout=20)


def test_metrics_are_prometheus_text() -> None:
    with running(Echo()) as server:
        requests.get(f"{server.url}/?query=a&k=1", timeout=20)
        answer = requests.get(f"{server.url}/metrics", timeout=20)
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    kinds = {line.split()[2]: line.split()[3] for line in answer.text.splitlines() if line.startswith("# TYPE")}
    assert kinds["leret_request_seconds"] == "histogram"
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            name = line.partition("{")[0].split()[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            assert name in kinds
            float(line.rsplit(" ", 1)[1])
    assert 'leret_request_seconds_bucket{le="+Inf"} 1.0' in answer.text
    assert "leret_queries_total 1.0" in answer.text


def test_the_command_serves_an_index_refuses_a_taken_port_and_ends_on_sigterm(index: Path) -> None:
    engine = open_index(index)
    with served(index) as (url, process):
        asker = Remote(RemoteSettings(urls=(url,), retry_for_s=0))
        queries = ["", "capital \x00 city", "\ud800 river"]
        assert asker.search(queries, 4) == engine.search(queries, 4)
        assert asker.digest == engine.digest
        taken = served(index, port=int(url.rsplit(":", 1)[1]))
        with pytest.raises(AssertionError, match="cannot listen there"), taken:
            pass
        process.terminate()
        assert process.wait(30) == 0


HALF = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"


def test_half_a_request_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_IDLE_S", 0.2)
    with running(Echo(), read_s=0.2) as server:
        with connected(server.url) as half_a_body:
            half_a_body.sendall(HALF)
            head, _, body = half_a_body.recv(1000).partition(b"\r\n\r\n")
            assert b" 408 " in head
            assert json.loads(body)["error"] is True
        with connected(server.url) as half_a_head:
            half_a_head.sendall(HALF[:30])
            assert half_a_head.recv(1000) == b""


def test_half_a_request_does_not_outlast_the_drain() -> None:
    server = Running(RetrieverServer(Echo(), engine="echo"), drain_s=0.4)
    with connected(server.url) as half_a_body, connected(server.url) as half_a_head:
        half_a_body.sendall(HALF)
        half_a_head.sendall(HALF[:30])
        began = time.monotonic()
        server.stop()
        server.join()
        assert time.monotonic() - began < 3


FEW_FILES = """
import asyncio, logging, resource
from leret.retrieval.server import app
from tests.retrieval.serving import Echo

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))
app._IDLE_S = 1.0
logging.basicConfig(level="DEBUG")

def ready(url):
    print("serving at", url, flush=True)

asyncio.run(app.serve(app.RetrieverServer(Echo(), engine="echo"), "127.0.0.1", 0, ready=ready))
"""


def test_more_idle_connections_than_descriptors_neither_end_the_service_nor_fill_the_log() -> None:
    with started("-c", FEW_FILES) as (url, process), ExitStack() as held:
        idle = [held.enter_context(connected(url)) for _ in range(600)]
        for connection in idle[::2]:
            with suppress(ConnectionError):  # it was refused already
                connection.sendall(HALF[:30])
        heads = [connection.recv(13) for connection in idle[1::2]]
        assert set(heads) <= {b"", b"HTTP/1.1 503 "}  # of a connection that was too long idle, and of one too many
        wait_for(lambda: is_answered(url))  # once the heads are overdue
        process.terminate()
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert len(process.stdout.read()) < 10_000


def is_answered(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=20).status_code == 200
    except requests.ConnectionError:  # refused while the request was being sent
        return False


def ask(pool: ThreadPoolExecutor, url: str, query: str, k: int = 1) -> Future[requests.Response]:
    return pool.submit(requests.post, f"{url}/search", json={"queries": [query], "k": k}, timeout=60)


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_whoever_hangs_up_gives_the_places_back_and_is_not_searched_for() -> None:
    engine = Echo()
    with running(engine, max_waiting=28) as server, ThreadPoolExecutor(2) as pool:
        engine.go.clear()
        first = ask(pool, server.url, "first")
        wait_for(lambda: len(engine.batches) == 1)
        gone = [sent(server.url, "gone", n=4) for _ in range(7)]
        wait_for(lambda: server.server.batcher.n_waiting == 28)
        for connection in gone:
            connection.close()
        wait_for(lambda: server.server.batcher.n_waiting == 0)
        live = ask(pool, server.url, "live")
        wait_for(lambda: server.server.batcher.n_waiting == 1)
        engine.go.set()
        assert first.result().status_code == live.result().status_code == 200
    assert [queries for queries, _ in engine.batches] == [("first",), ("live",)]


def sent(url: str, query: str, n: int) -> socket.socket:
    """A connection whose request for ``n`` queries is sent; nobody reads the answer."""
    body = json.dumps({"queries": [query] * n}).encode()
    connection = connected(url)
    connection.sendall(b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)
