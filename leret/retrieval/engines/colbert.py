"""Late interaction: a vector for every token, in colbert-ai's compressed PLAID index."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from leret.config.retriever import ColbertSettings
from leret.core.errors import RetrievalError
from leret.core.hub import find_model, model_digest, require_model
from leret.core.progress import Progress
from leret.core.types import digest
from leret.retrieval.base import Documents, encodable
from leret.retrieval.engines.colbert_compat import library
from leret.retrieval.engines.colbert_index import Downloaded
from leret.retrieval.engines.plaid import ColBERT, PlaidSettings, library_config, open_checkpoint
from leret.retrieval.index.documents import StoredDocuments
from leret.retrieval.index.manifest import Manifest

_FOLDER = "plaid"
_CODEC = ("plan.json", "centroids.pt", "avg_residual.pt", "buckets.pt")


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
        if settings.index_root is not None and settings.index_name is not None:
            downloaded = Downloaded.find(Path(settings.index_root) / settings.index_name)
        if downloaded is not None and settings.checkpoint is None:
            checkpoint = downloaded.own_checkpoint()
        else:
            checkpoint = find_model(settings.checkpoint or "", "retriever.colbert.checkpoint")
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
                config = library_config(colbert, self.checkpoint, self.downloaded.directory, settings)
                checkpoint = open_checkpoint(colbert, self.checkpoint, config)
                self.downloaded.require(corpus, lambda texts: _token_counts(checkpoint, texts), self.plaid.separator)
                return
            folder = directory / _FOLDER
            if not all((folder / name).exists() for name in _CODEC):
                shutil.rmtree(folder, ignore_errors=True)  # the library can only go on after its centroids
            folder.mkdir(exist_ok=True)
            config = library_config(
                colbert, self.checkpoint, folder, self.plaid, resume=True, index_bsize=self.batch_size
            )
            checkpoint = open_checkpoint(colbert, self.checkpoint, config)
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

    The library asks for a sample of the documents first, which up to 30,720 of them is all, and then for all of them,
    25,000 at a time.

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
        self._kept: tuple[Any, list[int]] | None = None  # of the documents that are still to be asked for again

    def encode_passages(self, passages: list[str]) -> Any:
        """Vectors of all tokens, and how many each document has."""
        if not passages:
            return None, None
        if self._kept is not None:
            vectors, counts = self._kept
            n, n_vectors = len(passages), sum(counts[: len(passages)])
            self._kept = (vectors[n_vectors:], counts[n:]) if n < len(counts) else None
            return vectors[:n_vectors], counts[:n]
        found = self._encoded(passages)
        if len(passages) == self._n_documents:
            self._kept = found
        return found

    def _encoded(self, passages: list[str]) -> tuple[Any, list[int]]:
        import torch

        vectors, counts = [], []
        at_once = 8 * self._batch_size
        for start in range(0, len(passages), at_once):
            part = passages[start : start + at_once]
            found, lengths = self._checkpoint.docFromText(part, bsize=self._batch_size, keep_dims="flatten")
            vectors.append(found)
            counts.extend(lengths)
            self._told.advance(len(part))
        return torch.cat(vectors), counts


def _token_counts(checkpoint: Any, texts: list[str]) -> list[int]:
    """How many vectors the index has of each text: its tokens without punctuation."""
    counts = []
    for text in texts:
        ids, _ = checkpoint.doc_tokenizer.tensorize([text])
        counts.append(sum(checkpoint.mask(ids, skiplist=checkpoint.skiplist)[0]))
    return counts
