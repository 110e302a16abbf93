"""Client of PubMed (NCBI's E-utilities)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote
from xml.etree import ElementTree

from pydantic import Field

from leret.config.base import BaseUrl, Free, KeyVariable, default_variable
from leret.core.types import Passage, Ranking, SharedInstance, digest
from leret.extras.sites import Site, SiteSettings
from leret.http.client import Answer, Call, HttpError, RetryableError, one_line
from leret.http.endpoints import ApiKey, shared_rate
from leret.retrieval.base import CallableRetriever
from leret.retrieval.clients.base import Question, SearchClient, rankings_of
from leret.retrieval.load import EngineKind

_LOG = logging.getLogger("leret")

_SITE = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils"
_MOST = 9_999  # maximum number of ids that esearch returns
_FETCHED_AT_ONCE = 200
_LONG = 1_500  # longer queries (URL-encoded characters) are sent by POST, as NCBI recommends
# statuses for invalid syntax; 414 cannot occur, because long queries use POST
_SYNTAX = frozenset({400, 413})
_KNOWN = "1"  # PMID of an article that always exists; a response without its record is incomplete

PartialDate = Annotated[str, Field(pattern=r"^\d{4}(/\d{2}(/\d{2})?)?$")]


class PubMedSettings(SiteSettings):
    """PubMed, through NCBI's E-utilities."""

    kind: Literal["pubmed"] = "pubmed"
    url: BaseUrl = _SITE
    api_key_env: Annotated[str | None, Free(), KeyVariable("url")] = Field(
        default_factory=lambda data: default_variable("NCBI_API_KEY", data.get("url", ()), _SITE),
        description="variable with the key, for 10 requests/s; NCBI_API_KEY for the default URL",
    )
    email: Annotated[str | None, Free()] = Field(
        None, description="NCBI warns this address before it blocks you"
    )
    tool: Annotated[str, Free()] = "leret"
    sort: Literal["relevance", "pub_date", "Author", "JournalName"] = "relevance"
    min_date: PartialDate | None = Field(
        None, description="earliest publication date: YYYY, YYYY/MM or YYYY/MM/DD"
    )
    max_date: PartialDate | None = Field(
        None, description="latest publication date, in the same format"
    )


class ParameterKey(ApiKey):
    """A key that is sent as a request parameter."""

    def headers(self) -> dict[str, str]:
        return {}


