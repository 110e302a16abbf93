from functools import partial

import pytest

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core import yaml
from leret.core.errors import ConfigError, RetrievalError
from leret.core.types import Document, Passage
from leret.datasets.corpus import Corpus
from leret.retrieval.base import PartialResultsError
from leret.retrieval.engines.bm25 import BM25
from leret.retrieval.load import open_retriever
from tests.retrieval.serving import Reply, loopback, remote, running

INDEX = "i" * 32
HEALTH = {"status": "ok", "engine": "bm25", "index": INDEX, "corpus": "c1", "documents": 3}


def entry(doc_id="d", **other):
    return {"doc_id": doc_id, "title": "T", "text": "x", "score": 1.0, **other}


def reply_of(*rankings, **other):
    return Reply({"index": INDEX, "rankings": rankings, **other})


def site(search=lambda asked: None, **health):
    """A server of protocol leret. Each query finds itself where ``search``, a Reply or a function, has no answer."""

    def answer(asked):
        if asked.path == "/health":
            return Reply(HEALTH | health)
        reply = search if isinstance(search, Reply) else search(asked)
        return reply or reply_of(*([entry(query)] for query in asked.json["queries"]))

    return loopback(answer)


def sizes(server):
    return sorted(len(a.json["queries"]) for a in server.asked if a.path == "/search")


def first_ids(rankings):
    return [ranking[0].doc_id if ranking else None for ranking in rankings]


@pytest.mark.parametrize(("wished", "allowed"), [(4, 1024), (1024, 4)])
def test_batches_respect_both_limits_and_keep_their_order(wished, allowed):
    queries = ["", *(f"q{i}" for i in range(10)), " \n"]
    with site(max_queries=allowed) as server:
        rankings = remote(server.url, queries_per_request=wished).search(queries, 3)
    assert first_ids(rankings) == [None, *queries[1:-1], None]
    assert sizes(server) == [2, 4, 4]  # blank queries are not sent


FAULTS = {
    "cut off": Reply(reply_of([entry()], [entry()]).body[:-9]),
    "no list": reply_of(None, []),
    "a score that is NaN": reply_of([entry(score=float("nan"))], []),
    "no id": reply_of([entry(None)], []),
    "500": Reply({"message": "boom"}, 500),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_request_is_an_outage_not_an_empty_ranking(fault):
    replies = [FAULTS[fault]]
    with site(lambda _: replies.pop() if replies else None) as server:
        asker = remote(server.url)
        with pytest.raises(RetrievalError) as caught:
            asker.search(["a", "b"], 3)
        assert caught.value.exit_code == 1
        if FAULTS[fault].status == 200:
            assert first_ids(asker.search(["a", "b"], 3)) == ["a", "b"]


@pytest.mark.parametrize("status", [400, 401, 302])
def test_a_refusal_is_raised_at_once(status):
    reply = Reply({"error": True, "message": "no such thing"}, status, {"Location": "http://example.org/"})
    with site(reply) as server, pytest.raises(RetrievalError, match=f"{status}: no such thing; fix ") as caught:
        remote(server.url, retry_for_s=60).search(["a"], 3)
    assert (caught.value.exit_code, sizes(server)) == (2, [1])


@pytest.mark.parametrize(("status", "at_once"), [(500, 1), (413, 1024)])
def test_only_the_faulty_query_of_a_batch_fails(status, at_once):
    def search(asked):
        return Reply({"message": "too odd"}, status) if "bad" in asked.json["queries"] else None

    with site(search) as server, pytest.raises(PartialResultsError, match=f"answered {status}: too odd") as caught:
        remote(server.url, queries_per_request=at_once).search(["a", "b", "", "bad", "c", "d", "e"], 3)
    answered = {query: [p.doc_id for p in ranking] for query, ranking in caught.value.answered.items()}
    assert answered == {"": [], **{query: [query] for query in "abcde"}}


def test_the_digest_depends_on_index_and_doc_id_not_on_the_url():
    with site() as one, site() as other:
        assert remote(one.url).digest == remote(f"{other.url}/search").digest == INDEX
        assert remote(one.url, doc_id="title").digest != INDEX
        named = [remote(s.url, protocol="colbert", name="wiki").digest for s in (one, other)]
        assert named[0] == named[1]
        assert remote(one.url, protocol="colbert").digest != remote(other.url, protocol="colbert").digest


@pytest.mark.parametrize(
    ("token", "sent"), [("s3cret", "Bearer s3cret"), ("Basic bGVyZXQ6czNjcmV0", "Basic bGVyZXQ6czNjcmV0")]
)
def test_the_token_is_only_in_the_header(token, sent, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", token)
    with site(Reply(f"who is {token.split()[-1]}?", 403)) as server:
        asker = remote(server.url, token_env="SOME_TOKEN")
        with pytest.raises(RetrievalError, match="who is") as caught:
            asker.search(["a"], 1)
    asked = server.asked[-1]
    assert asked.headers["Authorization"] == sent
    assert token.split()[-1] not in f"{caught.value}{asker!r}{asked.path}{asked.params}{asked.json}"
    monkeypatch.delenv("SOME_TOKEN")
    with pytest.raises(ConfigError, match="SOME_TOKEN is not set"):
        remote(server.url, token_env="SOME_TOKEN")


def test_another_index_or_corpus_or_a_health_answer_with_wrong_facts_is_refused():
    with site(Reply({"index": "other", "rankings": [[entry()]]})) as server:
        with pytest.raises(RetrievalError, match="serves a different index"):
            remote(server.url, retry_for_s=60).search(["a"], 1)
        with pytest.raises(RetrievalError, match="an index of a different corpus"):
            remote(server.url, Corpus([Document("a", "", "x")])).search(["a"], 1)
    health = loopback(Reply({"status": "ok"}))
    with health as server, pytest.raises(RetrievalError, match=r"expects a different token.*token_env") as caught:
        remote(server.url, retry_for_s=60).info()
    assert (caught.value.exit_code, len(server.asked)) == (2, 1)
    with site(documents=float("inf")) as server, pytest.raises(RetrievalError, match="/health sent an invalid"):
        remote(server.url).info()


@pytest.mark.parametrize("url", ["http://leret:s3cret@h:80", "leret:s3c@ret@h:80", "http://h?token=s3cret"])
def test_a_url_with_a_password_is_refused(url, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.dump({"data": {"kind": "world"}, "retriever": {"kind": "remote", "urls": [url]}}))
    with pytest.raises(ConfigError, match=r"r\.yaml:\d+: retriever\.urls.*token_env") as caught:
        load_recipe(recipe, SamplingRecipe)
    assert "s3c" not in str(caught.value)
    if url.startswith("http://leret"):
        with pytest.raises(ConfigError, match="--token-env") as caught:
            open_retriever(url)
        assert "s3c" not in str(caught.value)


def test_parents_travel_from_server_to_client():
    chunks = Corpus([Document("a#0", "", "cat", "a"), Document("b", "", "cat dog")])
    with running(BM25.build(chunks)) as server:
        [ranking] = remote(server.url).search(["cat"], 2)
        assert {passage.doc_id: passage.parent for passage in ranking} == {"a#0": "a", "b": None}
    with site(reply_of([entry(parent=3)])) as server, pytest.raises(RetrievalError, match="parent is not a string"):
        remote(server.url).search(["q"], 1)


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
