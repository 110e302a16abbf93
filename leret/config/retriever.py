"""The `retriever` section: one settings class a kind, used by its engine as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from leret.config.base import BaseUrl, BaseUrls, Free, KindSettings, RecipePath, Settings, mark_of

PartialDate = Annotated[str, Field(pattern=r"^\d{4}(/\d{2}(/\d{2})?)?$")]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


def _not_bool(value: object) -> object:
    """YAML reads ``on`` and ``off`` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class CacheSettings(Settings):
    """The cache of rankings on disk."""

    use: Annotated[Literal["auto", "on", "off"], BeforeValidator(_not_bool)] = Field(
        "auto", description="auto: engines slower than the cache, and servers only by a digest or name of their index"
    )
    path: str | None = Field(None, description="directory; None takes LERET_CACHE_DIR, or leret's in the user's cache")
    max_mb: PositiveInt = Field(2048, description="of the cache; rankings unused for longest go first")


class RetrieverSettings(KindSettings):
    """What the settings of all engines share."""

    default_kind = "bm25"

    kind: str
    k: PositiveInt = Field(3, description="passages a search")
    exclude_seen: bool = Field(False, description="a search skips what earlier searches found (off in the paper)")
    cache: Annotated[CacheSettings | None, Free()] = Field(None, description="the cache of rankings on disk")

    @property
    def index_kind(self) -> str | None:
        """Name of the index in a run's cache; None where a server has it."""
        return None

    @property
    def needs_corpus(self) -> bool:
        """Does the engine search the documents of ``data.corpus``? A server has its own."""
        return self.index_kind is not None

    def index_directory(self, cache: Path) -> Path | None:
        """Where the index is: as named, or in a run's cache; None where a server has it."""
        named: str | None = getattr(self, "index", None)
        return Path(named) if named else cache / self.index_kind if self.index_kind else None

    def ranking_keys(self) -> dict[str, Any]:
        """The keys of this kind that decide the rankings, but for paths, with their values."""
        return {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if name not in RetrieverSettings.model_fields
            and not mark_of(field, Free)
            and not mark_of(field, RecipePath)
        }


class IndexedSettings(RetrieverSettings):
    """What the engines with an index share."""

    index: Annotated[str | None, Free(), RecipePath("index directory", may_be_missing=True)] = None
    """None keeps it in the run directory's cache."""

    @property
    def index_kind(self) -> str | None:
        return self.kind


class EngineSettings(IndexedSettings):
    """An engine with an index of its own; two of them make a hybrid."""


class AnalyzerSettings(IndexedSettings):
    """How text becomes words."""

    stopwords: str | None = Field("english", description="a list of bm25s; null keeps every word")
    stemmer: str | None = Field(None, description="a Snowball language for PyStemmer; null keeps words whole")
    fold_accents: bool = Field(True, description="Beyoncé and Beyonce are one word")


class _Weights(AnalyzerSettings):
    k1: FiniteFloat = Field(1.5, ge=0, description="how slowly the count of a word saturates")
    b: float = Field(0.75, ge=0, le=1, description="how far long documents are marked down")


class BM25Settings(_Weights, EngineSettings):
    """BM25 of bm25s, mapped into memory."""

    kind: Literal["bm25"] = "bm25"


class RM3Settings(_Weights):
    """Pseudo-relevance feedback over BM25, whose index it shares."""

    kind: Literal["rm3"] = "rm3"
    fb_docs: PositiveInt = Field(10, description="feedback documents: the first of a first search")
    fb_terms: NonNegativeInt = Field(10, description="expansion terms, taken from them")
    original_weight: float = Field(0.5, ge=0, le=1, description="of the query's own words")

    @property
    def index_kind(self) -> str | None:
        return "bm25"

    @property
    def bm25(self) -> BM25Settings:
        """Of the first search."""
        return BM25Settings(**{name: getattr(self, name) for name in BM25Settings.model_fields if name != "kind"})


class TantivySettings(AnalyzerSettings, EngineSettings):
    """BM25 of tantivy (k1 1.2, b .75), built and searched from the disk."""

    kind: Literal["tantivy"] = "tantivy"


ModelPath = Annotated[str, RecipePath("model directory", "download the model there, or correct the path", hub=True)]


class DenseSettings(EngineSettings):
    """An embedding model, and where its vectors are searched."""

    kind: Literal["dense"] = "dense"
    model: ModelPath = Field(min_length=1, description="of sentence-transformers: a directory, or a name on the hub")
    query_model: ModelPath | None = Field(None, description="reads the queries; None: the model of the documents")
    query_prefix: str = Field("", description='put before a query: "query: " for E5')
    document_prefix: str = Field("", description='put before a document: "passage: " for E5')
    separator: str = Field(". ", description="between the title and the text of a document")
    normalize: bool = Field(True, description="compare by cosine; false compares by inner product, as Contriever does")
    store: Literal["flat", "hnsw", "chroma"] = Field("flat", description="faiss exact, faiss HNSW, or Chroma")
    hnsw_m: int = Field(32, ge=2, description="links a vector, hnsw and chroma")
    ef_construction: PositiveInt = Field(200, description="candidates while it is built, hnsw and chroma")
    ef_search: PositiveInt = Field(128, description="candidates of a search (k at least), hnsw and chroma")
    max_length: PositiveInt | None = Field(None, description="tokens; None takes the model's")
    batch_size: Annotated[PositiveInt, Free()] = 64
    device: Annotated[str, Free()] = "auto"


