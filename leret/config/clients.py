"""The sections of ``retriever`` that belong to engines without an index of their own, and to the cache of answers."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, field_validator

from leret.config.base import Settings

_DATE = re.compile(r"\d{4}(/\d{2}(/\d{2})?)?")


def _without_key(value: Any) -> Any:
    if "@" in str(value) or "?" in str(value):  # not repeated, since it may hold a key
        raise ValueError(
            "a base URL holds no user, password or query; put the key in a variable (api_key_env, token_env)"
        )
    return value


BaseUrl = Annotated[str, AfterValidator(_without_key)]
BaseUrls = Annotated[tuple[str, ...], AfterValidator(_without_key)]


class _HttpSettings(Settings):
    """How servers are asked."""

    timeout_s: float = Field(30.0, gt=0, description="an attempt's deadline")
    patience_s: float = Field(300.0, ge=0, description="an outage is waited for so long, then it is an error")
    concurrency: PositiveInt = Field(16, description="requests in flight")


class RemoteSettings(_HttpSettings):
    """A search engine behind HTTP."""

    urls: BaseUrls = Field(min_length=1, description="equal servers; the least busy gets the next request")
    protocol: Literal["leret", "colbert", "colbert-get", "retrieve"] = "leret"
    name: str | None = Field(None, description="of what is served; name it anew when its index changes")
    doc_id: Literal["id", "title", "row"] = Field(
        "id", description="what names a document: the server's id, its title, or its row in data.corpus"
    )
    accept_empty: bool | None = Field(
        None, description="an empty ranking is an answer; by default only under protocol leret, which reports failures"
    )
    requests_per_s: float | None = Field(None, gt=0, description="None sets no limit")
    queries_per_request: PositiveInt = Field(64, description="of the protocols with batches")
    token_env: str | None = Field(None, description="environment variable that holds the bearer token, or `Basic ...`")


class _ReplaySettings(_HttpSettings):
    offline: bool = Field(False, description="answer from the cache alone; what it lacks is an error")
    texts: bool = Field(True, description="fetch titles and texts, not ids alone")


class PubMedSettings(_ReplaySettings):
    """NCBI E-utilities."""

    url: BaseUrl = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils"
    api_key_env: str = Field("NCBI_API_KEY", description="its key, where the variable is set, allows 10 requests/s")
    email: str | None = Field(None, description="NCBI asks for it, to write to you before it blocks you")
    tool: str = "leret"
    sort: Literal["relevance", "pub_date", "Author", "JournalName"] = "relevance"
    min_date: str | None = Field(None, description="YYYY, YYYY/MM or YYYY/MM/DD, of publication")
    max_date: str | None = Field(None, description="as min_date")

    @field_validator("min_date", "max_date")
    @classmethod
    def _date(cls, value: str | None) -> str | None:
        if value is not None and not _DATE.fullmatch(value):
            raise ValueError(f"{value!r} is no date; write YYYY, YYYY/MM or YYYY/MM/DD")
        return value


class ClinicalTrialsSettings(_ReplaySettings):
    """ClinicalTrials.gov's API, version 2."""

    url: BaseUrl = "https://clinicaltrials.gov/api/v2"
    area: Literal["term", "cond", "intr", "titles", "outc"] = Field("term", description="query.AREA of the API")
    sort: str | None = Field(None, description="as the API writes it, LastUpdatePostDate:desc; None is by relevance")
    min_date: str | None = Field(None, description="YYYY-MM-DD, of the study's first posting")
    max_date: str | None = Field(None, description="as min_date")
    requests_per_s: float = Field(0.8, gt=0, description="the site allows about 50 a minute")

    @field_validator("min_date", "max_date")
    @classmethod
    def _date(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
            raise ValueError(f"{value!r} is no date; write YYYY-MM-DD")
        return value


class RM3Settings(Settings):
    """Pseudo-relevance feedback over BM25."""

    fb_docs: PositiveInt = Field(10, description="documents of the first search that are believed")
    fb_terms: NonNegativeInt = Field(10, description="words taken from them")
    original_weight: float = Field(0.5, ge=0, le=1, description="of the query's own words")


def _not_bool(value: object) -> object:
    """YAML reads ``on`` and ``off`` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class AnswersSettings(Settings):
    """The cache of answers on disk."""

    use: Annotated[Literal["auto", "on", "off"], BeforeValidator(_not_bool)] = Field(
        "auto", description="auto: engines slower than the cache, and servers only by a digest or name of their index"
    )
    path: str | None = Field(None, description="directory; None takes LERET_CACHE_DIR, or leret's in the user's cache")
    max_mb: PositiveInt = Field(2048, description="of the file; answers unused for longest go first")
