"""The record of the texts that a policy learned from, for the leak check of `leret eval`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from leret.core.files import write_atomically
from leret.datasets.leaks import FINGERPRINTS, fingerprint


def write_fingerprints(directory: Path, texts: Iterable[str]) -> None:
    """Record the texts that a policy learns from; the texts cannot be read back from the record."""
    fingerprints = set(map(fingerprint, texts))
    lines = [f"{value}\n" for value in sorted(fingerprints)]
    write_atomically(directory / FINGERPRINTS, "".join(lines))
