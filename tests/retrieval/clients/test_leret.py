"""Search servers: four protocols, every way to fail, and never an empty ranking for a failure. Retries: tests/http."""

from __future__ import annotations

import gzip
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import leret.http.answers
from leret.config.load import load_recipe
from leret.config.retriever import CacheSettings, RemoteSettings
from leret.config.sampling import SamplingRecipe
from leret.core import yaml
from leret.core.errors import ConfigError, RetrievalError
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.retrieval.base import PartialResultsError
from leret.retrieval.caching import CachedRetriever, with_cache
from leret.retrieval.clients.leret import Remote
from leret.retrieval.load import open_retriever
from tests.retrieval.serving import Asked, Reply, loopback

INDEX = "i" * 32
HEALTH = Reply({"status": "ok", "engine": "bm25", "index": INDEX, "corpus": "c1", "documents": 3})


def remote(url: str, **settings: Any) -> Remote:
    given = {"urls": (url,), "protocol": "leret", "timeout_s": 2.0, "retry_for_s": 0.0, **settings}
    return Remote(RemoteSettings(**given))


def entry(doc_id: Any = "d", score: Any = 1.0, title: Any = "T", text: Any = "x") -> dict[str, Any]:
    return {"doc_id": doc_id, "title": title, "text": text, "score": score}


def echo(asked: Asked) -> Reply:
    """Protocol leret: each query finds itself."""
    if asked.path == "/health":
        return HEALTH
    return Reply({"index": INDEX, "rankings": [[entry(query)] for query in asked.json["queries"]]})


def answers(*replies: Reply) -> Any:
    """The replies in turn, then the last one for ever."""
    left = list(replies)

    def answer(asked: Asked) -> Reply:
        if asked.path == "/health":
            return HEALTH
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


def good(n: int = 1) -> Reply:
    return Reply({"index": INDEX, "rankings": [[entry()]] * n})


def test_batches_are_cut_and_put_together_in_their_order() -> None:
    with loopback(echo) as server:
        found = remote(server.url, queries_per_request=4).search([f"q{i}" for i in range(10)], 3)
        assert [ranking[0].doc_id for ranking in found] == [f"q{i}" for i in range(10)]
        assert sorted(len(a.json["queries"]) for a in server.asked if a.path == "/search") == [2, 4, 4]


def test_blank_queries_find_nothing_and_are_not_sent() -> None:
    with loopback(echo) as server:
        assert [len(r) for r in remote(server.url).search(["", "a", " \n"], 3)] == [0, 1, 0]
        assert [a.json["queries"] for a in server.asked if a.path == "/search"] == [["a"]]


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply("<html>login</html>"), id="html"),
        pytest.param(Reply('{"index": "' + INDEX + '", "rankings": [[{"doc'), id="truncated-json"),
        pytest.param(Reply(good().body, cut=True), id="cut-off"),
        pytest.param(good(1), id="fewer-lists-than-queries"),
        pytest.param(good(3), id="more-lists-than-queries"),
        pytest.param(Reply({"index": INDEX, "rankings": [None, []]}), id="no-list"),
        pytest.param(Reply({"index": INDEX}), id="no-rankings"),
        pytest.param(Reply([]), id="not-an-object"),
        pytest.param(Reply("[" * 100_000), id="nested"),
        pytest.param(Reply({"index": INDEX, "rankings": [[entry(score="x")], []]}), id="score-no-number"),
        pytest.param(
            Reply(
                f'{{"index": "{INDEX}", "rankings": [[{{"doc_id": "a", "title": "", "text": "", "score": NaN}}], []]}}'
            ),
            id="score-nan",
        ),
        pytest.param(Reply({"index": INDEX, "rankings": [[entry(doc_id=None)], []]}), id="no-id"),
        pytest.param(Reply({"index": INDEX, "rankings": [[entry(text=None)], []]}), id="no-text"),
        pytest.param(Reply({"index": INDEX, "rankings": [["x"], []]}), id="no-passage"),
        pytest.param(Reply({"message": "boom"}, 500), id="500"),
        pytest.param(Reply("busy", 503), id="503"),
        pytest.param(Reply("busy", 429, {"Retry-After": "60"}), id="429"),
        pytest.param(Reply("", delay_s=0.4), id="slow"),
    ],
)
def test_a_failure_is_an_outage_and_never_an_empty_ranking(reply: Reply) -> None:
    with loopback(answers(reply)) as server, pytest.raises(RetrievalError) as caught:
        remote(server.url, timeout_s=0.2).search(["a", "b"], 3)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("status", [400, 401, 302])
def test_a_refusal_is_told_at_once(status: int) -> None:
    reply = Reply({"error": True, "message": "no such thing"}, status, {"Location": "http://example.org/"})
    with loopback(answers(reply)) as server:
        with pytest.raises(RetrievalError, match=f"answered {status}: no such thing; correct ") as caught:
            remote(server.url, retry_for_s=60).search(["a"], 3)
        assert caught.value.exit_code == 2
        assert sum(a.path == "/search" for a in server.asked) == 1


