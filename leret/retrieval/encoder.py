"""Texts to vectors, by a sentence-transformers model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leret.errors import MissingDependency, RetrievalError
from leret.retrieval.queries import encodable

__all__ = ["Encoder"]


class Encoder:
    """A sentence-transformers model, pooled as the model says; safe for many threads, one at a time.

    Args:
        directory: of the model.
        normalize: make every vector one long.
        max_length: tokens; None takes the model's.
        batch_size: texts at once.
        device: as torch names it; ``auto`` takes a GPU where there is one.

    Raises:
        RetrievalError: the directory holds no such model.
        MissingDependency: sentence-transformers is not installed.
    """

    def __init__(
        self, directory: Path, *, normalize: bool, max_length: int | None, batch_size: int, device: str
    ) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingDependency("sentence-transformers", "dense") from error
        try:
            self._model: Any = SentenceTransformer(
                str(directory), device=None if device == "auto" else device, local_files_only=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            first = str(error).strip().split("\n", 1)[0]
            raise RetrievalError(
                f"{directory} cannot be opened as a sentence-transformers model ({type(error).__name__}: {first})"
            ) from error
        if max_length is not None:
            self._model.max_seq_length = max_length
        self._normalize = normalize
        self._batch_size = batch_size
        self._lock = threading.Lock()  # tokenizers keep their truncation as a state

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of texts.

        Args:
            texts: any strings.

        Returns:
            (n_texts, n_dimensions) float32.
        """
        with self._lock:
            found = self._model.encode(
                [encodable(text) for text in texts],
                batch_size=self._batch_size,
                normalize_embeddings=self._normalize,
                show_progress_bar=False,
            )
        return np.ascontiguousarray(found, np.float32)
