"""Late interaction: a vector for every token, searched by colbert-ai over its compressed PLAID index."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from leret.config import ColbertSettings
from leret.errors import RetrievalError
from leret.retrieval.colbert_library import library
from leret.retrieval.documents import Documents
from leret.retrieval.downloaded import Downloaded
from leret.retrieval.index import Manifest
from leret.retrieval.models import find_model, model_digest, require_model
from leret.retrieval.passages import Passages
from leret.retrieval.progress import Progress
from leret.retrieval.queries import answered, checked, encodable
from leret.retrieval.stored import Placed, StoredDocuments
from leret.types import Ranking, digest

__all__ = ["ColBERT", "ColbertEngine", "PlaidSettings"]

_FOLDER = "plaid"
_CODEC = ("plan.json", "centroids.pt", "avg_residual.pt", "buckets.pt")


@dataclass(frozen=True)
class PlaidSettings:
    """All that decides a PLAID index and its search; see `leret.config.ColbertSettings`."""

    nbits: int = 2
    separator: str = " | "
    doc_maxlen: int = 300
    query_maxlen: int = 32
    kmeans_iterations: int = 4
    ncells: int = 4
    centroid_threshold: float = 0.4
    ndocs: int = 4096

    @classmethod
    def of(cls, values: ColbertSettings) -> PlaidSettings:
        """From a recipe."""
        return cls(**{field.name: getattr(values, field.name) for field in fields(cls)})


class ColBERT:
    """Finds documents by late interaction; safe for many threads, one at a time.

    A query without a letter or a digit has an empty ranking. Equal scores stand in the order of the corpus.

    Args:
        documents: where passages take their title and text from.
        checkpoint: directory of the model.
        index: directory of the PLAID index.
        settings: of the search.
        digest: of the retriever.

    Raises:
        RetrievalError: the checkpoint or the index cannot be opened.
        MissingDependency: colbert-ai is not installed.
    """

    def __init__(self, documents: Placed, checkpoint: Path, index: Path, settings: PlaidSettings, digest: str) -> None:
        self.digest = digest
        self._passages = Passages(documents)
        self._n_documents = len(documents)
        self._settings = settings
        self._lock = threading.Lock()
        with library() as colbert:
            self._config = _config(colbert, checkpoint, index, settings)
            self._checkpoint = _checkpoint(colbert, checkpoint, self._config)
            try:
                self._ranker = colbert.IndexScorer(str(index), use_gpu=self._config.total_visible_gpus > 0)
            except (OSError, ValueError, RuntimeError, KeyError, AssertionError, EOFError) as error:
                raise RetrievalError(
                    f"{index}: the PLAID index cannot be read ({type(error).__name__}: {error}); build it again"
                ) from error
            self._of = colbert.ColBERTConfig.from_existing
            self._made = colbert.ColBERTConfig
        n_indexed = len(self._ranker.doclens)
        if n_indexed != len(documents):
            raise RetrievalError(
                f"{index} is an index of another corpus: it has {n_indexed} documents, this one has {len(documents)}"
            )

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query.

        Args:
            queries: any strings.
            k: documents a query, at least 1; may be more than there are.

        Returns:
            One ranking a query, in the order of the queries; sums of similarities, not increasing.

        Raises:
            RetrievalError: ``k`` is less than 1.
        """
        k = checked(k, self._n_documents)
        return answered(queries, lambda said: self._answers(said, k))

    def _answers(self, queries: list[str], k: int) -> list[Ranking]:
        import torch

        with self._lock, torch.inference_mode():
            vectors = self._checkpoint.queryFromText(queries, bsize=128 if len(queries) > 128 else None, to_cpu=True)
            return [self._ranking(vectors[i : i + 1].cpu(), k) for i in range(len(queries))]

    def _ranking(self, vectors: Any, k: int) -> Ranking:
        """Look into more and more cells until there are k documents: a cut of the candidates is no answer."""
        ncells = self._settings.ncells
        n_centroids = len(self._ranker.codec.centroids)
        while True:
            ncells = min(ncells, n_centroids)
            # said at every call: the library's own searcher freezes what its first call chose
            config = self._of(
                self._config,
                self._made(
                    ncells=ncells,
                    centroid_score_threshold=self._settings.centroid_threshold,
                    ndocs=max(self._settings.ndocs, 4 * k),  # a quarter of them is scored in full
                ),
            )
            places, scores = self._ranker.rank(config, vectors)
            if len(places) >= k or ncells == n_centroids:
                break
            ncells *= 4
        best = sorted(zip((-score for score in scores), places, strict=True))[:k]
        return self._passages.ranking([place for _, place in best], [-score for score, _ in best])


