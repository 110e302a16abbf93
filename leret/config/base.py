"""What every section of a recipe shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict


class Settings(BaseModel):
    """What all sections share: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


@dataclass(frozen=True)
class Free:
    """Marks a key that may change when a run goes on: it decides no sample. ``Annotated[float, Free()]``."""


@dataclass(frozen=True)
class RecipePath:
    """Marks a key that names a file or directory; a relative one is looked for as `leret.config.paths` says.

    Attributes:
        what: what is expected there, in a message.
        mend: what to do when it is missing.
        hub: the value may also be the name of a model or data set of the Hugging Face hub.
    """

    what: str
    mend: str = "correct the path"
    hub: bool = False


def _without_key(value: Any) -> Any:
    if "@" in str(value) or "?" in str(value):  # not repeated, since it may hold a key
        raise ValueError(
            "a base URL holds no user, password or query; put the key in a variable (api_key_env, token_env)"
        )
    return value


BaseUrl = Annotated[str, AfterValidator(_without_key)]
BaseUrls = Annotated[tuple[str, ...], AfterValidator(_without_key)]
