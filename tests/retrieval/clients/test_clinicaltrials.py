"""ClinicalTrials.gov, against replies in the shapes of its API, on loopback."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leret.config.retriever import ClinicalTrialsSettings
from leret.core.errors import RetrievalError
from leret.retrieval.clients.clinicaltrials import ClinicalTrials
from tests.retrieval.serving import Asked, Reply, loopback

QUERY = '(diabetes OR "type 2") AND AREA[Phase]PHASE3 AND NOT insulin'


def trials(url: str, **settings: Any) -> ClinicalTrials:
    given = {"url": f"{url}/api/v2", "retry_for_s": 0.0, "timeout_s": 5.0, "requests_per_s": 1e6, **settings}
    return ClinicalTrials(ClinicalTrialsSettings(**given))


def study(number: int, **identity: Any) -> dict[str, Any]:
    return {
        "protocolSection": {
            "identificationModule": {"nctId": f"NCT{number:08d}", "briefTitle": f"Trial {number}", **identity},
            "descriptionModule": {"briefSummary": f"Summary {number}."},
        }
    }


def pages(n: int) -> Any:
    """``n`` studies, in pages of what is asked for."""

    def answer(asked: Asked) -> Reply:
        start, size = int(asked.params.get("pageToken", "0")), int(asked.params["pageSize"])
        body: dict[str, Any] = {"studies": [study(i) for i in range(start, min(n, start + size))]}
        if start + size < n:
            body["nextPageToken"] = str(start + size)
        return Reply(body)

    return answer


def test_a_query_goes_as_it_is_pasted_and_the_order_is_the_sites() -> None:
    with loopback(pages(5)) as server:
        ranking = trials(server.url, min_date="2010-01-01", sort="LastUpdatePostDate:desc").search([QUERY], 3)[0]
    asked = server.asked[0]
    assert (asked.method, asked.path) == ("GET", "/api/v2/studies")
    assert asked.params == {
        "query.term": QUERY, "pageSize": "3", "format": "json", "sort": "LastUpdatePostDate:desc",
        "fields": "NCTId,BriefTitle,OfficialTitle,BriefSummary",
        "filter.advanced": "AREA[StudyFirstPostDate]RANGE[2010-01-01,MAX]",
    }  # fmt: skip
    assert [(p.doc_id, p.title, p.text, p.score) for p in ranking] == [
        ("NCT00000000", "Trial 0", "Summary 0.", 1.0),
        ("NCT00000001", "Trial 1", "Summary 1.", 1 / 2),
        ("NCT00000002", "Trial 2", "Summary 2.", 1 / 3),
    ]


def test_pages_are_followed_as_far_as_k() -> None:
    with loopback(pages(2600)) as server:
        ranking = trials(server.url).search(["x"], 2100)[0]
        assert len(ranking) == 2100
        assert ranking[-1].doc_id == "NCT00002099"
        assert len(server.asked) == 3


def test_studies_lack_parts() -> None:
    bare = {"protocolSection": {"identificationModule": {"nctId": "NCT1", "officialTitle": "Official"}}}
    with loopback(lambda _: Reply({"studies": [bare]})) as server:
        found = trials(server.url).search(["x"], 3)[0]
    assert [(p.doc_id, p.title, p.text) for p in found] == [("NCT1", "Official", "")]


def test_nothing_found_is_an_empty_ranking_and_blank_is_not_sent() -> None:
    with loopback(lambda _: Reply({"studies": []})) as server:
        assert trials(server.url).search(["x", "", "\x00"], 3) == [(), (), ()]
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply("<html>"), id="html"),
        pytest.param(Reply({"totalCount": 1}), id="no-studies"),
        pytest.param(Reply({"studies": [{}]}), id="no-id"),
        pytest.param(Reply({"studies": "x"}), id="no-list"),
        pytest.param(Reply({"studies": [], "nextPageToken": "x"}), id="an-empty-page-that-is-not-the-last"),
        pytest.param(Reply("no", 500), id="500"),
        pytest.param(Reply("slow down", 429, {"Retry-After": "30"}), id="429"),
        pytest.param(Reply("who are you", 403), id="403"),
    ],
)
def test_a_failure_is_an_error_and_never_an_empty_ranking(reply: Reply) -> None:
    with loopback(lambda _: reply) as server, pytest.raises(RetrievalError):
        trials(server.url).search(["x"], 3)


def test_a_query_of_bad_syntax_finds_nothing_but_settings_that_are_refused_are_an_error() -> None:
    def answer(asked: Asked) -> Reply:
        return Reply("Invalid query", 400) if "((" in asked.params["query.term"] else pages(1)(asked)

    with loopback(answer) as server:
        engine = trials(server.url)
        assert [len(r) for r in engine.search(["((a", "good", "(((b"], 3)] == [0, 1, 0]
        assert engine.refusals.n == 2
        assert sum(a.params["query.term"] == "heart" for a in server.asked) == 1
    with (
        loopback(lambda _: Reply("Unknown sort", 400)) as server,
        pytest.raises(RetrievalError, match="refuses every query under these settings"),
    ):
        trials(server.url, sort="nope").search(["good"], 3)


def test_the_answers_of_another_site_are_not_the_registrys() -> None:
    assert len({ClinicalTrials(ClinicalTrialsSettings()).digest, trials("http://127.0.0.1:9").digest}) == 2


def test_a_megabyte_is_answered_and_bad_dates_are_refused() -> None:
    with loopback(lambda asked: Reply("too long", 414) if len(str(asked.params)) > 9999 else pages(1)(asked)) as server:
        found = trials(server.url).search(["y", "x" * 60_000], 1)
        assert [len(r) for r in found] == [1, 0]
    with pytest.raises(ValidationError, match="is no date"):
        ClinicalTrialsSettings(max_date="2001/05/01")
