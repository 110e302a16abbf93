"""An adapter merged into its base, kept beside the adapter until one of the two changes."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from leret.core.errors import PolicyError
from leret.policies.checkpoints import find_model, load_model, model_digest, read_model_json
from leret.policies.serving.model import ServedModel

_STAMP = "merged.json"


def merged_directory(adapter: Path) -> Path:
    """Where an adapter's merged weights are kept: hidden, so that no stage takes them for another policy."""
    return adapter.parent / f".{adapter.name}-merged"


def merged(served: ServedModel) -> ServedModel:
    """The same policy as full weights in a directory, merged now or before.

    Args:
        served: with an adapter; full weights are handed back as they are.

    Raises:
        PolicyError: the adapter does not fit its base, or the directory cannot be written.
    """
    if served.adapter is None:
        return served
    target = merged_directory(served.adapter)
    digest = model_digest(served.adapter)
    if not _holds(target, digest):
        _merge(served, target, digest)
    return ServedModel(served.name, str(target))


def _holds(target: Path, digest: str) -> bool:
    try:
        stamp: Any = json.loads((target / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(stamp, dict) and stamp.get("adapter") == digest


def _merge(served: ServedModel, target: Path, digest: str) -> None:
    """Write it whole or not at all."""
    assert served.adapter is not None
    config = read_model_json(find_model(served.weights) / "config.json")
    saved = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    loaded = load_model(served.adapter, device="cpu", dtype=saved)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as name:
            place = Path(name) / "model"
            loaded.model.save_pretrained(place)
            loaded.tokenizer.save_pretrained(place)
            (place / _STAMP).write_text(json.dumps({"adapter": digest}), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            place.rename(target)
    except OSError as error:
        raise PolicyError(
            f"{target} cannot be written ({error.strerror or error}); merging needs room for full weights beside the "
            "adapter: free some, or serve the adapter without --merge"
        ).failed() from error
