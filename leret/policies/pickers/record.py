"""A picker on disk: its record, and the digest that names it. Nothing here loads torch or reads weights into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leret.config.policy import FeaturesSettings, PickerSettings
from leret.core import bundled
from leret.core.errors import PolicyError
from leret.core.types import digest
from leret.policies.checkpoints import find_model, read_model_json, refuse_changed_weights
from leret.rewards.functions import source_digest

RECORD = "picker.json"
"""In a picker's directory: its kind and settings."""

VERSION = 3


def read_record(settings: PickerSettings) -> tuple[PickerSettings, dict[str, Any] | None]:
    """Return the settings, with the architecture of the picker that leret saved, and its record.

    A pretrained encoder and a picker from scratch have no record.
    """
    directory = Path(settings.model)
    if not (directory / RECORD).is_file():
        if isinstance(settings, FeaturesSettings) and settings.model != "scratch":
            raise PolicyError(
                f"policy.model: {directory} holds no picker of kind features; name a directory that "
                "`leret train` wrote, or leave it out to start from nothing"
            )
        return settings, None
    record = read_model_json(directory / RECORD)
    if record.get("version") != VERSION:
        raise PolicyError(f"{directory} was written by another version of leret; train the picker again")
    if record.get("kind") != settings.kind:
        raise PolicyError(f"{directory} is a picker of kind {record.get('kind')}; set policy.kind to that")
    refuse_changed_weights(directory)
    return type(settings).model_validate({**settings.model_dump(), **record["settings"]}), record


def picker_digest(settings: PickerSettings) -> str:
    """Return a name for the picker's weights, architecture, decoding and feature function."""
    model, (settings, record) = settings.model, read_record(settings)
    content = None if model == "scratch" else bundled.model_digest(Path(model) if record else find_model(model))
    source = source_digest(settings.features) if isinstance(settings, FeaturesSettings) else None
    decoding = [settings.top_k, settings.beam, settings.budget]
    return digest(settings.kind, settings.architecture(), decoding, source, content)