class ColbertSettings(EngineSettings):
    """A ColBERT checkpoint, and its PLAID index."""

    kind: Literal["colbert"] = "colbert"
    checkpoint: ModelPath | None = Field(None, description="None takes the one inside of the downloaded index")
    index_root: Annotated[str | None, RecipePath("directory of indexes")] = Field(None, description="of index_name")
    index_name: str | None = Field(None, description="of a downloaded index: its name in index_root")
    nbits: Literal[1, 2, 4, 8] = Field(2, description="bits a dimension of a residual")
    separator: str = Field(" | ", description="between the title and the text of a document")
    doc_maxlen: PositiveInt = Field(300, description="tokens of a document")
    query_maxlen: PositiveInt = Field(32, description="tokens of a query")
    kmeans_iterations: PositiveInt = Field(4, description="of the centroids")
    ncells: PositiveInt = Field(4, description="cells looked into for each token of a query")
    centroid_threshold: FiniteFloat = Field(0.4, description="centroids below this similarity are left out at first")
    ndocs: PositiveInt = Field(4096, description="candidates; at least 4 k are taken")
    batch_size: Annotated[PositiveInt, Free()] = Field(64, description="documents encoded at once")

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if (self.index_root is None) != (self.index_name is None):
            raise ValueError("index_root and index_name go together: the folder, and the index's name in it")
        if not (self.checkpoint or self.index_root):
            raise ValueError("checkpoint is missing: kind colbert needs one, or a downloaded index_root")
        return self


LocalEngine = SerializeAsAny[EngineSettings]
Weight = Annotated[FiniteFloat, Field(ge=0)]


class FusionSettings(Settings):
    """How two rankings become one."""

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

    def fusion_keys(self) -> dict[str, Any]:
        """All that decides a fused ranking, as JSON values."""
        return self.model_dump(mode="json", include=set(FusionSettings.model_fields))


class HybridSettings(IndexedSettings, FusionSettings):
    """Two engines over one corpus, and how their rankings become one."""

    kind: Literal["hybrid"] = "hybrid"
    engines: tuple[LocalEngine, LocalEngine]

    @field_validator("engines")
    @classmethod
    def _says_no_more(cls, value: tuple[LocalEngine, LocalEngine]) -> tuple[LocalEngine, LocalEngine]:
        for key in ("k", "exclude_seen", "cache"):
            if any(getattr(engine, key) != type(engine).model_fields[key].default for engine in value):
                raise ValueError(f"{key} is of the whole retriever, not of one engine; write it beside engines")
        return value


class NoRetrieverSettings(RetrieverSettings):
    """Of a program that searches nothing: it picks among what its tasks bring."""

    kind: Literal["none"] = "none"


class _HttpSettings(RetrieverSettings):
    timeout_s: Annotated[float, Free()] = Field(30.0, gt=0, description="an attempt's deadline")
    retry_for_s: Annotated[float, Free()] = Field(300.0, ge=0, description="outages are waited for so long")
    concurrency: Annotated[PositiveInt, Free()] = Field(16, description="requests in flight")


class RemoteSettings(_HttpSettings):
    """A search engine behind HTTP."""

    kind: Literal["remote"] = "remote"
    urls: Annotated[BaseUrls, Free()] = Field(min_length=1, description="equal servers, as in http://127.0.0.1:8893")
    protocol: Literal["leret", "colbert", "colbert-get", "retrieve"] = "leret"
    name: str | None = Field(None, description="of what is served; name it anew when its index changes")
    doc_id: Literal["id", "title", "row"] = Field("id", description="what names a document; row: that in data.corpus")
    accept_empty: bool | None = Field(None, description="an empty ranking is an answer; None: under protocol leret")
    requests_per_s: Annotated[float | None, Free()] = Field(None, gt=0, description="None sets no limit")
    queries_per_request: Annotated[PositiveInt, Free()] = Field(64, description="of the protocols with batches")
    token_env: Annotated[str | None, Free()] = Field(None, description="variable of the bearer token, or `Basic ...`")

    @property
    def needs_corpus(self) -> bool:
        return self.doc_id == "row"


class _SiteSettings(_HttpSettings):
    offline: Annotated[bool, Free()] = Field(False, description="answer from the cache alone; a miss is an error")
    texts: bool = Field(True, description="fetch titles and texts, not ids alone")


class PubMedSettings(_SiteSettings):
    """NCBI E-utilities."""

    kind: Literal["pubmed"] = "pubmed"
    url: BaseUrl = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils"
    api_key_env: Annotated[str, Free()] = Field("NCBI_API_KEY", description="a key there allows 10 requests/s")
    email: Annotated[str | None, Free()] = Field(None, description="NCBI writes to you before it blocks you")
    tool: Annotated[str, Free()] = "leret"
    sort: Literal["relevance", "pub_date", "Author", "JournalName"] = "relevance"
    min_date: PartialDate | None = Field(None, description="YYYY, YYYY/MM or YYYY/MM/DD, of publication")
    max_date: PartialDate | None = Field(None, description="as min_date")


class ClinicalTrialsSettings(_SiteSettings):
    """ClinicalTrials.gov's API, version 2."""

    kind: Literal["clinicaltrials"] = "clinicaltrials"
    url: BaseUrl = "https://clinicaltrials.gov/api/v2"
    area: Literal["term", "cond", "intr", "titles", "outc"] = Field("term", description="query.AREA of the API")
    sort: str | None = Field(None, description="as the API writes it, LastUpdatePostDate:desc; None is by relevance")
    min_date: Date | None = Field(None, description="YYYY-MM-DD, of the study's first posting")
    max_date: Date | None = Field(None, description="as min_date")
    requests_per_s: Annotated[float, Free()] = Field(0.8, gt=0, description="the site allows about 50 a minute")
