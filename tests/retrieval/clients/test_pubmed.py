"""PubMed, against replies in the shapes that NCBI sends, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest

from leret.config.retriever import CacheSettings, PubMedSettings
from leret.core.errors import RetrievalError
from leret.core.types import digest
from leret.retrieval.caching import with_cache
from leret.retrieval.clients.pubmed import PubMed
from leret.retrieval.load import load_retriever
from tests.retrieval.clients.ncbi import efetch, esearch, ncbi
from tests.retrieval.serving import Asked, Reply, loopback

BOOLEAN = '("heart attack"[MeSH Terms] OR infarct*) AND aspirin[tiab] NOT (rats & mice)'


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No key of the machine's; and the rates that engines ask for, which nobody waits for."""
    asked: list[float] = []
    monkeypatch.delenv("NCBI_API_KEY", raising=False)
    monkeypatch.setattr("leret.retrieval.clients.pubmed.shared_rate", lambda _, per_s: asked.append(per_s))
    return asked


def pubmed(url: str, **settings: Any) -> PubMed:
    return PubMed(PubMedSettings(**{"url": url, "retry_for_s": 0.0, "timeout_s": 5.0, **settings}))


def test_a_boolean_query_goes_as_it_is_pasted_and_the_order_is_pubmeds() -> None:
    with loopback(ncbi({BOOLEAN: ["31", "7", "52", "8"]}, reverse=True)) as server:
        ranking = pubmed(server.url, email="a@b.org").search([BOOLEAN], 3)[0]
    search, fetch = server.asked
    assert (search.method, search.path) == ("GET", "/esearch.fcgi")
    assert search.params == {
        "db": "pubmed", "retmode": "json", "term": BOOLEAN, "retmax": "3", "sort": "relevance",
        "tool": "leret", "email": "a@b.org",
    }  # fmt: skip
    assert (fetch.method, fetch.path) == ("POST", "/efetch.fcgi")
    assert fetch.params["id"] == "31,7,52"
    assert fetch.params["retmode"] == "xml"
    assert [passage.doc_id for passage in ranking] == ["31", "7", "52"]
    assert [passage.score for passage in ranking] == [1.0, 1 / 2, 1 / 3]


def test_markup_labels_books_and_missing_parts_of_records_are_read() -> None:
    with loopback(ncbi({"q": ["31", "7", "52", "8"]})) as server:
        found = {p.doc_id: (p.title, p.text) for p in pubmed(server.url).search(["q"], 9)[0]}
    assert found == {
        "31": ("Aspirin & p53: CO2 in rats.", "BACKGROUND: We asked <5. RESULTS: It 14C did."),
        "7": ("No abstract here", ""),
        "52": ("Odd Syndrome", "A review."),
        "8": ("Titre français", ""),
    }


def test_an_article_that_is_cited_is_not_taken_for_a_record() -> None:
    with loopback(ncbi({"q": ["31"]})) as server:
        assert [p.doc_id for p in pubmed(server.url).search(["q"], 9)[0]] == ["31"]


