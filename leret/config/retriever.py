"""The `retriever` section, one settings class a kind."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from leret.config.base import BaseUrl, BaseUrls, Free, RecipePath, Settings

_DATE = re.compile(r"\d{4}(/\d{2}(/\d{2})?)?")


class _HttpSettings(Settings):
    """How servers are asked."""

    timeout_s: Annotated[float, Free()] = Field(30.0, gt=0, description="an attempt's deadline")
    retry_for_s: Annotated[float, Free()] = Field(
        300.0, ge=0, description="an outage is waited for so long, then it is an error"
    )
    concurrency: Annotated[PositiveInt, Free()] = Field(16, description="requests in flight")


class RemoteSettings(_HttpSettings):
    """A search engine behind HTTP."""

    urls: Annotated[BaseUrls, Free()] = Field(
        min_length=1, description="equal servers; the least busy gets the next request"
    )
    protocol: Literal["leret", "colbert", "colbert-get", "retrieve"] = "leret"
    name: str | None = Field(None, description="of what is served; name it anew when its index changes")
    doc_id: Literal["id", "title", "row"] = Field(
        "id", description="what names a document: the server's id, its title, or its row in data.corpus"
    )
    accept_empty: bool | None = Field(
        None, description="an empty ranking is an answer; by default only under protocol leret, which reports failures"
    )
    requests_per_s: Annotated[float | None, Free()] = Field(None, gt=0, description="None sets no limit")
    queries_per_request: Annotated[PositiveInt, Free()] = Field(64, description="of the protocols with batches")
    token_env: Annotated[str | None, Free()] = Field(
        None, description="environment variable that holds the bearer token, or `Basic ...`"
    )


class _ReplaySettings(_HttpSettings):
    offline: Annotated[bool, Free()] = Field(
        False, description="answer from the cache alone; what it lacks is an error"
    )
    texts: bool = Field(True, description="fetch titles and texts, not ids alone")


class PubMedSettings(_ReplaySettings):
    """NCBI E-utilities."""

    url: BaseUrl = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils"
    api_key_env: Annotated[str, Free()] = Field(
        "NCBI_API_KEY", description="its key, where the variable is set, allows 10 requests/s"
    )
    email: Annotated[str | None, Free()] = Field(
        None, description="NCBI asks for it, to write to you before it blocks you"
    )
    tool: Annotated[str, Free()] = "leret"
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


ModelPath = Annotated[str, RecipePath("model directory", "download the model there, or correct the path", hub=True)]


Weight = Annotated[FiniteFloat, Field(ge=0)]


class DenseSettings(Settings):
    """An embedding model, and where its vectors are searched."""

    model: ModelPath | None = Field(
        None, description="directory of a sentence-transformers model, or its name on the hub"
    )
    query_prefix: str = Field("", description='put before a query: "query: " for E5')
    document_prefix: str = Field("", description='put before a document: "passage: " for E5')
    separator: str = Field(". ", description="between the title and the text of a document")
    normalize: bool = Field(True, description="compare by cosine; false compares by inner product, as Contriever does")
    store: Literal["flat", "hnsw", "chroma"] = Field("flat", description="faiss exact, faiss HNSW, or Chroma")
    hnsw_m: int = Field(32, ge=2, description="links a vector, hnsw and chroma")
    ef_construction: PositiveInt = Field(200, description="candidates while it is built, hnsw and chroma")
    ef_search: PositiveInt = Field(128, description="candidates of a search (k at least), hnsw and chroma")
    max_length: PositiveInt | None = Field(None, description="tokens; None takes the model's")
    batch_size: PositiveInt = 64
    device: str = "auto"


class ColbertSettings(Settings):
    """A ColBERT checkpoint, and its PLAID index."""

    checkpoint: ModelPath | None = Field(
        None, description="its directory; None takes one inside of the downloaded index"
    )
    index_root: Annotated[str | None, RecipePath("directory of indexes")] = Field(
        None, description="of a downloaded index: the folder it is in"
    )
    index_name: str | None = Field(None, description="of a downloaded index: its name in index_root")
    nbits: Literal[1, 2, 4, 8] = Field(2, description="bits a dimension of a residual")
    separator: str = Field(" | ", description="between the title and the text of a document")
    doc_maxlen: PositiveInt = Field(300, description="tokens of a document")
    query_maxlen: PositiveInt = Field(32, description="tokens of a query")
    kmeans_iterations: PositiveInt = Field(4, description="of the centroids")
    ncells: PositiveInt = Field(4, description="cells looked into for each token of a query")
    centroid_threshold: FiniteFloat = Field(0.4, description="centroids below this similarity are left out at first")
    ndocs: PositiveInt = Field(4096, description="candidates; at least 4 k are taken")
    batch_size: PositiveInt = Field(64, description="documents encoded at once")

    @model_validator(mode="after")
    def _downloaded(self) -> ColbertSettings:
        if (self.index_root is None) != (self.index_name is None):
            raise ValueError("index_root and index_name go together: the folder, and the index's name in it")
        return self


class EngineSettings(Settings):
    """A search engine."""

    kind: Literal["bm25", "tantivy", "dense", "colbert"] = "bm25"
    k1: FiniteFloat = Field(1.5, ge=0, description="of bm25")
    b: float = Field(0.75, ge=0, le=1, description="of bm25")
    stopwords: str | None = Field("english", description="of bm25 and tantivy")
    stemmer: str | None = Field(None, description="of bm25 and tantivy: a Snowball language")
    fold_accents: bool = Field(True, description="of bm25 and tantivy")
    dense: DenseSettings | None = None
    colbert: ColbertSettings | None = None

    @model_validator(mode="after")
    def _sections(self) -> EngineSettings:
        for name in ("dense", "colbert", "hybrid", "rm3", "remote", "pubmed", "clinicaltrials"):
            if getattr(self, name, None) is not None and self.kind != name:
                raise ValueError(f"{name}: given, but the kind is {self.kind}; say kind: {name}, or remove the section")
        if self.kind == "dense" and (self.dense is None or not self.dense.model):
            raise ValueError("dense.model is missing: kind dense needs a sentence-transformers model")
        if self.kind == "colbert" and (
            self.colbert is None or not (self.colbert.checkpoint or self.colbert.index_root)
        ):
            raise ValueError("colbert.checkpoint is missing: kind colbert needs one, or a downloaded index_root")
        return self


class HybridSettings(Settings):
    """Two engines, and how their rankings become one."""

    engines: tuple[EngineSettings, EngineSettings]
    fusion: Literal["rrf", "sum"] = Field("rrf", description="reciprocal ranks, or scores scaled to [0, 1]")
    weights: tuple[Weight, Weight] = Field((1.0, 1.0), description="of the two engines, not both 0")
    rank_constant: FiniteFloat = Field(60.0, ge=0, description="rrf: added to every rank")
    depth: PositiveInt = Field(100, description="documents asked of each engine (k at least)")

    @field_validator("weights")
    @classmethod
    def _weighs_something(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not any(value):
            raise ValueError("both are 0, and no document would have a score; give one engine a weight at least")
        return value


class RetrieverSettings(EngineSettings):
    """The search engine behind the program."""

    kind: Literal["bm25", "tantivy", "dense", "colbert", "hybrid", "rm3", "remote", "pubmed", "clinicaltrials"] = "bm25"  # type: ignore[assignment]
    k: PositiveInt = Field(3, description="passages a search")
    exclude_seen: bool = Field(False, description="a search skips what earlier searches found (off in the paper)")
    index: Annotated[str | None, Free(), RecipePath("index directory", may_be_missing=True)] = Field(
        None, description="index directory; None keeps it in the run directory's cache"
    )
    hybrid: HybridSettings | None = None
    rm3: RM3Settings | None = None
    remote: RemoteSettings | None = None
    pubmed: PubMedSettings | None = None
    clinicaltrials: ClinicalTrialsSettings | None = None
    answers: Annotated[AnswersSettings | None, Free()] = Field(None, description="the cache of answers on disk")

    @property
    def index_kind(self) -> str | None:
        """Kind of the index that the engine opens; None where a server has it."""
        if self.kind in {"remote", "pubmed", "clinicaltrials"}:
            return None
        return "bm25" if self.kind == "rm3" else self.kind

    @property
    def needs_corpus(self) -> bool:
        """Does the engine search the documents of ``data.corpus``? One behind HTTP has its own."""
        return self.index_kind is not None or (self.remote is not None and self.remote.doc_id == "row")

    @model_validator(mode="after")
    def _hybrid(self) -> RetrieverSettings:
        if self.kind == "hybrid" and self.hybrid is None:
            raise ValueError("hybrid is missing: kind hybrid needs two engines")
        if self.kind == "remote" and self.remote is None:
            raise ValueError("remote.urls is missing: kind remote needs at least one, as in http://127.0.0.1:8893")
        return self
