"""The `retriever` section: one settings class per kind, which its engine uses unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, NonNegativeInt, PositiveInt, SerializeAsAny, field_validator

from leret.config.base import BaseUrl, BaseUrls, Free, KindSettings, RecipePath, Settings, mark_of

PartialDate = Annotated[str, Field(pattern=r"^\d{4}(/\d{2}(/\d{2})?)?$")]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class CacheSettings(Settings):
    """The cache of rankings on disk."""

    # The validator undoes YAML's reading of ``on`` and ``off`` as true and false.
    use: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(lambda value: {"True": "on", "False": "off"}.get(str(value), value)),
    ] = Field(
        "auto", description="auto: for engines slower than the cache, and servers with a digest or name of their index"
    )
    path: str | None = Field(None, description="None: LERET_CACHE_DIR, or leret in the user's cache directory")
    max_mb: PositiveInt = Field(2048, description="size of the cache; the least recently used rankings are dropped")


class RetrieverSettings(KindSettings):
    """Keys of every engine."""

    default_kind = "bm25"

    kind: str
    k: PositiveInt = Field(3, description="passages per search")
    exclude_seen: bool = Field(False, description="skip passages of earlier searches (off in the paper)")
    cache: Annotated[CacheSettings | None, Free()] = Field(None, description="the cache of rankings on disk")

    @property
    def index_kind(self) -> str | None:
        return None

    @property
    def needs_corpus(self) -> bool:
        """True if the engine searches the documents of ``data.corpus``; a server has its own."""
        return self.index_kind is not None

    def index_directory(self, cache: Path) -> Path | None:
        """Return the directory of the index, by default in a run's cache; None if a server has it."""
        if path := getattr(self, "index", None):
            return Path(path)
        return cache / self.index_kind if self.index_kind else None

    def ranking_keys(self) -> dict[str, Any]:
        """Return the values of all keys of this kind that affect rankings, except paths."""
        fields = (
            (name, f) for name, f in type(self).model_fields.items() if name not in RetrieverSettings.model_fields
        )
        return {name: getattr(self, name) for name, f in fields if not (mark_of(f, Free) or mark_of(f, RecipePath))}


class IndexedSettings(RetrieverSettings):
    """Keys of every engine with an index."""

    index: Annotated[str | None, Free(), RecipePath("index directory", may_be_missing=True)] = None

    @property
    def index_kind(self) -> str | None:
        return self.kind


class EngineSettings(IndexedSettings):
    """An engine that may be part of a hybrid."""


class AnalyzerSettings(IndexedSettings):
    """Keys of the analyzer, which splits text into words."""

    stopwords: str | None = Field("english", description="a list of bm25s; null keeps all words")
    stemmer: str | None = Field(None, description="a Snowball language for PyStemmer; null does not stem")
    fold_accents: bool = Field(True, description="treat Beyoncé and Beyonce as one word")


class _Weights(AnalyzerSettings):
    k1: FiniteFloat = Field(1.5, ge=0, description="saturation of the count of a word: larger is slower")
    b: float = Field(0.75, ge=0, le=1, description="penalty of long documents")


class BM25Settings(_Weights, EngineSettings):
    """BM25 by bm25s, memory-mapped."""

    kind: Literal["bm25"] = "bm25"


class RM3Settings(_Weights):
    """Pseudo-relevance feedback (RM3) over a BM25 index."""

    kind: Literal["rm3"] = "rm3"
    fb_docs: PositiveInt = Field(10, description="feedback documents: the best of the first search")
    fb_terms: NonNegativeInt = Field(10, description="expansion terms from the feedback documents")
    original_weight: float = Field(0.5, ge=0, le=1, description="of the original query")

    @property
    def index_kind(self) -> str | None:
        return "bm25"

    @property
    def bm25(self) -> BM25Settings:
        return BM25Settings(**{name: getattr(self, name) for name in BM25Settings.model_fields if name != "kind"})


class TantivySettings(AnalyzerSettings, EngineSettings):
    """BM25 by tantivy (k1 1.2, b .75), built and searched on disk."""

    kind: Literal["tantivy"] = "tantivy"


ModelPath = Annotated[str, RecipePath("model directory", "download the model there, or correct the path", hub=True)]


class DenseSettings(EngineSettings):
    """An embedding model and the store of its vectors."""

    kind: Literal["dense"] = "dense"
    model: ModelPath = Field(min_length=1, description="sentence-transformers directory, or name on the hub")
    query_model: ModelPath | None = Field(None, description="model of the queries; None: the model of the documents")
    query_prefix: str = Field("", description='prefix of a query: "query: " for E5')
    document_prefix: str = Field("", description='prefix of a document: "passage: " for E5')
    separator: str = Field(". ", description="between title and text of a document")
    normalize: bool = Field(True, description="compare by cosine; false: by inner product, as Contriever does")
    store: Literal["flat", "hnsw", "chroma"] = Field("flat", description="faiss exact, faiss HNSW, or Chroma")
    hnsw_m: int = Field(32, ge=2, description="links per vector (hnsw and chroma)")
    ef_construction: PositiveInt = Field(200, description="candidates during the build (hnsw and chroma)")
    ef_search: PositiveInt = Field(128, description="candidates per search, at least k (hnsw and chroma)")
    max_length: PositiveInt | None = Field(None, description="tokens per text; None: the model's limit")
    batch_size: Annotated[PositiveInt, Free()] = 64
    device: Annotated[str, Free()] = "auto"