def test_a_server_that_comes_back_in_time_is_waited_for() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    asker = remote(f"http://127.0.0.1:{port}", retry_for_s=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asker.search, ["a"], 3)
        time.sleep(0.2)
        assert not waiting.done()
        with loopback(echo, port):
            assert waiting.result(60)[0][0].doc_id == "a"


def test_the_others_of_a_batch_are_not_lost_with_one_that_fails() -> None:
    def answer(asked: Asked) -> Reply:
        return Reply("no", 500) if asked.path == "/search" and asked.json["queries"] == ["bad"] else echo(asked)

    with loopback(answer) as server, pytest.raises(PartialResultsError) as caught:
        remote(server.url, queries_per_request=1).search(["a", "bad", "b"], 3)
    assert {query: ranking[0].doc_id for query, ranking in caught.value.answered.items()} == {"a": "a", "b": "b"}


def test_of_a_batch_that_is_refused_only_the_query_that_is_refused_alone_fails() -> None:
    def answer(asked: Asked) -> Reply:
        if asked.path == "/search" and "bad" in asked.json["queries"]:
            return Reply({"message": "too odd"}, 413)
        return echo(asked)

    with loopback(answer) as server, pytest.raises(PartialResultsError, match="answered 413: too odd") as caught:
        remote(server.url).search(["a", "b", "", "bad", "c", "d", "e"], 3)
    found = {query: [p.doc_id for p in ranking] for query, ranking in caught.value.answered.items()}
    assert found == {"": [], **{query: [query] for query in "abcde"}}


def test_a_batch_whose_answer_is_too_large_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leret.http.answers, "MAX_BYTES", 1000)

    def answer(asked: Asked) -> Reply:
        return (
            echo(asked)
            if asked.path == "/health"
            else Reply(dict(echo(asked).body, padding="x" * 250 * len(asked.json["queries"])))
        )  # type: ignore[call-overload]

    with loopback(answer) as server:
        assert [r[0].doc_id for r in remote(server.url).search(list("abcdefgh"), 3)] == list("abcdefgh")
        assert sorted(len(a.json["queries"]) for a in server.asked if a.path == "/search") == [2, 2, 2, 2, 4, 4, 8]


def test_a_refusal_of_every_query_ends() -> None:
    with loopback(answers(Reply("k is too large", 400))) as server:
        with pytest.raises(RetrievalError, match="k is too large"):
            remote(server.url).search(list("abcdefgh"), 3)
        assert sum(a.path == "/search" for a in server.asked) == 8 + 4 + 2 + 1


def test_long_queries_go_apart_in_utf_8_and_halves_of_surrogates_travel() -> None:
    with loopback(echo) as server:
        queries = [f"{i}{'é' * 300_000}" for i in range(4)]
        assert [r[0].doc_id for r in remote(server.url).search(queries, 1)] == queries
        sent = [a.body for a in server.asked if a.path == "/search"]
        assert [len(body) < 650_000 for body in sent] == [True] * 4
        odd = ["a\ud800b", "\udc00é", "\x01\x7f\x85\u2028c"]
        assert [r[0].doc_id for r in remote(server.url).search(odd, 1)] == odd
        assert server.asked[-1].headers["Content-Type"] == "application/json"


def test_a_server_is_sent_no_more_queries_at_once_than_it_takes() -> None:
    def answer(asked: Asked) -> Reply:
        return Reply({**dict(HEALTH.body), "max_queries": 3}) if asked.path == "/health" else echo(asked)  # type: ignore[arg-type]

    with loopback(answer) as server:
        assert len(remote(server.url).search([f"q{i}" for i in range(7)], 1)) == 7
        assert sorted(len(a.json["queries"]) for a in server.asked if a.path == "/search") == [1, 3, 3]


def test_another_index_than_at_the_beginning_is_refused() -> None:
    with (
        loopback(answers(Reply({"index": "other", "rankings": [[entry()]]}))) as server,
        pytest.raises(RetrievalError, match="serves another index"),
    ):
        remote(server.url, retry_for_s=60).search(["a"], 1)


def test_an_index_of_another_corpus_is_refused() -> None:
    corpus = Corpus([Document("a", "", "x")])
    with loopback(echo) as server, pytest.raises(RetrievalError, match="an index of another corpus"):
        Remote(RemoteSettings(urls=(server.url,), retry_for_s=0), corpus).search(["a"], 1)


def test_the_digest_is_the_index_wherever_it_is_served() -> None:
    with loopback(echo) as one, loopback(echo) as other:
        assert remote(one.url).digest == remote(f"{other.url}/search").digest == INDEX
        named = [remote(s.url, protocol="colbert", name="wiki").digest for s in (one, other)]
        assert named[0] == named[1]
        assert remote(one.url, protocol="colbert").digest != remote(other.url, protocol="colbert").digest