@pytest.mark.parametrize("ids", [["31", "404"], ["404"]])
def test_an_article_without_a_record_keeps_its_place(ids: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with loopback(ncbi({"q": ids})) as server:
        ranking = pubmed(server.url).search(["q"], 9)[0]
        assert [a.params["id"] for a in server.asked if "efetch" in a.path] == [",".join(ids), "404,1"]
    assert [(p.doc_id, p.title) for p in ranking][-1] == ("404", "")
    assert "no record of 1 articles" in caplog.text


def test_records_that_an_answer_lacks_are_asked_for_again() -> None:
    def site(cut_short: Iterator[bool]) -> Any:
        def answer(asked: Asked) -> Reply:
            if "esearch" in asked.path:
                return esearch(["31", "7", "8"])
            return efetch(asked.params["id"].split(",")[: 1 if next(cut_short) else None])

        return answer

    with loopback(site(chain([True], repeat(False)))) as server:
        assert all(p.title for p in pubmed(server.url).search(["q"], 9)[0])
    with loopback(site(repeat(True))) as server, pytest.raises(RetrievalError, match="too few records"):
        pubmed(server.url, retry_for_s=20).search(["q"], 9)


def test_fewer_ids_than_were_found_and_asked_for_are_no_answer() -> None:
    with loopback(lambda _: esearch(["1", "2", "3"], count=500)) as server:
        engine = pubmed(server.url, texts=False)
        assert len(engine.search(["a"], 3)[0]) == 3
        with pytest.raises(RetrievalError, match="sent 3 ids; 10 were asked for"):
            engine.search(["a"], 10)


def test_ids_alone_need_no_second_request() -> None:
    with loopback(ncbi({"q": ["31"]})) as server:
        assert pubmed(server.url, texts=False).search(["q"], 9)[0][0].doc_id == "31"
        assert len(server.asked) == 1


def test_dates_and_the_key_are_sent_and_a_key_allows_ten_a_second(
    monkeypatch: pytest.MonkeyPatch, rates: list[float]
) -> None:
    pubmed("http://127.0.0.1:9")
    monkeypatch.setenv("NCBI_API_KEY", "k3y")
    with loopback(ncbi({})) as server:
        pubmed(server.url, min_date="2001/05", max_date="2020", texts=False).search(["q"], 1)
        params = server.asked[0].params
    assert rates == [3.0, 10.0]
    assert (params["datetype"], params["mindate"], params["maxdate"]) == ("pdat", "2001/05", "2020")
    assert params["api_key"] == "k3y"


@pytest.mark.parametrize("status", [200, 403])
@pytest.mark.parametrize("cut", [0, 168, 170])
def test_a_key_that_ncbi_sends_back_is_in_no_message(status: int, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCBI_API_KEY", "s3cr3tk3y")
    body = {"error_": "API key invalid".ljust(cut, "."), "api-key": "s3cr3tk3y"}
    with (
        loopback(lambda _: Reply(body, status)) as server,
        pytest.raises(RetrievalError, match="API key invalid") as caught,
    ):
        pubmed(server.url, retry_for_s=20).search(["q"], 1)
    assert "s3c" not in str(caught.value)


def test_a_blank_query_is_not_sent_and_a_repeated_one_once() -> None:
    with loopback(ncbi({"a b": ["7"]})) as server:
        found = pubmed(server.url, texts=False).search(["", " \n\t", "a\nb", "a b "], 1)
        assert [[p.doc_id for p in ranking] for ranking in found] == [[], [], ["7"], ["7"]]
        assert len(server.asked) == 1


def test_control_characters_and_halves_of_surrogates_become_spaces() -> None:
    with loopback(ncbi({})) as server:
        pubmed(server.url, texts=False).search(["a\x00b\ud800c\x1b"], 1)
        assert server.asked[0].params["term"] == "a b c"


def test_a_long_query_goes_by_post() -> None:
    long = "x OR " * 200_000 + "y"
    with loopback(ncbi({long: ["7"]})) as server:
        assert pubmed(server.url, texts=False).search([long], 1)[0][0].doc_id == "7"
        assert server.asked[0].method == "POST"


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply({"esearchresult": {"ERROR": "Search Backend failed: timeout"}}), id="backend"),
        pytest.param(Reply({"error": "API rate limit exceeded", "count": "11"}, 429), id="429"),
        pytest.param(Reply({"error": "API rate limit exceeded", "count": "4"}), id="rate-limit-under-200"),
        pytest.param(Reply("<html>maintenance</html>"), id="html"),
        pytest.param(Reply('{"header": {}, "esearchresult": {"count": "1", "idl'), id="truncated"),
        pytest.param(Reply({"header": {}}), id="no-result"),
        pytest.param(esearch([], count=5), id="a-count-without-ids"),
        pytest.param(Reply({"esearchresult": {"count": "1", "idlist": ["x1"]}}), id="an-id-that-is-none"),
        pytest.param(Reply({"esearchresult": {"idlist": []}}), id="no-count"),
        pytest.param(Reply("oops", 502), id="502"),
        pytest.param(Reply("forbidden", 403), id="403"),
    ],
)
def test_a_failed_search_is_an_error_and_never_an_empty_ranking(reply: Reply) -> None:
    with loopback(lambda _: reply) as server, pytest.raises(RetrievalError):
        pubmed(server.url).search(["a"], 3)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply("<PubmedArticleSet></PubmedArticleSet>"), id="no-record"),
        pytest.param(
            Reply('<?xml version="1.0"?><eFetchResult><ERROR>Empty result</ERROR></eFetchResult>'), id="error"
        ),
        pytest.param(Reply("<PubmedArticleSet><PubmedArticle>"), id="cut-off"),
        pytest.param(Reply('{"error": "API rate limit exceeded"}'), id="json"),
        pytest.param(Reply(b"\x00\xff"), id="bytes"),
        pytest.param(
            Reply('<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c SYSTEM "file:///etc/hostname">]><a>&c;</a>'), id="entities"
        ),
    ],
)
def test_a_failed_fetch_is_an_error(reply: Reply) -> None:
    def answer(asked: Asked) -> Reply:
        return esearch(["31"]) if "esearch" in asked.path else reply

    with loopback(answer) as server, pytest.raises(RetrievalError):
        pubmed(server.url).search(["a"], 3)


