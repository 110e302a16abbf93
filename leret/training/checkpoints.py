"""The directory of a training that is not finished, and going on from its last whole checkpoint.

::

    R/policies/.NAME/started.json      what is being trained: refused when another recipe comes to go on with it
    R/policies/.NAME/checkpoint-N/     Hugging Face Trainer's: weights, optimizer, schedule, random states
    R/policies/.NAME/final/            the finished policy, renamed to R/policies/NAME when it is whole
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from leret.core.errors import RunError, TrainingError
from leret.core.files import locked, write_atomically

_NO_RESULT = {"save_steps", "log_steps", "report_to", "device"}
"""Keys of a recipe that change nothing in the weights."""


class Workplace:
    """Where one policy is trained.

    Args:
        policies: ``R/policies``.
        name: the policy's.
    """

    def __init__(self, policies: Path, name: str) -> None:
        self.path = policies / f".{name}"
        self.final = self.path / "final"
        self.policy = policies / name

    def lock(self) -> AbstractContextManager[Any]:
        """Held while a policy is trained; of the processes of one training, by the first. Raises RunError if taken."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = RunError(f"{self.path} is being trained by another process; wait for it, or give another name")
        return nullcontext() if os.environ.get("RANK", "0") != "0" else locked(self.path / "training.lock", busy)

    def begin(self, key: Mapping[str, Any]) -> None:
        """Note what is trained, or check that it is what was begun here.

        Args:
            key: recipe and digests, values of JSON.

        Raises:
            TrainingError: an interrupted training of another recipe or of other data lies here.
        """
        started = self.path / "started.json"
        if started.is_file():
            before = json.loads(started.read_text(encoding="utf-8"))
            changed = differing(before, key)
            if changed:
                raise TrainingError(
                    f"{self.path} holds an interrupted training that differs in {'; '.join(changed)}. Go on with what "
                    "it was begun with, give this one another name, or remove that directory"
                )
            return
        write_atomically(started, json.dumps(key, indent=1, ensure_ascii=False))

    def checkpoint(self) -> Path | None:
        """The last whole checkpoint. The trainer's state is written last, so one that can be read is whole."""
        found = sorted(self.path.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]), reverse=True)
        return next((path for path in found if _whole(path)), None)

    def drop_broken(self) -> None:
        """Remove checkpoints that a crash cut off, which would be counted among the ones to keep."""
        for path in self.path.glob("checkpoint-*"):
            if not _whole(path):
                shutil.rmtree(path)

    def publish(self) -> None:
        """Make the finished policy the run's, in one step, and remove what led to it."""
        logs = self.path / "logs"
        if logs.is_dir():
            logs.rename(self.final / "logs")
        self.final.rename(self.policy)
        self.clear()

    def clear(self) -> None:
        """Remove what led to a finished policy."""
        shutil.rmtree(self.path, ignore_errors=True)


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys, dotted, whose values differ, each with both values; keys that change no result are left out."""
    old, new = _flat(before), _flat(now)
    return [
        f"{name}: {old.get(name)!r} then, {new.get(name)!r} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name.rsplit(".", 1)[-1] not in _NO_RESULT
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(item) if isinstance(item, tuple) else item
    return flat


def _whole(path: Path) -> bool:
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