def test_what_names_a_document_is_part_of_the_digest() -> None:
    with loopback(echo) as server:
        assert len({remote(server.url, doc_id=named).digest for named in ("id", "title")}) == 2


def test_answers_of_a_server_that_nobody_named_are_kept_only_where_it_is_wished(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    for protocol, name, use, kept in (
        ("colbert", None, "auto", False),
        ("retrieve", None, "auto", False),
        ("colbert", None, "on", True),
        ("colbert", "wiki", "auto", True),
        ("leret", None, "auto", True),
    ):
        settings = RemoteSettings(urls=(url,), cache=CacheSettings(path=str(tmp_path), use=use))
        found = with_cache(remote(url, protocol=protocol, name=name), settings)
        assert isinstance(found, CachedRetriever) is kept, (protocol, name, use)


def test_the_token_goes_into_the_header_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    with loopback(answers(Reply("no", 403))) as server:
        asker = remote(server.url, token_env="SOME_TOKEN")
        with pytest.raises(RetrievalError) as caught:
            asker.search(["a"], 1)
        assert server.asked[-1].headers["Authorization"] == "Bearer s3cret"
        assert "s3cret" not in f"{caught.value}{asker!r}{server.asked[-1].path}{server.asked[-1].body!r}"
    monkeypatch.delenv("SOME_TOKEN")
    with pytest.raises(ConfigError, match="SOME_TOKEN is not set"):
        remote(server.url, token_env="SOME_TOKEN")


def test_a_health_that_tells_nothing_asks_for_the_token() -> None:
    with loopback(lambda _: Reply({"status": "ok"})) as server:
        with pytest.raises(RetrievalError, match=r"asks for a token.*token_env") as caught:
            remote(server.url, retry_for_s=60).served()
        assert caught.value.exit_code == 2
        assert len(server.asked) == 1


@pytest.mark.parametrize("url", ["http://leret:s3cret@h:80", "leret:s3c@ret@h:80", "http://h?token=s3cret"])
def test_a_url_with_a_password_is_refused_with_the_key_to_use_instead(url: str, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    retriever = {"kind": "remote", "urls": [url]}
    recipe.write_text(yaml.dump({"data": {"kind": "world"}, "retriever": retriever}))
    with pytest.raises(ConfigError, match=r"r\.yaml:\d+: retriever\.urls.*token_env") as caught:
        load_recipe(recipe, SamplingRecipe)
    assert "s3c" not in str(caught.value)
    if url.startswith("http://leret"):
        with pytest.raises(ConfigError, match="--token-env") as caught:
            open_retriever(url)
        assert "s3c" not in str(caught.value)


def test_user_and_password_of_a_foreign_server_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "Basic bGVyZXQ6czNjcmV0")
    with loopback(answers(Reply("who is bGVyZXQ6czNjcmV0?", 403))) as server:
        with pytest.raises(RetrievalError, match="who is") as caught:
            remote(server.url, protocol="colbert-get", token_env="SOME_TOKEN").search(["a"], 1)
        assert server.asked[-1].headers["Authorization"] == "Basic bGVyZXQ6czNjcmV0"
        assert "bGVy" not in str(caught.value)


BOMB = gzip.compress(bytes(30 * 2**20), 1)
LIES: dict[str, tuple[Reply, str]] = {
    "deep JSON": (Reply("[" * 200_000), "recursion"),
    "deep JSON in a passage": (Reply('{"rankings": [[' + '{"a":' * 900 + "1" + "}" * 900 + "]]}"), "a passage that is"),
    "a score of 400 digits": (Reply({"index": INDEX, "rankings": [[entry(score=10**400)]]}), "int too large"),
    "a bomb": (Reply(BOMB, headers={"Content-Encoding": "gzip"}), "more than 1048576 bytes"),
    "a bomb as an error": (Reply(BOMB, 500, {"Content-Encoding": "gzip"}), "more than 1048576 bytes"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_a_failure_of_its_request_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leret.http.answers, "MAX_BYTES", 2**20)
    lie, cause = LIES[name]
    with loopback(answers(lie, good())) as server:
        asker = remote(server.url)
        with pytest.raises(RetrievalError, match=cause) as caught:
            asker.search(["a"], 1)
        assert caught.value.exit_code == 1
        assert len(asker.search(["a"], 1)[0]) == 1


def test_a_health_with_numbers_that_are_none_is_no_health() -> None:
    told = json.dumps({**HEALTH.body, "documents": float("inf")})  # type: ignore[dict-item]
    with loopback(lambda _: Reply(told)) as server, pytest.raises(RetrievalError, match="/health sent"):
        remote(server.url).served()


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one_is_refused(k: int) -> None:
    with pytest.raises(RetrievalError, match="ask for one document"):
        remote("http://127.0.0.1:9").search(["a"], k)
