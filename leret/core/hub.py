"""Models that engines encode with: where they are, and a name for what they hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

from leret.core.errors import RetrievalError, reason

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".json", ".txt", ".model", ".metadata"}
"""Endings of the files that decide what a model answers."""
_ASIDE = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot"]


def find_model(name: str, key: str) -> Path:
    """The directory of a model: ``name``, or ``owner/name`` of the Hugging Face hub, downloaded where it is not yet.

    ``key`` is that of the recipe, for the message.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise RetrievalError(f"{key}: no model directory {name}; correct the path, or name a model of the hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=_ASIDE))
    except Exception as error:
        raise RetrievalError(
            f"{key}: no directory {name} here, and the hub does not give it ({reason(error)}); "
            "download the model and name its directory"
        ) from error


def model_digest(directory: Path) -> str:
    """A name for the content of a model directory: of all its weights, settings and vocabulary files."""
    content = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.suffix not in _WEIGHTS or not path.is_file() or name.startswith((".", "onnx/", "openvino/")):
            continue
        with open(path, "rb") as file:
            one = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        content.update(f"{name}\0{one.hexdigest()}\0".encode())
    return content.hexdigest()


def require_model(directory: Path, digest: str, index: Path) -> None:
    """Refuse a model that is not the one an index was made with."""
    if not directory.is_dir():
        raise RetrievalError(f"{index}: its model {directory} is gone; put it back, or build with another")
    if model_digest(directory) != digest:
        raise RetrievalError(
            f"{index}: {directory} is not the model that the index was made with; put that back, or build it again"
        )
