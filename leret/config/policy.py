"""The `policy` section: one settings class per kind, which its policy uses unchanged."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PositiveInt, field_validator

from leret.config.base import BaseUrls, Free, KindSettings, RecipePath
from leret.core.bundled import POLICIES

TOGETHER_URL = "https://api.together.ai/v1"

T = TypeVar("T")

Thinking = Annotated[bool | None, Field(description="for chat templates with this switch; None: the template decides")]


class PolicySettings(KindSettings):
    """Keys of every kind of policy."""

    default_kind = "local"

    kind: str
    model: str
    temperature: float = Field(1.0, ge=0, description="of sampling; evaluation is greedy unless its recipe sets one")
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: PositiveInt = Field(64, description="maximum number of completion tokens")
    price_prompt: Annotated[float, Free()] = Field(0.0, ge=0, description="per million prompt tokens")
    price_completion: Annotated[float, Free()] = Field(0.0, ge=0, description="per million completion tokens")

    def in_process(self, model: str) -> PolicySettings:
        """Return settings with the same sampling for a model directory in this process."""
        keys = set(LocalPolicySettings.model_fields) - {"kind", "model", "price_prompt", "price_completion"}
        shared = {name: getattr(self, name) for name in keys & set(type(self).model_fields)}
        return LocalPolicySettings(model=model, **shared)


def by_predictor(first: T, others: Mapping[str, T], new: T, predictors: Collection[str] | None) -> dict[str, T]:
    """Return the value of each predictor after ``new`` replaces those of ``predictors``; ``""`` is the default.

    Without ``predictors``, ``new`` replaces the default ``first``; without ``others``, it serves all predictors.
    """
    if not others:
        return {"": new}
    return {"": first, **others, **dict.fromkeys(predictors or [""], new)}


class LocalPolicySettings(PolicySettings):
    """A model directory in this process."""

    kind: Annotated[Literal["local"], Free()] = "local"
    model: Annotated[
        str,
        Free(),
        RecipePath("model directory", "download the model there, or correct the path", hub=True, names=tuple(POLICIES)),
    ] = Field("demo", description="model directory, name on the hub, or `demo`, `agent` (shipped)")
    enable_thinking: Thinking = None
    template: Literal["plain"] | None = Field(
        None, description="plain: join the texts of messages by lines, for base models without a chat template (GPT-2)"
    )
    device: Annotated[str, Free()] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Free()] = "auto"


class ServedPolicySettings(PolicySettings):
    """Keys of every policy behind servers."""

    model: Annotated[str, Free()] = Field(description="the served model's name")
    urls: Annotated[BaseUrls, Free()] = Field(min_length=1, description="base URLs; several share the load")
    api_key_env: Annotated[str | None, Free()] = Field(None, description="environment variable with the server's key")
    timeout_s: Annotated[float, Free()] = Field(60.0, gt=0, description="deadline of one attempt")
    retry_for_s: Annotated[float, Free()] = Field(300.0, ge=0, description="wait in an outage; 0 tries once")
    concurrency: Annotated[PositiveInt, Free()] = Field(32, description="maximum number of requests in flight")

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        # The message leaves out the value, which may be the key.
        if value is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise ValueError("must name an environment variable in capitals (TOGETHER_API_KEY), not hold the key")
        return value


class OpenAIPolicySettings(ServedPolicySettings):
    """Servers with OpenAI's chat completions API."""

    kind: Annotated[Literal["openai"], Free()] = "openai"
    urls: Annotated[BaseUrls, Free()] = Field(min_length=1, description="as in http://127.0.0.1:8000/v1")
    enable_thinking: Thinking = None
    logprobs: Annotated[bool, Free()] = Field(False, description="ask for log-probabilities and token ids")

    def request_keys(self) -> dict[str, Any]:
        """Return the optional keys of a request; token ids are vLLM's extension, which other servers may refuse."""
        keys: dict[str, Any] = {"logprobs": True, "return_token_ids": True} if self.logprobs else {}
        if self.enable_thinking is not None:
            keys["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        return keys


class TgiPolicySettings(ServedPolicySettings):
    """text-generation-inference, through its OpenAI-compatible API."""

    kind: Annotated[Literal["tgi"], Free()] = "tgi"
    urls: Annotated[BaseUrls, Free()] = Field(min_length=1, description="as in http://127.0.0.1:3000")
    enable_thinking: Thinking = None
    tokenizer: Annotated[str, Free()] = Field("", description="ignored: the server applies its chat template")
    best_of: Annotated[bool, Free()] = Field(False, description="ignored: each sample is a request with a seed")

    @field_validator("urls", mode="after")
    @classmethod
    def _of_the_api(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        roots = [url.rstrip("/").removesuffix("/generate").removesuffix("/v1") for url in urls]
        return tuple(f"{root}/v1" for root in roots)

    def request_keys(self) -> dict[str, Any]:
        """Return the optional keys of a request; TGI's template does not read ``enable_thinking``."""
        keys: dict[str, Any] = {"logprobs": True}
        if self.enable_thinking is not None:
            keys["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        return keys


class TogetherPolicySettings(ServedPolicySettings):
    """Together AI, through its OpenAI-compatible API."""

    kind: Annotated[Literal["together"], Free()] = "together"
    urls: Annotated[BaseUrls, Free()] = (TOGETHER_URL,)
    api_key_env: Annotated[str | None, Free()] = "TOGETHER_API_KEY"
    logprobs: Annotated[bool, Free()] = Field(False, description="ask for log-probabilities and token ids")

    def request_keys(self) -> dict[str, Any]:
        """Return the optional keys of a request; ``logprobs`` is a number of tokens in Together's API."""
        return {"logprobs": 1} if self.logprobs else {}


class PickerSettings(PolicySettings):
    """Keys of every picker: a policy that chooses one of several candidates (`leret.Pick`) and writes no text."""

    model: Annotated[
        str,
        Free(),
        RecipePath("directory of a picker", "train it first, or correct the path", hub=True, names=("scratch",)),
    ] = Field("scratch", description="directory from `leret train`; scratch: new weights")
    top_k: PositiveInt | None = Field(None, description="draw from the k best candidates")
    beam: PositiveInt = Field(1, description="paths of picks to follow at temperature 0; 1 is greedy")
    budget: PositiveInt = Field(2, description="picks per episode of a beam")
    hidden_size: int = Field(32, multiple_of=4, gt=0)
    seed: int = Field(0, description="of the initial weights")

    def architecture(self) -> dict[str, Any]:
        return self.model_dump(mode="json", include=set(type(self).model_fields) - _OF_USE)

    def in_process(self, model: str) -> PolicySettings:
        return self.model_copy(update={"model": model})


_OF_USE = {*PolicySettings.model_fields, "top_k", "beam", "budget", "device"}


class FeaturesSettings(PickerSettings):
    """A linear layer and a small network over named numbers of each candidate."""

    kind: Annotated[Literal["features"], Free()] = "features"
    features: Annotated[
        str, RecipePath("file of a feature function", "write FILE.py:function", member=True, only=".py")
    ] = Field("mentions", description="mentions, or your own: module:function, FILE.py:function")


class EncoderSettings(PickerSettings):
    """The inner product of two embeddings, the state's and the candidate's (Q-RAG, arXiv 2511.07328)."""

    kind: Annotated[Literal["encoder"], Free()] = "encoder"
    positions: Literal["none", "absolute", "relative"] = Field(
        "none", description="rotate candidate embeddings by their places, or relative to earlier picks"
    )
    order: Literal["document", "pick"] = Field("document", description="of earlier picks in the text of a state")
    query_prefix: str = Field("", description='prefix of a state: "query: " for E5')
    document_prefix: str = Field("", description='prefix of a candidate: "passage: " for E5')
    max_length: PositiveInt | None = Field(None, description="tokens per text; None: the model's limit")
    hidden_size: int = Field(64, multiple_of=4, gt=0, description="dimensions of an embedding, for new weights")
    num_hidden_layers: PositiveInt = Field(1, description="for new weights")
    vocab_size: PositiveInt = Field(8192, description="words, for new weights")
    device: Annotated[str, Free()] = "auto"
