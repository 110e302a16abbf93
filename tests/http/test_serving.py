from contextlib import ExitStack

import pytest
import requests

from leret.http import serving
from tests.retrieval.serving import POST, Echo, connected, running


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /?query=" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Encoding: br\r\nContent-Length: 5\r\n\r\nhello",
        POST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
    ],
    ids=["a long line", "two lengths", "an unknown coding", "no gzip"],
)
def test_invalid_http_answers_400_and_is_not_logged(request_, caplog):
    with running(Echo()) as server, connected(server.url) as connection:
        connection.sendall(request_)
        assert b" 400 " in connection.recv(1000)
    assert caplog.records == []


def test_idle_connections_are_refused_beyond_a_limit_and_closed(monkeypatch):
    monkeypatch.setattr(serving, "_FILES", 80)  # a quarter of them is for connections
    monkeypatch.setattr(serving, "_IDLE_S", 2.0)
    with running(Echo()) as server, ExitStack() as held:
        for _ in range(20):
            idle = held.enter_context(connected(server.url))
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(13) == b"HTTP/1.1 200 "
        assert held.enter_context(connected(server.url)).recv(13) == b"HTTP/1.1 503 "
        while idle.recv(1000):
            pass
        assert requests.get(f"{server.url}/health", timeout=20).status_code == 200
