"""What four kinds of servers are sent, and how their answers are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leret.config.retriever import RemoteSettings
from leret.core.errors import RetrievalError
from leret.core.types import Document, Passage
from leret.datasets.corpus import Corpus
from leret.retrieval.clients.leret import Remote
from tests.retrieval.serving import Reply, loopback


def remote(url: str, **settings: Any) -> Remote:
    return Remote(RemoteSettings(**{"urls": (url,), "timeout_s": 2.0, "retry_for_s": 0.0, **settings}))


def test_colbert_by_post_and_get_and_retrieve_carry_what_those_servers_expect() -> None:
    topk = Reply({"topk": [{"pid": 7, "text": "T | body", "score": 2.5, "rank": 1, "prob": 1.0}]})
    with loopback(lambda _: topk) as server:
        want = (Passage("7", "T", "body", 2.5),)
        assert remote(f"{server.url}/api/search", protocol="colbert").search(["a b"], 4) == [want]
        assert remote(server.url, protocol="colbert-get").search(["a&k=9 é"], 4) == [want]
        post, get = server.asked
        assert (post.method, post.path, post.json) == ("POST", "/api/search", {"query": "a b", "k": 4})
        assert (get.method, get.path, get.params) == ("GET", "/", {"query": "a&k=9 é", "k": "4"})
    result = Reply({"result": [[{"document": {"id": "9", "contents": '"T"\nbody'}, "score": 0.5}]]})
    with loopback(lambda _: result) as server:
        found = remote(f"{server.url}/retrieve", protocol="retrieve").search(["a"], 2)
        assert found == [(Passage("9", "T", "body", 0.5),)]
        assert server.asked[0].json == {"queries": ["a"], "topk": 2, "return_scores": True}


def test_documents_are_named_by_title_or_by_their_row_in_the_corpus() -> None:
    topk = Reply({"topk": [{"pid": 1, "text": "Ed Wood | A film.", "score": 1.0}]})
    corpus = Corpus([Document("a", "", "x"), Document("b", "", "y")])
    with loopback(lambda _: topk) as server:
        named = remote(server.url, protocol="colbert", doc_id="title").search(["q"], 1)
        assert named[0][0].doc_id == "Ed Wood"
        rows = RemoteSettings(urls=(server.url,), protocol="colbert", doc_id="row", retry_for_s=0)
        assert Remote(rows, corpus).search(["q"], 1)[0][0].doc_id == "b"
        short = Corpus([Document("a", "", "x")])
        with pytest.raises(RetrievalError, match="row '1' of a corpus of 1 documents"):
            Remote(rows, short).search(["q"], 1)
        with pytest.raises(RetrievalError, match="no corpus"):
            Remote(rows)


def test_an_error_under_status_200_is_an_error_of_colberts_protocol() -> None:
    for reply in (Reply({"error": True, "message": "busy"}), Reply({"topk": []}), Reply({"other": 1})):
        with loopback(lambda _, reply=reply: reply) as server, pytest.raises(RetrievalError):
            remote(server.url, protocol="colbert").search(["a"], 3)
    with loopback(lambda _: Reply({"topk": []})) as server:
        assert remote(server.url, protocol="colbert", accept_empty=True).search(["a"], 3) == [()]


def test_a_row_of_5000_digits_is_no_document(tmp_path: Path) -> None:
    corpus = Corpus([Document("d", "T", "x")])
    with loopback(lambda _: Reply({"topk": [{"pid": "9" * 5000, "text": "T | x", "score": 1.0}]})) as server:
        settings = RemoteSettings(urls=(server.url,), protocol="colbert", doc_id="row", retry_for_s=0.0)
        with pytest.raises(RetrievalError, match="cannot be read"):
            Remote(settings, corpus).search(["a"], 1)