def test_a_query_that_is_refused_finds_nothing_but_settings_that_are_refused_are_an_error() -> None:
    def answer(asked: Asked) -> Reply:
        return Reply("bad syntax", 400) if asked.params.get("term") == "bad" else esearch(["7"])

    with loopback(answer) as server:
        engine = pubmed(server.url, texts=False)
        assert engine.search(["bad", "good"], 1)[0] == ()
        assert engine.refusals.n == 1
    with (
        loopback(lambda _: Reply("bad parameter", 400)) as server,
        pytest.raises(RetrievalError, match="refuses every query under these settings"),
    ):
        pubmed(server.url).search(["a"], 1)


def test_an_outage_that_begins_after_a_refused_query_is_an_error_too() -> None:
    down = threading.Event()

    def answer(asked: Asked) -> Reply:
        refused = down.is_set() or asked.params["term"] == "bad"
        return Reply("bad request", 400) if refused else esearch(["7"])

    with loopback(answer) as server:
        engine = pubmed(server.url, texts=False)
        assert engine.search(["bad"], 1) == [()]
        down.set()
        with pytest.raises(RetrievalError, match="refuses every query"):
            engine.search(["lung"], 1)
        down.clear()
        assert engine.search(["bad", "(bad"], 1)[0] == ()


def test_a_refusal_of_the_key_is_never_about_the_query() -> None:
    def answer(asked: Asked) -> Reply:
        plain = asked.params["term"] == "heart"
        return esearch(["7"]) if plain else Reply({"error": "API key invalid", "type": "client"}, 400)

    with loopback(answer) as server, pytest.raises(RetrievalError, match="API key invalid"):
        pubmed(server.url, texts=False).search(["lung"], 1)


def test_a_query_is_as_long_as_it_is_in_a_url_and_a_url_that_is_too_long_is_an_error() -> None:
    def answer(asked: Asked) -> Reply:
        return esearch(["7"]) if asked.method == "POST" or asked.params["term"] == "heart" else Reply("too long", 414)

    with loopback(answer) as server:
        engine = pubmed(server.url, texts=False)
        assert engine.search(["心" * 1_400], 1)[0][0].doc_id == "7"
        with pytest.raises(RetrievalError, match="answered 414"):
            engine.search(["lung"], 1)


@pytest.mark.parametrize("k", [0, 10_000])
def test_k_is_bounded(k: int) -> None:
    with pytest.raises(RetrievalError, match="from 1 to 9999"):
        pubmed("http://127.0.0.1:9").search(["a"], k)


def test_a_run_replays_offline_from_the_cache(tmp_path: Any) -> None:
    cache = CacheSettings(path=str(tmp_path))
    with loopback(ncbi({BOOLEAN: ["31", "7"]})) as server:
        online = with_cache(pubmed(server.url), PubMedSettings(cache=cache))
        want = online.search([BOOLEAN, "nothing"], 5)
        online.close()  # type: ignore[attr-defined]
    settings = PubMedSettings(url=server.url, offline=True, cache=cache)
    offline = with_cache(load_retriever(settings, None, tmp_path), settings)
    assert offline.search([BOOLEAN, "nothing"], 5) == want
    assert want[0][0].title == "Aspirin & p53: CO2 in rats."
    with pytest.raises(RetrievalError, match="offline is set, and the cache does not hold 1 queries, 'new'"):
        offline.search([BOOLEAN, "new"], 5)


def test_the_answers_of_another_site_are_not_pubmeds() -> None:
    real = PubMed(PubMedSettings())
    mirrors = [pubmed(url) for url in ("http://127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:8")]
    assert real.digest == digest("pubmed", "relevance", None, None, True)  # as it was before the URL was part of it
    assert len({real.digest, *(mirror.digest for mirror in mirrors)}) == 3


def test_efetch_asks_for_two_hundred_records_at_once() -> None:
    ids = [str(i) for i in range(1, 451)]

    def answer(asked: Asked) -> Reply:
        if "esearch" in asked.path:
            return esearch(ids)
        wanted = asked.params["id"].split(",")
        body = "".join(
            f"<PubmedArticle><MedlineCitation><PMID>{i}</PMID><Article><ArticleTitle>t{i}</ArticleTitle></Article>"
            "</MedlineCitation></PubmedArticle>"
            for i in wanted
        )
        return Reply(f"<PubmedArticleSet>{body}</PubmedArticleSet>")

    with loopback(answer) as server:
        ranking = pubmed(server.url).search(["q"], 450)[0]
        assert [p.title for p in ranking] == [f"t{i}" for i in ids]
        sizes = sorted(len(a.params["id"].split(",")) for a in server.asked if "efetch" in a.path)
        assert sizes == [50, 200, 200]