@dataclass(frozen=True)
class ColbertEngine:
    """Builds and opens ColBERT indexes.

    Attributes:
        plaid: all that decides the index, beside the model.
        checkpoint: directory of the model.
        content: digest of the model.
        downloaded: an index that is not built but searched where it is.
        batch_size: documents encoded at once.
    """

    plaid: PlaidSettings
    checkpoint: Path
    content: str
    downloaded: Downloaded | None = None
    batch_size: int = 64
    kind: ClassVar[str] = "colbert"
    packages: ClassVar[tuple[str, ...]] = ("colbert-ai",)
    resumable: ClassVar[bool] = True

    @classmethod
    def of(cls, settings: ColbertSettings) -> ColbertEngine:
        """From a recipe.

        Raises:
            RetrievalError: there is no such checkpoint, or no such downloaded index.
        """
        plaid, downloaded = PlaidSettings.of(settings), None
        name = settings.checkpoint
        if settings.index_root is not None and settings.index_name is not None:
            downloaded = Downloaded.find(Path(settings.index_root) / settings.index_name)
            name = name or downloaded.checkpoint
        checkpoint = find_model(name or "", "retriever.colbert.checkpoint")
        return cls(plaid, checkpoint, model_digest(checkpoint), downloaded, settings.batch_size)

    @classmethod
    def again(cls, manifest: Manifest, directory: Path) -> ColbertEngine:
        """The engine that built an index.

        Raises:
            RetrievalError: its checkpoint, or the downloaded index it is for, is gone or is another one.
        """
        values = dict(manifest.settings)
        content, index = values.pop("checkpoint"), values.pop("downloaded", None)
        checkpoint = Path(manifest.places["checkpoint"])
        require_model(checkpoint, content, directory)
        downloaded = None
        if index is not None:
            downloaded = Downloaded.find(Path(manifest.places["index"]))
            if downloaded.digest != index:
                raise RetrievalError(f"{directory}: {downloaded.directory} is not the index that this one was made for")
        return cls(PlaidSettings(**values), checkpoint, content, downloaded)

    def settings(self) -> dict[str, Any]:
        """All that decides the rankings."""
        found = {"checkpoint": self.content, **asdict(self.plaid)}
        return found if self.downloaded is None else {**found, "downloaded": self.downloaded.digest}

    def places(self) -> dict[str, str]:
        """Where the checkpoint and a downloaded index are."""
        found = {"checkpoint": str(self.checkpoint)}
        return found if self.downloaded is None else {**found, "index": str(self.downloaded.directory)}

    def digest(self, corpus: str) -> str:
        """Of the retriever."""
        return digest("colbert", self.settings(), corpus)

    def write(self, corpus: Documents, directory: Path, told: Progress) -> None:
        """Encode and compress the documents; a downloaded index is compared with them instead.

        Raises:
            RetrievalError: the corpus is too small for centroids or is not the downloaded index's; the checkpoint
                cannot be opened.
            MissingDependency: colbert-ai is not installed.
        """
        with library() as colbert:
            if self.downloaded is not None:
                settings = replace(self.plaid, doc_maxlen=self.downloaded.doc_maxlen or self.plaid.doc_maxlen)
                config = _config(colbert, self.checkpoint, self.downloaded.directory, settings)
                checkpoint = _checkpoint(colbert, self.checkpoint, config)
                self.downloaded.require(corpus, lambda texts: _token_counts(checkpoint, texts), self.plaid.separator)
                return
            folder = directory / _FOLDER
            if not all((folder / name).exists() for name in _CODEC):
                shutil.rmtree(folder, ignore_errors=True)  # the library can only go on after its centroids
            folder.mkdir(exist_ok=True)
            config = _config(colbert, self.checkpoint, folder, self.plaid, resume=True, index_bsize=self.batch_size)
            checkpoint = _checkpoint(colbert, self.checkpoint, config)
            texts = [self._text(corpus, doc_id) for doc_id in corpus]
            told.start("encode documents", None)
            try:
                with colbert.Run().context(config, inherit_config=False):
                    indexer = colbert.indexer(config, texts, checkpoint)
                    indexer.encoder = _Encoder(checkpoint, self.batch_size, len(texts), told)
                    indexer.run([])
            except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
                raise RetrievalError(
                    f"{directory}: colbert-ai could not build the index ({type(error).__name__}: {error})"
                ) from error
            told.finish()

    def open(self, directory: Path, documents: StoredDocuments) -> ColBERT:
        """A saved index."""
        index = directory / _FOLDER if self.downloaded is None else self.downloaded.directory
        return ColBERT(documents, self.checkpoint, index, self.plaid, self.digest(documents.digest))

    def _text(self, corpus: Documents, doc_id: str) -> str:
        document = corpus[doc_id]
        return encodable(f"{document.title}{self.plaid.separator}{document.text}" if document.title else document.text)


