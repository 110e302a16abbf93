import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from leret.core.errors import RetrievalError
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.engines.bm25 import BM25
from leret.retrieval.load import open_index
from tests.first_steps import refused
from tests.retrieval.serving import ROOT, Echo, remote, running


def get(server, path, **headers):
    return requests.get(f"{server.url}{path}", headers=headers, timeout=20)


def ask(pool, server, query, k=1):
    return pool.submit(requests.post, f"{server.url}/search", json={"queries": [query], "k": k}, timeout=60)


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_full_queue_answers_503_and_is_counted():
    engine = Echo()
    with running(engine, max_waiting=3) as server, ThreadPoolExecutor(8) as pool:
        engine.go.clear()
        taken = [ask(pool, server, "first")]
        wait_for(lambda: len(engine.batches) == 1)
        for n in range(1, 4):
            taken.append(ask(pool, server, f"q{n}"))
            wait_for(lambda n=n: server.batcher.n_waiting == n)
        refused = ask(pool, server, "late").result()
        assert (refused.status_code, refused.json()["error"]) == (503, True)
        assert int(refused.headers["Retry-After"]) >= 1
        engine.go.set()
        assert [future.result().status_code for future in taken] == [200] * 4
        assert engine.batches == [(("first",), 1), (("q1", "q2", "q3"), 1)]
        metrics = get(server, "/metrics")
    assert metrics.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert {"leret_rejected_total 1.0", "leret_queries_total 4.0"} <= set(metrics.text.splitlines())


def test_a_failed_engine_answers_500():
    engine = Echo()
    with running(engine) as server:
        for error in (RetrievalError("the index is away"), RuntimeError("a bug")):
            engine.error = error
            answer = get(server, "/?query=a&k=1")
            assert (answer.status_code, answer.json()["error"]) == (500, True)
            with pytest.raises(RetrievalError) as caught:
                remote(server.url).search(["a"], 1)
            assert caught.value.exit_code == 1
        engine.error, engine.score = None, float("nan")
        assert get(server, "/?query=a&k=1").status_code == 500


def test_requests_need_the_token(monkeypatch):
    monkeypatch.setenv("TOKEN", "s3cret")
    wrong = ("Bearer wrong", "Bearer", "Basic s3cret", "Basic !!!", "Bearer é".encode(), b"Bearer \xff")
    with running(Echo(), token="s3cret") as server:
        for headers in ({}, *({"Authorization": header} for header in wrong)):
            for path in ("/?query=a", "/metrics"):
                bad = get(server, path, **headers)
                assert (bad.status_code, bad.json()["error"]) == (401, True)
            assert get(server, "/health", **headers).json() == {"status": "ok"}
        counted = get(server, "/metrics", Authorization="Bearer s3cret").text
        assert 'leret_requests_total{path="/",status="401"} 7.0\n' in counted
        asker = remote(server.url, token_env="TOKEN")
        assert asker.search(["a"], 1)[0][0].doc_id == "a#0"


def test_foreign_host_names_are_refused_without_a_token():
    foreign = "evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "user@evil.example"
    ours = "localhost", "LOCALHOST:8893", "127.0.0.1:1", "[::1]:8893", "10.0.0.7", "Box.lan:8893"
    with running(Echo(), host="Box.lan") as server:
        statuses = [get(server, "/?query=a", Host=name).status_code for name in (*foreign, *ours)]
        assert statuses == [403] * len(foreign) + [200] * len(ours)
        for path in ("/health", "/metrics"):
            assert get(server, path, Host="evil.example", Authorization="Bearer s3cret").json()["error"] is True
    with running(Echo(), token="s3cret") as server:
        assert get(server, "/?query=a", Host="evil.example", Authorization="Bearer s3cret").status_code == 200


def test_the_command_serves_an_index_until_sigterm(tmp_path):
    texts = ["the city | river", "the capital | city", "a lake"]
    BM25.build(Corpus(Document(f"d{i}", "Title", text) for i, text in enumerate(texts)), tmp_path / "index")
    engine = open_index(tmp_path / "index")
    command = [sys.executable, "-m", "leret", "serve", "retriever", str(tmp_path / "index"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        lines = (re.search(r" at (http\S+)", line) for line in process.stdout)
        url = next(found[1] for found in lines if found)
        asker = remote(url)
        queries = ["", "capital \x00 city", "\ud800 river"]
        assert asker.search(queries, 4) == engine.search(queries, 4)
        assert asker.digest == engine.digest
        port = url.rsplit(":", 1)[1]
        assert "cannot listen on" in refused("serve", "retriever", tmp_path / "index", "--port", port)
        process.terminate()
        assert process.wait(30) == 0
