"""The `policy` section, one settings class a kind."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from leret.config.base import BaseUrls, Free, RecipePath, Settings


class PolicySettings(Settings):
    """The LM behind the program."""

    kind: Annotated[Literal["local", "openai", "tgi", "together"], Free()] = "local"
    model: Annotated[
        str,
        Free(),
        RecipePath("model directory", "download the model there, or correct the path", hub=True, names=("demo",)),
    ] = Field("demo", description="model directory, `demo` (shipped), or the served model's name")
    urls: Annotated[BaseUrls, Free()] = Field((), description="of servers: base URLs, of kind openai ending in /v1")
    api_key_env: Annotated[str | None, Free()] = Field(
        None, description="environment variable that holds the server's key"
    )
    tokenizer: Annotated[
        str | None,
        Free(),
        RecipePath("tokenizer directory", "set policy.tokenizer to the served model's directory", hub=True),
    ] = Field(None, description="kind tgi: directory with the chat template; None takes the model")
    enable_thinking: bool | None = Field(None, description="of chat templates that know it; None leaves it to them")
    temperature: float = Field(1.0, ge=0, description="of sampling; evaluation is greedy unless its recipe says so")
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: PositiveInt = Field(64, description="completion tokens at most")
    device: Annotated[str, Free()] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Free()] = "auto"
    timeout_s: Annotated[float, Free()] = Field(60.0, gt=0, description="of servers: deadline of an attempt")
    retry_for_s: Annotated[float, Free()] = Field(
        300.0, ge=0, description="of servers: an outage is waited for so long, then it is an error; 0 tries once"
    )
    concurrency: Annotated[PositiveInt, Free()] = Field(32, description="of servers: requests in flight at most")
    logprobs: Annotated[bool, Free()] = Field(
        False, description="openai, together: ask for log-probabilities and token ids"
    )
    best_of: Annotated[bool, Free()] = Field(
        False, description="tgi: a prompt's samples in one request, which has no seed"
    )
    price_prompt: Annotated[float, Free()] = Field(0.0, ge=0, description="of a million prompt tokens")
    price_completion: Annotated[float, Free()] = Field(0.0, ge=0, description="of a million completion tokens")

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        # The value is not repeated: it may well be the key.
        if value is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise ValueError(
                "names an environment variable, in capitals (TOGETHER_API_KEY, say), and does not hold the key itself"
            )
        return value

    @model_validator(mode="after")
    def _fits_kind(self) -> PolicySettings:
        if self.kind == "openai" and not self.urls:
            raise ValueError("policy.urls is missing: kind openai needs at least one, as in http://127.0.0.1:8000/v1")
        if self.kind == "tgi" and not self.urls:
            raise ValueError("policy.urls is missing: kind tgi needs at least one, as in http://127.0.0.1:3000")
        if self.kind == "local" and self.urls:
            raise ValueError("policy.urls is given, but kind local runs in this process; use kind: openai")
        if self.kind == "together" and self.model == "demo":
            raise ValueError("policy.model is missing: kind together needs the name of a model of theirs")
        for name, kinds in _OF_KIND.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"policy.{name} is of kind {' and '.join(kinds)}, not of {self.kind}; remove it")
        return self

    def in_process(self, model: str) -> PolicySettings:
        """The same sampling by a model directory in this process; what is of servers alone gets its default."""
        kept = {name: getattr(self, name) for name in _OF_MODEL}
        return PolicySettings(kind="local", model=model, **kept)


_OF_MODEL = ("enable_thinking", "temperature", "top_p", "max_tokens", "device", "dtype")


_OF_KIND = {
    "tokenizer": ("tgi",),
    "enable_thinking": ("local", "openai", "tgi"),
    "best_of": ("tgi",),
    "logprobs": ("openai", "together"),
}
"""Policy settings that other kinds would ignore."""