class ColbertSettings(EngineSettings):
    """A multi-vector model, as ColBERT, and the token vectors of all documents."""

    kind: Literal["colbert"] = "colbert"
    checkpoint: ModelPath = Field(min_length=1, description="ColBERT directory, or name on the hub")
    candidates: Annotated[PositiveInt | None, BeforeValidator(lambda value: None if value == "all" else value)] = Field(
        200, description="documents of a BM25 search that are scored, at least k; all or null scores all documents"
    )
    separator: str = Field(" | ", description="between title and text of a document")
    doc_maxlen: PositiveInt | None = Field(None, description="tokens of a document; None: the checkpoint's")
    query_maxlen: PositiveInt | None = Field(None, description="tokens of a query; None: the checkpoint's")
    batch_size: Annotated[PositiveInt, Free()] = Field(64, description="texts per batch")
    device: Annotated[str, Free()] = "auto"


LocalEngine = SerializeAsAny[EngineSettings]
Weight = Annotated[FiniteFloat, Field(ge=0)]


class FusionSettings(Settings):
    """Keys of the fusion of two rankings."""

    fusion: Literal["rrf", "sum"] = Field("rrf", description="by reciprocal ranks, or by scores scaled to [0, 1]")
    weights: tuple[Weight, Weight] = Field((1.0, 1.0), description="of the two engines; not both 0")
    rank_constant: FiniteFloat = Field(60.0, ge=0, description="added to every rank (rrf)")
    depth: PositiveInt = Field(100, description="documents from each engine, at least k")

    @field_validator("weights")
    @classmethod
    def _weighs_something(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not any(value):
            raise ValueError("both are 0, so no document has a score; raise one of them")
        return value

    def fusion_keys(self) -> dict[str, Any]:
        """Return the keys that affect a fused ranking, as JSON values."""
        return self.model_dump(mode="json", include=set(FusionSettings.model_fields))


class HybridSettings(IndexedSettings, FusionSettings):
    """Two engines over one corpus, and the fusion of their rankings."""

    kind: Literal["hybrid"] = "hybrid"
    engines: tuple[LocalEngine, LocalEngine]

    @field_validator("engines")
    @classmethod
    def _says_no_more(cls, value: tuple[LocalEngine, LocalEngine]) -> tuple[LocalEngine, LocalEngine]:
        for key in ("k", "exclude_seen", "cache"):
            if any(getattr(engine, key) != type(engine).model_fields[key].default for engine in value):
                raise ValueError(f"{key} belongs to the whole retriever, not to one engine; move it beside engines")
        return value


class NoRetrieverSettings(RetrieverSettings):
    """No retriever, for a program that only picks candidates of its tasks."""

    kind: Literal["none"] = "none"


class _HttpSettings(RetrieverSettings):
    timeout_s: Annotated[float, Free()] = Field(30.0, gt=0, description="deadline of one attempt")
    retry_for_s: Annotated[float, Free()] = Field(300.0, ge=0, description="how long to wait in an outage")
    concurrency: Annotated[PositiveInt, Free()] = Field(16, description="requests in flight")


class RemoteSettings(_HttpSettings):
    """Search servers over HTTP."""

    kind: Literal["remote"] = "remote"
    urls: Annotated[BaseUrls, Free()] = Field(min_length=1, description="equal servers, as in http://127.0.0.1:8893")
    protocol: Literal["leret", "colbert", "colbert-get", "retrieve"] = "leret"
    name: str | None = Field(None, description="name of the served index; change it when the index changes")
    doc_id: Literal["id", "title", "row"] = Field("id", description="id of a document; row: its number in data.corpus")
    accept_empty: bool | None = Field(None, description="accept an empty ranking; None: only under protocol leret")
    requests_per_s: Annotated[float | None, Free()] = Field(None, gt=0, description="None: no limit")
    queries_per_request: Annotated[PositiveInt, Free()] = Field(64, description="for protocols with batches")
    token_env: Annotated[str | None, Free()] = Field(None, description="variable with the bearer token, or `Basic ...`")

    @property
    def needs_corpus(self) -> bool:
        return self.doc_id == "row"


class _SiteSettings(_HttpSettings):
    offline: Annotated[bool, Free()] = Field(False, description="answer only from the cache; a miss is an error")
    texts: bool = Field(True, description="fetch titles and texts, not only ids")


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