class _Encoder:
    """The library's encoder, which tells how far it is, and encodes a small collection once instead of twice.

    Args:
        checkpoint: the library's model.
        batch_size: documents at once.
        n_documents: of the collection.
        told: watches.
    """

    def __init__(self, checkpoint: Any, batch_size: int, n_documents: int, told: Progress) -> None:
        self._checkpoint = checkpoint
        self._batch_size = batch_size
        self._n_documents = n_documents
        self._told = told
        self._whole: Any = None

    def encode_passages(self, passages: list[str]) -> Any:
        """Vectors of all tokens, and how many each document has."""
        import torch

        if not passages:
            return None, None
        if self._whole is not None and len(passages) == self._n_documents:
            whole, self._whole = self._whole, None
            return whole
        vectors, counts = [], []
        at_once = 8 * self._batch_size
        for start in range(0, len(passages), at_once):
            part = passages[start : start + at_once]
            found, lengths = self._checkpoint.docFromText(part, bsize=self._batch_size, keep_dims="flatten")
            vectors.append(found)
            counts.extend(lengths)
            self._told.advance(len(part))
        whole = torch.cat(vectors), counts
        if len(passages) == self._n_documents:  # the sample for the centroids was everything
            self._whole = whole
        return whole


def _config(colbert: Any, checkpoint: Path, index: Path, settings: PlaidSettings, **more: Any) -> Any:
    """The library's configuration: the checkpoint's own, then ours; nothing is left to its defaults."""
    found = colbert.ColBERTConfig.load_from_checkpoint(str(checkpoint))
    if found is None:
        raise RetrievalError(
            f"{checkpoint} is no ColBERT checkpoint (artifact.metadata is missing); name the directory of one"
        )
    ours = colbert.ColBERTConfig(
        checkpoint=str(checkpoint),
        model_name=str(checkpoint),  # the checkpoint names a model of the hub, which the library would ask
        index_path=str(index),
        root=str(index.parent),
        nbits=settings.nbits,
        doc_maxlen=settings.doc_maxlen,
        query_maxlen=settings.query_maxlen,
        kmeans_niters=settings.kmeans_iterations,
        rank=0,
        nranks=1,
        avoid_fork_if_possible=True,
        **more,
    )
    return colbert.ColBERTConfig.from_existing(found, ours)


def _checkpoint(colbert: Any, directory: Path, config: Any) -> Any:
    if not (directory / "config.json").is_file():
        raise RetrievalError(
            f"{directory}: no model (config.json is missing); name the directory of a ColBERT checkpoint"
        )
    if "auto_map" in (directory / "config.json").read_text(encoding="utf-8"):
        raise RetrievalError(
            f"{directory} brings Python code of its own (auto_map in config.json), which colbert-ai would run unasked; "
            "use a checkpoint of an architecture that transformers has"
        )
    from safetensors import SafetensorError

    try:
        model = colbert.Checkpoint(str(directory), colbert_config=config, verbose=0)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise RetrievalError(
            f"{directory} cannot be opened as a ColBERT checkpoint ({type(error).__name__}: {error})"
        ) from error
    on_gpu = config.total_visible_gpus > 0
    if on_gpu:
        model = model.cuda()
    model.amp_manager.activated = on_gpu  # half precision is the GPU's; on a CPU its context manager only warns
    model.query_tokenizer.query_maxlen = config.query_maxlen
    return model


def _token_counts(checkpoint: Any, texts: list[str]) -> list[int]:
    """How many vectors the index has of each text: its tokens without punctuation."""
    counts = []
    for text in texts:
        ids, _ = checkpoint.doc_tokenizer.tensorize([text])
        counts.append(sum(checkpoint.mask(ids, skiplist=checkpoint.skiplist)[0]))
    return counts
