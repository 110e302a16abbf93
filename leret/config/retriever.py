"""The `retriever` section: one settings class per kind of engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    field_validator,
)

from leret.config.base import (
    BaseUrls,
    Free,
    KeyVariable,
    KindName,
    KindSettings,
    RecipePath,
    Settings,
    mark_of,
)
from leret.core.bundled import MINILM


class CacheSettings(Settings):
    """Cache of rankings on disk."""

    # Some YAML parsers read ``on`` and ``off`` as true and false; the validator converts these values back.
    use: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(lambda value: {"True": "on", "False": "off"}.get(str(value), value)),
    ] = Field(
        "auto",
        description="auto: for engines slower than the cache, and for servers that name their index",
    )
    path: str | None = Field(
        None, description="None: LERET_CACHE_DIR, or leret in the user's cache directory"
    )
    max_mb: PositiveInt = Field(
        2048, description="maximum size; the least recently used rankings are dropped"
    )


class RetrieverSettings(KindSettings):
    """Keys shared by all engines."""

    default_kind = "bm25"
    shelf: ClassVar[Mapping[str, str]] = {
        "pubmed": "leret.extras.pubmed:PUBMED",
        "clinicaltrials": "leret.extras.clinicaltrials:CLINICALTRIALS",
        "colbert": "leret.extras.colbert:COLBERT",
        "tantivy": "leret.extras.tantivy:TANTIVY",
    }

    kind: KindName
    k: PositiveInt = Field(3, description="passages per search")
    exclude_seen: bool = Field(
        False, description="skip passages of earlier searches (off in the paper)"
    )
    cache: Annotated[CacheSettings | None, Free()] = Field(
        None, description="cache of rankings on disk"
    )

    @property
    def index_kind(self) -> str | None:
        return None

    @property
    def needs_corpus(self) -> bool:
        """True if the engine searches ``data.corpus``. Servers search their own documents."""
        return self.index_kind is not None

    def index_directory(self, cache: Path) -> Path | None:
        """Return the index directory, by default in the run's ``cache``; None for engines without a local index."""
        path = getattr(self, "index", None)
        if path:
            return Path(path)
        return cache / self.index_kind if self.index_kind else None

    def ranking_keys(self) -> dict[str, Any]:
        """Return the values of this kind's keys that affect rankings, except paths."""
        fields = (
            (name, f)
            for name, f in type(self).model_fields.items()
            if name not in RetrieverSettings.model_fields
        )
        return {
            name: getattr(self, name)
            for name, f in fields
            if not (mark_of(f, Free) or mark_of(f, RecipePath))
        }


class IndexedSettings(RetrieverSettings):
    """Keys shared by all engines with a local index."""

    index: Annotated[str | None, Free(), RecipePath("index directory", may_be_missing=True)] = None

    @property
    def index_kind(self) -> str | None:
        return self.kind.rpartition(":")[2]  # the name alone if the kind is named by path


class EngineSettings(IndexedSettings):
    """An engine that a hybrid may contain."""


class AnalyzerSettings(IndexedSettings):
    """Keys of the analyzer, which splits text into words."""

    stopwords: str | None = Field(
        "english", description="name of a stop word list in bm25s; null: keep all words"
    )
    stemmer: str | None = Field(
        None, description="Snowball language for PyStemmer; null: no stemming"
    )
    fold_accents: bool = Field(True, description="treat Beyoncé and Beyonce as one word")


class _Weights(AnalyzerSettings):
    k1: FiniteFloat = Field(
        1.5, ge=0, description="term frequency saturation; larger values saturate later"
    )
    b: float = Field(0.75, ge=0, le=1, description="penalty for long documents")


class BM25Settings(_Weights, EngineSettings):
    """BM25 by bm25s, with a memory-mapped index."""

    kind: Literal["bm25"] = "bm25"


class RM3Settings(_Weights):
    """Pseudo-relevance feedback (RM3) over a BM25 index."""

    kind: Literal["rm3"] = "rm3"
    fb_docs: PositiveInt = Field(
        10, description="feedback documents, taken from the top of the first search"
    )
    fb_terms: NonNegativeInt = Field(10, description="expansion terms from the feedback documents")
    original_weight: float = Field(0.5, ge=0, le=1, description="weight of the original query")

    @property
    def index_kind(self) -> str | None:
        return "bm25"

    @property
    def bm25(self) -> BM25Settings:
        return BM25Settings(
            **{name: getattr(self, name) for name in BM25Settings.model_fields if name != "kind"}
        )


_ADVICE = "download the model there, or fix the path"
ModelPath = Annotated[str, RecipePath("model directory", _ADVICE, hub=True)]
EncoderPath = Annotated[str, RecipePath("model directory", _ADVICE, hub=True, names=(MINILM,))]


