"""What `leret index info` tells of a downloaded index of ColBERT, and how `leret index check` looks it through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leret.config.retriever import ColbertSettings
from leret.core.errors import RetrievalError
from leret.core.progress import Silent
from leret.retrieval.base import Documents
from leret.retrieval.engines.colbert_index import Collection, Downloaded

_PARTS = ("codes.pt", "residuals.pt", "metadata.json")
"""Files of a chunk, beside its doclens."""


def told_of(index: Path) -> dict[str, Any]:
    """What a downloaded index says of itself, and its size.

    Raises:
        RetrievalError: it is none, or a part of it cannot be read.
    """
    found = Downloaded.find(index)
    values = json.loads((index / "metadata.json").read_text(encoding="utf-8"))
    files = [path for path in index.iterdir() if path.is_file()]
    return {
        "engine": "colbert",
        "documents": len(_token_counts(found)),
        "chunks": values["num_chunks"],
        "vectors": values.get("num_embeddings"),
        "bits": (values.get("config") or {}).get("nbits"),
        "tokens a document": found.doc_maxlen,
        "checkpoint": found.checkpoint or None,
        "collection": None if found.collection is None else str(found.collection),
        "digest": found.digest,
        "size": f"{sum(path.stat().st_size for path in files) / 1e6:.1f} MB in {len(files)} files",
    }


def check_downloaded(index: Path, corpus: Documents | None) -> int:
    """Look for the files of a downloaded index, open it, search it, and compare it with what it is of.

    Args:
        index: its directory.
        corpus: that it should be of; None takes the collection that lies with it.

    Returns:
        Documents in it.

    Raises:
        RetrievalError: it is broken, of another corpus, or cannot be opened: the checkpoint or the collection is gone.
        MissingDependency: colbert-ai is not installed.
    """
    from leret.retrieval.engines.colbert import ColbertEngine
    from leret.retrieval.load import open_index

    found = Downloaded.find(index)
    counts = _token_counts(found)
    problems = _problems(index, counts)
    if problems:
        raise RetrievalError(f"{index}: {'; '.join(problems)}; download it again")
    if found.collection is not None or corpus is None:
        open_index(index).search(["a", ""], 1)
    if corpus is None and found.collection is not None:
        corpus = Collection(found.collection)
    if corpus is not None:
        settings = ColbertSettings(index_root=str(found.directory.parent), index_name=found.directory.name)
        ColbertEngine.of(settings).write(corpus, index, Silent())  # which compares, and writes nothing
    return len(counts)


def _problems(index: Path, counts: list[int]) -> list[str]:
    values = json.loads((index / "metadata.json").read_text(encoding="utf-8"))
    names = [f"{chunk}.{part}" for chunk in range(int(values["num_chunks"])) for part in _PARTS]
    missing = [name for name in (*names, "avg_residual.pt", "buckets.pt") if not (index / name).is_file()]
    problems = [f"{name} is missing" for name in missing]
    vectors = values.get("num_embeddings")
    if vectors is not None and vectors != sum(counts):
        problems.append(f"it says {vectors} vectors, and its doclens are of {sum(counts)}")
    return problems


def _token_counts(found: Downloaded) -> list[int]:
    try:
        return found.token_counts()
    except (OSError, ValueError, TypeError) as error:
        raise RetrievalError(f"{found.directory}: its doclens cannot be read ({error}); download it again") from error
