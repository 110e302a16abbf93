"""Texts to vectors, by a sentence-transformers model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leret.core.errors import MissingDependency, RetrievalError
from leret.retrieval.base import encodable


class Encoder:
    """A sentence-transformers model, pooled as the model says; safe for many threads, one at a time.

    Args:
        directory: of the model.
        normalize: make every vector one long.
        max_length: tokens; None takes the model's.
        batch_size: texts at once.
        device: as torch names it; ``auto`` takes a GPU where there is one.

    Raises:
        RetrievalError: the directory holds no such model, torch cannot use the device, or the model cannot read so many
            tokens.
        MissingDependency: sentence-transformers is not installed.
    """

    def __init__(
        self, directory: Path, *, normalize: bool, max_length: int | None, batch_size: int, device: str
    ) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingDependency("sentence-transformers", "dense") from error
        self._model = _opened(SentenceTransformer, directory, _usable(device))
        if max_length is not None:
            _lengthen(self._model, max_length, directory)
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


def _usable(device: str) -> str | None:
    """The device as sentence-transformers wants it, None being its choice.

    Raises:
        RetrievalError: torch cannot use it.
    """
    if device == "auto":
        return None
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise RetrievalError(
            f"retriever.dense.device: torch cannot use {device} ({_first_line(error)}); name cpu, or auto"
        ) from error
    return device


def _opened(made: Callable[..., Any], directory: Path, device: str | None) -> Any:
    from safetensors import SafetensorError

    try:
        return made(str(directory), device=device, local_files_only=True)
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ImportError, UnpicklingError,
            SafetensorError) as error:  # fmt: skip
        raise RetrievalError(
            f"{directory} cannot be opened as a sentence-transformers model "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error


def _lengthen(model: Any, max_length: int, directory: Path) -> None:
    """Set how many tokens of a text are read; one text of that length is tried where the model's own limit is lower."""
    own = model.max_seq_length
    model.max_seq_length = max_length
    if own is not None and max_length <= own:
        return
    try:
        model.encode(["a " * max_length], show_progress_bar=False)
    except (RuntimeError, IndexError, ValueError) as error:
        raise RetrievalError(
            f"retriever.dense.max_length: {directory} cannot read {max_length} tokens ({_first_line(error)}); "
            f"its own limit is {own}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
