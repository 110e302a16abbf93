"""Late interaction: a vector for each token, in colbert-ai's compressed PLAID index."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from leret.config.retriever import ColbertSettings
from leret.core.bundled import find_model, model_digest, require_model
from leret.core.errors import RetrievalError, reason
from leret.core.progress import Progress, Silent
from leret.core.types import Document, Ranking
from leret.retrieval.base import CallableRetriever, Documents, clip_k, search_valid, to_valid_utf8
from leret.retrieval.engines.colbert_compat import library
from leret.retrieval.engines.colbert_index import Collection, PlaidIndex
from leret.retrieval.index.documents import DocumentTable, InMemoryDocuments
from leret.retrieval.index.manifest import IndexEngine, Manifest

_FOLDER = "plaid"
_CODEC = ("plan.json", "centroids.pt", "avg_residual.pt", "buckets.pt")
_CODE = frozenset({"auto_map", "custom_pipelines"})  # keys that name classes in files of a checkpoint or of the hub


class ColBERT(CallableRetriever):
    """Search by late interaction; safe for many threads, which take turns.

    A query without a letter or a digit has an empty ranking. Equal scores keep the order of the corpus.
    """

    def __init__(
        self, documents: DocumentTable, checkpoint: Path, index: Path, settings: ColbertSettings, digest: str
    ) -> None:
        self.digest = digest
        self._passages = documents.passages
        self._n_documents = len(documents)
        self._settings = settings
        self._lock = threading.Lock()
        with library() as colbert:
            self._config = _library_config(colbert, checkpoint, index, settings)
            self._checkpoint = open_checkpoint(colbert, checkpoint, self._config)
            try:
                self._ranker = colbert.IndexScorer(str(index), use_gpu=self._config.total_visible_gpus > 0)
            except (OSError, ValueError, RuntimeError, KeyError, AssertionError, EOFError) as error:
                raise RetrievalError(f"{index}: the index cannot be read ({reason(error)}); build it again") from error
            self._config_class = colbert.ColBERTConfig
        n_indexed = len(self._ranker.doclens)
        if n_indexed != len(documents):
            raise RetrievalError(f"{index} has {n_indexed} documents, the corpus has {len(documents)}; build it again")

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        k = clip_k(k, self._n_documents)
        return search_valid(queries, lambda asked: self._search(asked, k))

    def _search(self, queries: list[str], k: int) -> list[Ranking]:
        import torch

        with self._lock, torch.inference_mode():
            vectors = self._checkpoint.queryFromText(queries, bsize=128 if len(queries) > 128 else None, to_cpu=True)
            return [self._ranking(vectors[i : i + 1].cpu(), k) for i in range(len(queries))]

    def _ranking(self, vectors: Any, k: int) -> Ranking:
        """Rank candidates from more and more cells, until there are k documents."""
        ncells, n_centroids = self._settings.ncells, len(self._ranker.codec.centroids)
        while True:
            ncells = min(ncells, n_centroids)
            # set at each call: the library's searcher freezes the values of its first call
            more = self._config_class(
                ncells=ncells,
                centroid_score_threshold=self._settings.centroid_threshold,
                ndocs=max(self._settings.ndocs, 4 * k),  # a quarter is scored in full
            )
            rows, scores = self._ranker.rank(self._config_class.from_existing(self._config, more), vectors)
            if len(rows) >= k or ncells == n_centroids:
                break
            ncells *= 4
        best = sorted(zip((-score for score in scores), rows, strict=True))[:k]
        return self._passages([row for _, row in best], [-score for score, _ in best])


@dataclass(frozen=True)
class ColbertIndex(IndexEngine):
    """Builds and opens ColBERT indexes; `ColbertIndex.of` resolves the checkpoint of a recipe."""

    settings: ColbertSettings
    checkpoint: Path  # directory of the model
    content: str  # digest of the model
    downloaded: PlaidIndex | None = None  # an index to search where it is, instead of a build
    kind: ClassVar[str] = "colbert"
    packages = ("colbert-ai",)
    resumable: ClassVar[bool] = True

    @classmethod
    def of(cls, settings: ColbertSettings) -> Self:
        downloaded = None
        if settings.index_root is not None and settings.index_name is not None:
            downloaded = PlaidIndex.open(Path(settings.index_root) / settings.index_name)
        if downloaded is not None and settings.checkpoint is None:
            checkpoint = downloaded.inner_checkpoint()
        else:
            checkpoint = find_model(settings.checkpoint or "", "retriever.checkpoint")
        return cls(settings, checkpoint, model_digest(checkpoint), downloaded)

    @classmethod
    def from_manifest(cls, manifest: Manifest, directory: Path) -> Self:
        values = dict(manifest.settings)
        content, index = values.pop("checkpoint"), values.pop("downloaded", None)
        checkpoint = Path(manifest.places["checkpoint"])
        require_model(checkpoint, content, directory)
        downloaded = None
        if index is not None:
            downloaded = PlaidIndex.open(Path(manifest.places["index"]))
            if downloaded.digest != index:
                raise RetrievalError(f"{directory} is not for the index {downloaded.directory}; build it again")
        return cls(ColbertSettings(checkpoint=str(checkpoint), **values), checkpoint, content, downloaded)

    def ranking_keys(self) -> dict[str, Any]:
        keys = {"checkpoint": self.content, **self.settings.ranking_keys()}
        del keys["index_name"]
        return keys if self.downloaded is None else {**keys, "downloaded": self.downloaded.digest}

    def external_paths(self) -> dict[str, str]:
        paths = {"checkpoint": str(self.checkpoint)}
        return paths if self.downloaded is None else {**paths, "index": str(self.downloaded.directory)}

    def write(self, corpus: Documents, directory: Path, progress: Progress) -> None:
        """Encode and compress the documents, or compare a downloaded index with them."""
        with library() as colbert:
            if self.downloaded is not None:
                maxlen = self.downloaded.doc_maxlen or self.settings.doc_maxlen
                settings = self.settings.model_copy(update={"doc_maxlen": maxlen})
                config = _library_config(colbert, self.checkpoint, self.downloaded.directory, settings)
                checkpoint = open_checkpoint(colbert, self.checkpoint, config)
                self.downloaded.require_corpus(corpus, self._text, lambda texts: _token_counts(checkpoint, texts))
                return
            folder = directory / _FOLDER
            if not all((folder / name).exists() for name in _CODEC):
                shutil.rmtree(folder, ignore_errors=True)  # the library resumes only after its centroids
            folder.mkdir(exist_ok=True)
            at_once = self.settings.batch_size
            config = _library_config(colbert, self.checkpoint, folder, self.settings, resume=True, index_bsize=at_once)
            checkpoint = open_checkpoint(colbert, self.checkpoint, config)
            texts = [self._text(corpus[doc_id]) for doc_id in corpus]
            progress.start("encode documents", None)
            try:
                with colbert.Run().context(config, inherit_config=False):
                    indexer = colbert.indexer(config, texts, checkpoint)
                    indexer.encoder = _Encoder(checkpoint, at_once, len(texts), progress)
                    indexer.run([])
            except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
                raise RetrievalError(f"{directory}: colbert-ai could not build the index ({reason(error)})") from error
            progress.finish()

    def open(self, directory: Path, documents: DocumentTable) -> ColBERT:
        index = directory / _FOLDER if self.downloaded is None else self.downloaded.directory
        return ColBERT(documents, self.checkpoint, index, self.settings, self.digest(documents.digest))

    def _text(self, document: Document) -> str:
        title = f"{document.title}{self.settings.separator}" if document.title else ""
        return to_valid_utf8(f"{title}{document.text}")


def open_downloaded(directory: Path) -> ColBERT:
    """Open a downloaded index with its checkpoint and the collection beside it."""
    index = PlaidIndex.open(directory)
    if index.collection is None:
        raise RetrievalError(
            f"{directory} is a ColBERT index without its collection.tsv; put that beside it, or run "
            f"`leret index build --kind colbert --set index_root={directory.parent} "
            f"--set index_name={directory.name} --corpus PATH --out DIR`"
        )
    return _downloaded(index).open(directory, InMemoryDocuments(Collection(index.collection)))


def check_downloaded(directory: Path, corpus: Documents | None) -> int:
    """Check all files of a downloaded index, search it, and return its number of documents.

    It is compared with ``corpus``, or else with the collection beside it.
    """
    index = PlaidIndex.open(directory)
    if problems := index.problems():
        raise RetrievalError(f"{directory}: {'; '.join(problems)}; download it again")
    if index.collection is not None or corpus is None:
        open_downloaded(directory).search(["a", ""], 1)
    if corpus is None and index.collection is not None:
        corpus = Collection(index.collection)
    if corpus is not None:  # `write` only compares a downloaded index
        _downloaded(index).write(corpus, directory, Silent())
    return len(index.token_counts())


def _downloaded(index: PlaidIndex) -> ColbertIndex:
    return ColbertIndex.of(ColbertSettings(index_root=str(index.directory.parent), index_name=index.directory.name))


@dataclass
class _Encoder:
    """The library's encoder, with progress and without a second pass over a small collection.

    The library first asks for a sample of the documents, which is the whole collection up to 30,720 documents, then for
    all of them, 25,000 at a time.
    """

    checkpoint: Any
    batch_size: int
    n_documents: int
    progress: Progress
    _ahead: tuple[Any, list[int]] | None = None  # encoded documents that are still to be asked for

    def encode_passages(self, passages: list[str]) -> Any:
        """Return the vectors of all tokens, and their number per document."""
        if not passages:
            return None, None
        if self._ahead is not None:
            vectors, counts = self._ahead
            n, n_vectors = len(passages), sum(counts[: len(passages)])
            self._ahead = (vectors[n_vectors:], counts[n:]) if n < len(counts) else None
            return vectors[:n_vectors], counts[:n]
        encoded = self._encode(passages)
        if len(passages) == self.n_documents:
            self._ahead = encoded
        return encoded

    def _encode(self, passages: list[str]) -> tuple[Any, list[int]]:
        import torch

        vectors, counts = [], []
        at_once = 8 * self.batch_size
        for start in range(0, len(passages), at_once):
            part = passages[start : start + at_once]
            encoded, lengths = self.checkpoint.docFromText(part, bsize=self.batch_size, keep_dims="flatten")
            vectors.append(encoded)
            counts.extend(lengths)
            self.progress.advance(len(part))
        return torch.cat(vectors), counts


def _library_config(colbert: Any, checkpoint: Path, index: Path, settings: ColbertSettings, **more: Any) -> Any:
    """Return the library's configuration: the checkpoint's, overridden by the settings; no default is left."""
    base = colbert.ColBERTConfig.load_from_checkpoint(str(checkpoint))
    if base is None:
        raise RetrievalError(f"{checkpoint} is not a ColBERT checkpoint (no artifact.metadata); name another")
    ours = colbert.ColBERTConfig(
        checkpoint=str(checkpoint),
        model_name=str(checkpoint),  # the library would look up the checkpoint's name on the hub
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
    return colbert.ColBERTConfig.from_existing(base, ours)


def open_checkpoint(colbert: Any, directory: Path, config: Any) -> Any:
    """Return the library's model; refuse a checkpoint with code."""
    if not (directory / "config.json").is_file():
        raise RetrievalError(f"{directory} is not a ColBERT checkpoint (no config.json); name another")
    from safetensors import SafetensorError

    try:
        _refuse_code(directory)
        model = colbert.Checkpoint(str(directory), colbert_config=config, verbose=0)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise RetrievalError(f"{directory} cannot be opened as a ColBERT checkpoint ({reason(error)})") from error
    on_gpu = config.total_visible_gpus > 0
    if on_gpu:
        model = model.cuda()
    model.amp_manager.activated = on_gpu  # half precision; on a CPU its context manager only warns
    model.query_tokenizer.query_maxlen = config.query_maxlen
    return model


def _refuse_code(directory: Path) -> None:
    keys: set[str] = set()
    for path in directory.glob("*config*.json"):
        json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: keys.update(key for key, _ in pairs))
        if code := keys & _CODE:
            raise RetrievalError(
                f"{directory} has Python code ({', '.join(code)} in {path.name}), which leret does not run; use "
                "a checkpoint of an architecture that transformers has"
            )


def _token_counts(checkpoint: Any, texts: list[str]) -> list[int]:
    """Return the number of vectors in the index for each text: its tokens without punctuation."""
    counts = []
    for text in texts:
        ids, _ = checkpoint.doc_tokenizer.tensorize([text])
        counts.append(sum(checkpoint.mask(ids, skiplist=checkpoint.skiplist)[0]))
    return counts