class PubMed(CallableRetriever, SharedInstance):
    """Search PubMed.

    Returns articles in PubMed's order; a passage's text is the article's abstract.

    An article that esearch lists but efetch lacks (withdrawn or very new) keeps its rank; its title
    and text are empty. E-utilities return no scores, so a passage's score is 1 / rank, which also
    orders the results of several searches. A query with invalid syntax gets an empty ranking, as on
    the PubMed site.
    """

    def __init__(self, settings: PubMedSettings) -> None:
        self._settings = settings
        self._key = os.environ.get(settings.api_key_env or "", "").strip() or None
        rate = shared_rate(settings.url, 10.0 if self._key else 3.0)
        self._client = SearchClient(
            [settings.url], settings, key=ParameterKey(self._key), rate=rate
        )
        self.close = self._client.close
        self.site: Site[tuple[str, ...]] = Site(
            "PubMed", _MOST, self._client, self._search, (), _SYNTAX
        )
        mirrors = [url for url in self._client.urls if url != _SITE]
        self.digest = digest(
            "pubmed", settings.sort, settings.min_date, settings.max_date, settings.texts, *mirrors
        )
        """Digest of the site and the settings, not of the content.

        Set ``max_date`` to exclude most new articles.
        """

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Return one ranking per query. ``k`` is at most 9,999."""
        terms, ids = self.site.ask(queries, k, self._settings.offline)
        wanted: list[str] = []
        for outcome in ids.values():
            if isinstance(outcome, tuple):
                wanted += outcome
        articles, failed = self._articles(wanted)
        rankings: list[Ranking | HttpError] = []
        for term in terms:
            outcome = ids.get(term, ())
            if isinstance(outcome, HttpError):
                rankings.append(outcome)
                continue
            pmids = outcome[:k]
            failures = [failed[pmid] for pmid in pmids if pmid in failed]
            rankings.append(failures[0] if failures else _ranking(pmids, articles))
        return rankings_of(queries, rankings)

    def _search(self, term: str, k: int) -> Question[tuple[str, ...]]:
        settings = self._settings
        values = {"term": term, "retmax": str(k), "sort": settings.sort}
        if settings.min_date or settings.max_date:
            values["datetype"] = "pdat"
            values["mindate"] = settings.min_date or "1000"
            values["maxdate"] = settings.max_date or "3000"
        is_long = len(quote(term)) > _LONG
        call = self._call("esearch", values, "json", is_long)
        return call, partial(_read_ids, wanted=k)

    def _articles(
        self, ids: Sequence[str]
    ) -> tuple[Mapping[str, tuple[str, str]], Mapping[str, HttpError]]:
        """Fetch articles.

        Map the ids of found articles to (title, abstract), and the ids of failed requests to
        errors.

        Missing records are requested again, together with a record that certainly exists. If that
        record is missing too, the response was truncated; otherwise PubMed does not have the
        records.
        """
        if not self._settings.texts or not ids:
            return {}, {}
        wanted = list(dict.fromkeys(ids))
        articles, failed = self._fetched(wanted, read_articles)
        missing = [i for i in wanted if i not in articles and i not in failed]
        if missing:
            again, failed_again = self._fetched(missing, _read_whole, _KNOWN)
            articles |= again
            failed |= failed_again
            lacking = [i for i in missing if i not in articles and i not in failed]
            if lacking:
                _LOG.warning(
                    "PubMed has no record for %d search results (first: %s)",
                    len(lacking),
                    lacking[0],
                )
        return articles, failed

    def _fetched(
        self, ids: Sequence[str], read: Callable[[Answer], dict[str, tuple[str, str]]], *also: str
    ) -> tuple[dict[str, tuple[str, str]], dict[str, HttpError]]:
        chunks = []
        questions = []
        for start in range(0, len(ids), _FETCHED_AT_ONCE):
            chunk = ids[start : start + _FETCHED_AT_ONCE]
            values = {"id": ",".join([*chunk, *also]), "rettype": "abstract"}
            call = self._call("efetch", values, "xml", long=True)
            chunks.append(chunk)
            questions.append((call, read))
        articles: dict[str, tuple[str, str]] = {}
        failed: dict[str, HttpError] = {}
        for chunk, outcome in zip(chunks, self._client.ask_each(questions), strict=True):
            if isinstance(outcome, HttpError):
                failed |= dict.fromkeys(chunk, outcome)
            else:
                articles |= outcome
        return articles, failed

    def _call(self, tool: str, values: Mapping[str, str], retmode: str, long: bool) -> Call:
        identity = {
            "tool": self._settings.tool,
            "email": self._settings.email,
            "api_key": self._key,
        }
        params = {"db": "pubmed", "retmode": retmode, **values}
        for name, value in identity.items():
            if value:
                params[name] = value
        path = f"/{tool}.fcgi"
        if long:
            return Call("POST", path, form=params)
        return Call("GET", path, params)


def read_articles(answer: Answer) -> dict[str, tuple[str, str]]:
    """Parse an efetch response. Map each PubMed id to (title, abstract)."""
    try:
        root = ElementTree.fromstring(answer.text)
    except (ElementTree.ParseError, ValueError) as error:
        raise answer.malformed(f"invalid XML ({error})") from error
    error_text = root.findtext("ERROR") or root.findtext(".//ERROR")
    if error_text:
        raise RetryableError(f"{answer.url} reports an error: {one_line(error_text)}")
    articles = {}
    for record in [*root.iter("MedlineCitation"), *root.iter("BookDocument")]:
        pmid = (record.findtext("PMID") or "").strip()
        if not pmid:
            raise answer.malformed("a record without a PMID")
        article = record if record.tag == "BookDocument" else record.find("Article")
        articles[pmid] = ("", "")
        if article is not None:
            articles[pmid] = (_title(article), _abstract(article))
    return articles


def _read_whole(answer: Answer) -> dict[str, tuple[str, str]]:
    articles = read_articles(answer)
    if _KNOWN not in articles:
        raise answer.malformed(f"too few records (article {_KNOWN} is missing)")
    return articles


def _read_ids(answer: Answer, wanted: int) -> tuple[str, ...]:
    body = answer.json if isinstance(answer.json, dict) else {}
    result: Any = body.get("esearchresult")
    if not isinstance(result, dict):
        error = body.get("error")
        if error and "rate limit" in str(error):
            raise RetryableError(
                f"{answer.url} answered: {one_line(str(error))}", "rate_limit", 1.0
            )
        raise answer.malformed("a response without search results")
    failure = result.get("ERROR")
    if failure:
        raise RetryableError(f"{answer.url} reports an error: {one_line(str(failure))}")
    ids = result.get("idlist")
    if not isinstance(ids, list) or not all(isinstance(i, str) and i.isdigit() for i in ids):
        raise answer.malformed("a response without a list of ids")
    count = str(result.get("count", ""))
    if not count.isdigit() or len(ids) < min(int(count), wanted):
        n_articles = count or "an unknown number of"
        raise RetryableError(
            f"{answer.url} sent {len(ids)} ids; {wanted} of {n_articles} articles were requested",
            "malformed",
        )
    return tuple(dict.fromkeys(ids))


def _ranking(ids: Sequence[str], articles: Mapping[str, tuple[str, str]]) -> Ranking:
    passages = []
    for rank, pmid in enumerate(ids, 1):
        title, abstract = articles.get(pmid, ("", ""))
        passages.append(Passage(pmid, title, abstract, 1.0 / rank))
    return tuple(passages)


def _title(article: ElementTree.Element) -> str:
    for tag in ("ArticleTitle", "VernacularTitle", "Book/BookTitle"):
        element = article.find(tag)
        if element is not None and _text(element):
            return _text(element)
    return ""


def _abstract(article: ElementTree.Element) -> str:
    """Join the parts of the abstract, each with its label: ``BACKGROUND: ...``."""
    parts = []
    for element in article.findall("Abstract/AbstractText"):
        label = element.get("Label")
        text = _text(element)
        if text and label and label != "UNLABELLED":
            text = f"{label}: {text}"
        if text:
            parts.append(text)
    return " ".join(parts)


def _text(element: ElementTree.Element) -> str:
    """Return the text of an element without markup (``<i>``, ``<sub>``, MathML)."""
    content = "".join(element.itertext())
    return " ".join(content.split())


PUBMED = EngineKind(PubMedSettings, PubMed, "server")
