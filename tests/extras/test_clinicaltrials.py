import pytest

from leret.core.errors import RetrievalError
from leret.core.types import Passage
from leret.extras.clinicaltrials import ClinicalTrials, ClinicalTrialsSettings
from tests.retrieval.serving import Reply, loopback

QUERY = '(diabetes OR "type 2") AND AREA[Phase]PHASE3 AND NOT insulin'


def trials(url, **settings):
    values = {"url": f"{url}/api/v2", "retry_for_s": 0.0, "timeout_s": 5.0, "requests_per_s": 1e6, **settings}
    return ClinicalTrials(ClinicalTrialsSettings(**values))


def study(number):
    return {
        "protocolSection": {
            "identificationModule": {"nctId": f"NCT{number:08d}", "briefTitle": f"Trial {number}"},
            "descriptionModule": {"briefSummary": f"Summary {number}."},
        }
    }


def pages(n):
    def answer(asked):
        start, size = int(asked.params.get("pageToken", "0")), int(asked.params["pageSize"])
        more = {"nextPageToken": str(start + size)} if start + size < n else {}
        return Reply({"studies": [study(i) for i in range(start, min(n, start + size))], **more})

    return answer


def test_a_query_is_sent_unchanged_and_order_is_kept():
    with loopback(pages(5)) as server:
        [ranking] = trials(server.url, min_date="2010-01-01", sort="LastUpdatePostDate:desc").search([QUERY], 3)
    [asked] = server.asked
    assert (asked.method, asked.path) == ("GET", "/api/v2/studies")
    assert asked.params == {
        "query.term": QUERY, "pageSize": "3", "format": "json", "sort": "LastUpdatePostDate:desc",
        "fields": "NCTId,BriefTitle,OfficialTitle,BriefSummary",
        "filter.advanced": "AREA[StudyFirstPostDate]RANGE[2010-01-01,MAX]",
    }  # fmt: skip
    assert ranking == tuple(Passage(f"NCT0000000{i}", f"Trial {i}", f"Summary {i}.", 1 / (i + 1)) for i in range(3))


def test_pages_are_followed_up_to_k():
    with loopback(pages(2600)) as server:
        ranking = trials(server.url).search(["x"], 2100)[0]
    assert (len(ranking), ranking[-1].doc_id, len(server.asked)) == (2100, "NCT00002099", 3)


FAULTS = {
    "no studies": Reply({"totalCount": 1}),
    "no id": Reply({"studies": [{}]}),
    "an empty page that is not the last": Reply({"studies": [], "nextPageToken": "x"}),
    "a refusal of every query": Reply("Unknown sort", 400),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_an_error_not_an_empty_ranking(fault):
    with loopback(FAULTS[fault]) as server, pytest.raises(RetrievalError):
        trials(server.url).search(["x"], 3)
