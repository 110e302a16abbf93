"""Client of ClinicalTrials.gov (API version 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from leret.config.base import BaseUrl, Free
from leret.core.types import Passage, Ranking, SharedInstance, digest
from leret.extras.sites import Site, SiteSettings
from leret.http.client import Answer, Call, HttpError
from leret.http.endpoints import shared_rate
from leret.retrieval.base import CallableRetriever
from leret.retrieval.clients.base import Question, SearchClient, rankings_of
from leret.retrieval.load import EngineKind

_SITE = "https://clinicaltrials.gov/api/v2"
_PAGE = 1_000  # maximum number of studies per response
_MOST = 10_000
_SYNTAX = frozenset({400, 413, 414})
_FIELDS = "NCTId,BriefTitle,OfficialTitle,BriefSummary"

Page = tuple[list[Passage], str | None]

Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class ClinicalTrialsSettings(SiteSettings):
    """ClinicalTrials.gov, through version 2 of its API."""

    kind: Literal["clinicaltrials"] = "clinicaltrials"
    url: BaseUrl = _SITE
    area: Literal["term", "cond", "intr", "titles", "outc"] = Field(
        "term", description="search area, as in query.AREA"
    )
    sort: str | None = Field(
        None, description="the API's sort, as in LastUpdatePostDate:desc; None: by relevance"
    )
    min_date: Date | None = Field(None, description="earliest date of first posting: YYYY-MM-DD")
    max_date: Date | None = Field(
        None, description="latest date of first posting, in the same format"
    )
    requests_per_s: Annotated[float, Free()] = Field(
        0.8, gt=0, description="the site allows about 50 per minute"
    )


class ClinicalTrials(CallableRetriever, SharedInstance):
    """Search ClinicalTrials.gov. Returns studies in the site's order.

    The API returns no scores, so a passage's score is 1 / rank. A query with invalid syntax gets an
    empty ranking.
    """

    def __init__(self, settings: ClinicalTrialsSettings) -> None:
        self._settings = settings
        rate = shared_rate(settings.url, settings.requests_per_s)
        self._client = SearchClient([settings.url], settings, rate=rate)
        self.close = self._client.close
        self.site: Site[Page] = Site(
            "ClinicalTrials.gov", _MOST, self._client, self._page, ([], None), _SYNTAX
        )
        mirrors = [url for url in self._client.urls if url != _SITE]
        s = settings
        self.digest = digest(
            "clinicaltrials", s.area, s.sort, s.min_date, s.max_date, s.texts, *mirrors
        )
        """Digest of the site and the settings, not of the content, which changes daily."""

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Return one ranking per query. ``k`` is at most 10,000."""
        terms, first = self.site.ask(queries, k, self._settings.offline)
        rankings = {term: self._studies(term, page, k) for term, page in first.items()}
        return rankings_of(queries, [rankings.get(term, ()) for term in terms])

    def _studies(self, term: str, page: Page | HttpError, k: int) -> Ranking | HttpError:
        studies: dict[str, Passage] = {}
        while not isinstance(page, HttpError):
            listed, token = page
            for study in listed:
                studies.setdefault(study.doc_id, study)
            if token is None or len(studies) >= k:
                first = list(studies.values())[:k]
                return tuple(s._replace(score=1 / rank) for rank, s in enumerate(first, 1))
            [page] = self._client.ask_each([self._page(term, k, token)])
        return page

    def _page(self, term: str, k: int, token: str | None = None) -> Question[Page]:
        s = self._settings
        params = {
            f"query.{s.area}": term,
            "pageSize": str(min(k, _PAGE)),
            "format": "json",
            "fields": _FIELDS if s.texts else "NCTId",
        }
        if s.sort:
            params["sort"] = s.sort
        if s.min_date or s.max_date:
            start = s.min_date or "MIN"
            end = s.max_date or "MAX"
            params["filter.advanced"] = f"AREA[StudyFirstPostDate]RANGE[{start},{end}]"
        if token is not None:
            params["pageToken"] = token
        return Call("GET", "/studies", params), _read_page


def _read_page(answer: Answer) -> Page:
    body = answer.json
    studies = body.get("studies") if isinstance(body, dict) else None
    if not isinstance(studies, list):
        raise answer.malformed("a response without a list of studies")
    token = body.get("nextPageToken")
    if token and not studies:
        raise answer.malformed("a page that has no studies but links to a next page")
    try:
        passages = [_study(study) for study in studies]
    except (KeyError, TypeError, AttributeError) as error:
        raise answer.malformed("a study without an NCT id") from error
    return passages, str(token) if token else None


def _study(study: Mapping[str, Any]) -> Passage:
    protocol = study["protocolSection"]
    identity = protocol["identificationModule"]
    title = identity.get("briefTitle") or identity.get("officialTitle") or ""
    description = protocol.get("descriptionModule") or {}
    summary = description.get("briefSummary") or ""
    return Passage(str(identity["nctId"]), str(title), str(summary), 0.0)


CLINICALTRIALS = EngineKind(ClinicalTrialsSettings, ClinicalTrials, "server")
