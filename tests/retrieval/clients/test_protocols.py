from functools import partial

import pytest

from leret.core.errors import RetrievalError
from leret.core.types import Document, Passage
from leret.datasets.corpus import Corpus
from tests.retrieval.serving import Reply, loopback, remote

colbert = partial(remote, protocol="colbert")


def topk(pid, text):
    return loopback(Reply({"topk": [{"pid": pid, "text": text, "score": 2.5, "rank": 1, "prob": 1.0}]}))


def test_requests_match_the_protocols():
    with topk(7, "T | body") as server:
        want = (Passage("7", "T", "body", 2.5),)
        assert colbert(f"{server.url}/api/search").search(["a b"], 4) == [want]
        assert remote(server.url, protocol="colbert-get").search(["a&k=9 é"], 4) == [want]
    post, get = server.asked
    assert (post.method, post.path, post.json) == ("POST", "/api/search", {"query": "a b", "k": 4})
    assert (get.method, get.path, get.params) == ("GET", "/", {"query": "a&k=9 é", "k": "4"})
    result = Reply({"result": [[{"document": {"id": "9", "contents": '"T"\nbody'}, "score": 0.5}]]})
    with loopback(result) as server:
        rankings = remote(f"{server.url}/retrieve", protocol="retrieve").search(["a"], 2)
    assert rankings == [(Passage("9", "T", "body", 0.5),)]
    assert server.asked[0].json == {"queries": ["a"], "topk": 2, "return_scores": True}


def test_documents_are_named_by_title_or_row():
    corpus = Corpus([Document("a", "", "x"), Document("b", "", "y")])
    with topk(1, "Ed Wood | A film.") as server:
        assert colbert(server.url, doc_id="title").search(["q"], 1)[0][0].doc_id == "Ed Wood"
        assert colbert(server.url, doc_id="row", corpus=corpus).search(["q"], 1)[0][0].doc_id == "b"
        with pytest.raises(RetrievalError, match="row '1', but the corpus has 1 documents"):
            colbert(server.url, doc_id="row", corpus=Corpus([Document("a", "", "x")])).search(["q"], 1)
        with pytest.raises(RetrievalError, match="no corpus"):
            colbert(server.url, doc_id="row")
    with topk("9" * 5000, "T | x") as server, pytest.raises(RetrievalError, match="unexpected format"):
        colbert(server.url, doc_id="row", corpus=corpus).search(["a"], 1)


def test_colberts_errors_under_status_200_are_raised():
    for body in ({"error": True, "message": "busy"}, {"topk": []}, {"other": 1}):
        with loopback(Reply(body)) as server, pytest.raises(RetrievalError):
            colbert(server.url).search(["a"], 3)
    with loopback(Reply({"topk": []})) as server:
        assert colbert(server.url, accept_empty=True).search(["a"], 3) == [()]