class DenseSettings(EngineSettings):
    """An embedding model with a vector store."""

    stores_on_shelf: ClassVar[Mapping[str, str]] = {"chroma": "leret.extras.chroma:ChromaStore"}

    kind: Literal["dense"] = "dense"
    model: EncoderPath = Field(
        min_length=1, description="sentence-transformers directory, name on the hub, or minilm"
    )
    query_model: EncoderPath | None = Field(
        None, description="model for queries; None: same as `model`"
    )
    query_prefix: str = Field("", description='prefix of queries (E5: "query: ")')
    document_prefix: str = Field("", description='prefix of documents (E5: "passage: ")')
    separator: str = Field(". ", description="separator between a document's title and text")
    normalize: bool = Field(
        True, description="compare by cosine; false: by inner product (Contriever)"
    )
    store: Literal["flat", "hnsw", "chroma"] = Field(
        "flat", description="faiss exact, faiss HNSW, or Chroma"
    )
    hnsw_m: int = Field(32, ge=2, description="links per vector (hnsw and chroma)")
    ef_construction: PositiveInt = Field(
        200, description="candidates per insertion (hnsw and chroma)"
    )
    ef_search: PositiveInt = Field(
        128, description="candidates per search, at least k (hnsw and chroma)"
    )
    max_length: PositiveInt | None = Field(
        None, description="maximum tokens per text; None: the model's limit"
    )
    batch_size: Annotated[PositiveInt, Free()] = 64
    device: Annotated[str, Free()] = "auto"


E = TypeVar("E", bound=RetrieverSettings)


def without_shared_keys(engine: E, owner: str) -> E:
    """Return an engine inside another section; ValueError if it sets a key of the whole retriever."""
    for key in ("k", "exclude_seen", "cache"):
        if getattr(engine, key) != type(engine).model_fields[key].default:
            raise ValueError(f"{owner} cannot set {key}; set retriever.{key} instead")
    return engine


RetrieverName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
OtherRetriever = Annotated[
    SerializeAsAny[RetrieverSettings],
    AfterValidator(lambda settings: without_shared_keys(settings, "a retriever of an evaluation")),
]
LocalEngine = SerializeAsAny[EngineSettings]
Weight = Annotated[FiniteFloat, Field(ge=0)]


class FusionSettings(Settings):
    """Keys for the fusion of two rankings."""

    fusion: Literal["rrf", "sum"] = Field(
        "rrf", description="rrf: reciprocal ranks; sum: scores scaled to [0, 1]"
    )
    weights: tuple[Weight, Weight] = Field(
        (1.0, 1.0), description="weights of the two engines; not both 0"
    )
    rank_constant: FiniteFloat = Field(60.0, ge=0, description="constant added to every rank (rrf)")
    depth: PositiveInt = Field(100, description="documents from each engine, at least k")

    @field_validator("weights")
    @classmethod
    def _weighs_something(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not any(value):
            raise ValueError("both weights are 0; set at least one weight above 0")
        return value

    def fusion_keys(self) -> dict[str, Any]:
        """Return the keys that affect a fused ranking, as JSON values."""
        return self.model_dump(mode="json", include=set(FusionSettings.model_fields))


class HybridSettings(IndexedSettings, FusionSettings):
    """Two engines on the same corpus, with their rankings fused."""

    kind: Literal["hybrid"] = "hybrid"
    engines: tuple[LocalEngine, LocalEngine]

    @field_validator("engines")
    @classmethod
    def _says_no_more(
        cls, value: tuple[LocalEngine, LocalEngine]
    ) -> tuple[LocalEngine, LocalEngine]:
        first, second = (without_shared_keys(engine, "an engine of a hybrid") for engine in value)
        return first, second


class NoRetrieverSettings(RetrieverSettings):
    """No retriever, for programs that only pick candidates from their tasks."""

    kind: Literal["none"] = "none"


class HttpSettings(RetrieverSettings):
    """Keys shared by all search servers and search sites."""

    timeout_s: Annotated[float, Free()] = Field(30.0, gt=0, description="timeout per attempt")
    retry_for_s: Annotated[float, Free()] = Field(300.0, ge=0, description="how long to retry")
    concurrency: Annotated[PositiveInt, Free()] = Field(
        16, description="maximum number of requests in flight"
    )


class RemoteSettings(HttpSettings):
    """Search servers over HTTP."""

    kind: Literal["remote"] = "remote"
    urls: Annotated[BaseUrls, Free()] = Field(
        min_length=1, description="replicas, as in http://127.0.0.1:8893"
    )
    protocol: Literal["leret", "colbert", "colbert-get", "retrieve"] = "leret"
    name: str | None = Field(
        None, description="name of the served index; change it when the index changes"
    )
    doc_id: Literal["id", "title", "row"] = Field(
        "id", description="id field; row: the row number in data.corpus"
    )
    accept_empty: bool | None = Field(
        None, description="accept empty rankings; None: only with protocol leret"
    )
    requests_per_s: Annotated[float | None, Free()] = Field(
        None, gt=0, description="maximum rate; None: no limit"
    )
    queries_per_request: Annotated[PositiveInt, Free()] = Field(
        64, description="queries per batch, if supported"
    )
    token_env: Annotated[str | None, Free(), KeyVariable("urls")] = Field(
        None, description="variable with a bearer token or `Basic ...`"
    )

    @property
    def needs_corpus(self) -> bool:
        return self.doc_id == "row"
