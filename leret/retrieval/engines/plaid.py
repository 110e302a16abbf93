"""Search of a PLAID index with colbert-ai, and the library's configuration and model that its making needs too."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from leret.config.retriever import ColbertSettings
from leret.core.errors import RetrievalError
from leret.core.types import Ranking
from leret.retrieval.base import answered, checked
from leret.retrieval.engines.colbert_compat import library
from leret.retrieval.index.documents import Passages, Placed

_CODE = frozenset({"auto_map", "custom_pipelines"})
"""Keys of transformers that name classes in files of the checkpoint, or of another one on the hub."""


@dataclass(frozen=True)
class PlaidSettings:
    """All that decides a PLAID index and its search; see `leret.config.retriever.ColbertSettings`."""

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
            self._config = library_config(colbert, checkpoint, index, settings)
            self._checkpoint = open_checkpoint(colbert, checkpoint, self._config)
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


def library_config(colbert: Any, checkpoint: Path, index: Path, settings: PlaidSettings, **more: Any) -> Any:
    """The library's configuration: the checkpoint's own, then ours; nothing is left to its defaults.

    Raises:
        RetrievalError: ``checkpoint`` is none of ColBERT's.
    """
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


def open_checkpoint(colbert: Any, directory: Path, config: Any) -> Any:
    """The library's model.

    Raises:
        RetrievalError: it cannot be opened, or would run code of its own.
    """
    if not (directory / "config.json").is_file():
        raise RetrievalError(
            f"{directory}: no model (config.json is missing); name the directory of a ColBERT checkpoint"
        )
    from safetensors import SafetensorError

    try:
        _refuse_code(directory)
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


def _refuse_code(directory: Path) -> None:
    """Refuse a checkpoint that brings Python: colbert-ai would run it unasked."""
    keys: set[str] = set()
    for path in directory.glob("*config*.json"):
        json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: keys.update(key for key, _ in pairs))
        if code := keys & _CODE:
            raise RetrievalError(
                f"{directory} brings Python code of its own ({', '.join(code)} in {path.name}), which is not run; use "
                "a checkpoint of an architecture that transformers has"
            )
