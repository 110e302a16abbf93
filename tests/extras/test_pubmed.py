from itertools import chain, repeat

import pytest

from leret.core.errors import RetrievalError
from leret.core.types import Passage
from leret.extras.pubmed import PubMed, PubMedSettings
from tests.extras.ncbi import ARTICLES, efetch, esearch, ncbi
from tests.retrieval.serving import Reply, loopback

BOOLEAN = '("heart attack"[MeSH Terms] OR infarct*) AND aspirin[tiab] NOT (rats & mice)'


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    asked = []
    monkeypatch.delenv("NCBI_API_KEY", raising=False)
    monkeypatch.setattr("leret.extras.pubmed.shared_rate", lambda _, per_s: asked.append(per_s))
    return asked


def pubmed(url, **settings):
    return PubMed(PubMedSettings(**{"url": url, "retry_for_s": 0.0, "timeout_s": 5.0, **settings}))


def test_a_boolean_query_is_sent_unchanged_and_records_are_read_in_order():
    with loopback(ncbi({BOOLEAN: ["31", "7", "52", "8"]})) as server:
        [ranking] = pubmed(server.url, email="a@b.org").search([BOOLEAN], 4)
    search, fetch = server.asked
    assert (search.method, search.path) == ("GET", "/esearch.fcgi")
    assert search.params == {
        "db": "pubmed", "retmode": "json", "term": BOOLEAN, "retmax": "4", "sort": "relevance",
        "tool": "leret", "email": "a@b.org",
    }  # fmt: skip
    assert (fetch.method, fetch.path) == ("POST", "/efetch.fcgi")
    assert (fetch.params["id"], fetch.params["retmode"]) == ("31,7,52,8", "xml")
    assert ranking == (
        Passage("31", "Aspirin & p53: CO2 in rats.", "BACKGROUND: We asked <5. RESULTS: It 14C did.", 1.0),
        Passage("7", "No abstract here", "", 1 / 2),
        Passage("52", "Odd Syndrome", "A review.", 1 / 3),
        Passage("8", "Titre français", "", 1 / 4),
    )


def test_missing_records_are_requested_again():
    def site(cut_short):
        def answer(asked):
            if "esearch" in asked.path:
                return esearch(["31", "7", "8"])
            return efetch([ARTICLES[i] for i in asked.params["id"].split(",")][: 1 if next(cut_short) else None])

        return answer

    with loopback(site(chain([True], repeat(False)))) as server:
        assert all(p.title for p in pubmed(server.url).search(["q"], 9)[0])
    with loopback(site(repeat(True))) as server, pytest.raises(RetrievalError, match="too few records"):
        pubmed(server.url, retry_for_s=20).search(["q"], 9)


def test_dates_and_key_are_sent_and_a_key_raises_the_rate(monkeypatch, rates):
    pubmed("http://127.0.0.1:9")
    monkeypatch.setenv("NCBI_API_KEY", "k3y")
    with loopback(ncbi({})) as server:
        keys = {"api_key_env": "NCBI_API_KEY", "min_date": "2001/05", "max_date": "2020"}
        pubmed(server.url, texts=False, **keys).search(["q"], 1)
    assert rates == [3.0, 10.0]
    want = {"datetype": "pdat", "mindate": "2001/05", "maxdate": "2020", "api_key": "k3y"}
    assert server.asked[0].params.items() >= want.items()


@pytest.mark.parametrize("status", [200, 403])
def test_an_echoed_key_is_removed_from_messages(status, monkeypatch):
    monkeypatch.setenv("NCBI_API_KEY", "s3cr3tk3y")
    body = {"error_": "API key invalid".ljust(168, "."), "api-key": "s3cr3tk3y"}
    with loopback(Reply(body, status)) as server, pytest.raises(RetrievalError, match="API key invalid") as caught:
        pubmed(server.url, retry_for_s=20, api_key_env="NCBI_API_KEY").search(["q"], 1)
    assert "s3c" not in str(caught.value)


FAULTS = {
    "a backend that failed": ("esearch", Reply({"esearchresult": {"ERROR": "Search Backend failed: timeout"}})),
    "a rate limit under 200": ("esearch", Reply({"error": "API rate limit exceeded", "count": "4"})),
    "an id that is none": ("esearch", esearch(["x1"])),
    "no record": ("efetch", efetch([])),
    "cut off": ("efetch", Reply("<PubmedArticleSet><PubmedArticle>")),
    "entities": ("efetch", Reply('<!DOCTYPE a [<!ENTITY c SYSTEM "file:///etc/hostname">]><a>&c;</a>')),
}


@pytest.mark.parametrize(("tool", "reply"), FAULTS.values(), ids=FAULTS)
def test_a_failure_is_an_error_not_an_empty_ranking(tool, reply):
    site = loopback(lambda asked: reply if tool in asked.path else esearch(["31"]))
    with site as server, pytest.raises(RetrievalError):
        pubmed(server.url).search(["a"], 3)


def test_a_400_is_an_empty_ranking_and_a_414_is_an_error():
    def answer(asked):
        if asked.params["term"] == "bad syntax":
            return Reply("bad request", 400)
        return esearch(["7"]) if asked.method == "POST" or asked.params["term"] == "heart" else Reply("too long", 414)

    with loopback(answer) as server:
        engine = pubmed(server.url, texts=False)
        assert engine.search(["bad syntax"], 1) == [()]
        assert [len(rankings) for rankings in engine.search(["心" * 1_400, "x OR " * 200_000 + "y"], 1)] == [1, 1]
        with pytest.raises(RetrievalError, match="answered 414"):
            engine.search(["lung"], 1)
