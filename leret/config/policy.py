"""The `policy` section: one settings class a kind, used by its policy as it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PositiveInt, field_validator, model_validator

from leret.config.base import BaseUrls, Free, KindSettings, RecipePath
from leret.core.bundled import POLICIES

TOGETHER_URL = "https://api.together.ai/v1"

T = TypeVar("T")

Thinking = Annotated[bool | None, Field(description="of chat templates that know it; None leaves it to them")]


class PolicySettings(KindSettings):
    """What the settings of all kinds share."""

    default_kind = "local"

    kind: str
    model: str
    temperature: float = Field(1.0, ge=0, description="of sampling; evaluation is greedy unless its recipe says so")
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: PositiveInt = Field(64, description="completion tokens at most")
    price_prompt: Annotated[float, Free()] = Field(0.0, ge=0, description="of a million prompt tokens")
    price_completion: Annotated[float, Free()] = Field(0.0, ge=0, description="of a million completion tokens")

    def in_process(self, model: str) -> PolicySettings:
        """The same sampling by a model directory in this process."""
        of_model = set(LocalPolicySettings.model_fields) - {"kind", "model", "price_prompt", "price_completion"}
        shared = {name: getattr(self, name) for name in of_model & set(type(self).model_fields)}
        return LocalPolicySettings(model=model, **shared)


def by_predictor(first: T, others: Mapping[str, T], new: T, predictors: Collection[str] | None) -> dict[str, T]:
    """What belongs to each predictor, under ``""`` to those without an entry, once ``new`` is that of ``predictors``.

    Without ``predictors``, ``new`` takes the place of ``first``; without ``others``, it is that of all.
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
        None, description="plain: of a base model that has no chat template (GPT-2), the texts of the messages by lines"
    )
    device: Annotated[str, Free()] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Free()] = "auto"


class ServedPolicySettings(PolicySettings):
    """What the settings of all policies behind servers share."""

    model: Annotated[str, Free()] = Field(description="the served model's name")
    urls: Annotated[BaseUrls, Free()] = Field(min_length=1, description="base URLs; several share the load")
    api_key_env: Annotated[str | None, Free()] = Field(None, description="variable that holds the server's key")
    timeout_s: Annotated[float, Free()] = Field(60.0, gt=0, description="deadline of an attempt")
    retry_for_s: Annotated[float, Free()] = Field(300.0, ge=0, description="outages are waited for; 0 tries once")
    concurrency: Annotated[PositiveInt, Free()] = Field(32, description="requests in flight at most")

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        # The value is not repeated: it may well be the key.
        if value is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise ValueError("names an environment variable, in capitals (TOGETHER_API_KEY, say), never the key itself")
        return value


class OpenAIPolicySettings(ServedPolicySettings):
    """Servers that speak OpenAI's chat completions."""

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
    """text-generation-inference by its own route."""

    kind: Annotated[Literal["tgi"], Free()] = "tgi"
    urls: Annotated[BaseUrls, Free()] = Field(min_length=1, description="as in http://127.0.0.1:3000")
    tokenizer: Annotated[
        str, Free(), RecipePath("tokenizer directory", "set policy.tokenizer to the served model's directory", hub=True)
    ] = Field("", description="directory with the chat template; without one, the model's")
    enable_thinking: Thinking = None
    best_of: Annotated[bool, Free()] = Field(False, description="a prompt's samples in one request, which has no seed")

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_of_the_model(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.get("tokenizer") and "model" in values:
            return {**values, "tokenizer": values["model"]}
        return values


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
    """What the settings of pickers share: they choose one of several candidates (`leret.Pick`), and write no text."""

    model: Annotated[
        str,
        Free(),
        RecipePath("directory of a picker", "train it first, or correct the path", hub=True, names=("scratch",)),
    ] = Field("scratch", description="directory that `leret train` wrote; scratch: from nothing")
    top_k: PositiveInt | None = Field(None, description="draw among the k best candidates")
    beam: PositiveInt = Field(1, description="at temperature 0: paths of picks that are followed; 1 is greedy")
    budget: PositiveInt = Field(2, description="of a beam: the picks of an episode")
    hidden_size: int = Field(32, multiple_of=4, gt=0)
    seed: int = Field(0, description="of the first weights")

    def architecture(self) -> dict[str, Any]:
        """What stands in a saved picker, whatever a recipe says later."""
        return self.model_dump(mode="json", include=set(type(self).model_fields) - _OF_USE)

    def in_process(self, model: str) -> PolicySettings:
        return self.model_copy(update={"model": model})


_OF_USE = {*PolicySettings.model_fields, "top_k", "beam", "budget", "device"}


class FeaturesSettings(PickerSettings):
    """Named numbers of each candidate, into a linear layer and a small network."""

    kind: Annotated[Literal["features"], Free()] = "features"
    features: Annotated[
        str, RecipePath("file of a feature function", "write FILE.py:function", member=True, only=".py")
    ] = Field("mentions", description="mentions, or your own: module:function, FILE.py:function")


class EncoderSettings(PickerSettings):
    """The inner product of two embeddings, the state's and the candidate's (Q-RAG, arXiv 2511.07328)."""

    kind: Annotated[Literal["encoder"], Free()] = "encoder"
    positions: Literal["none", "absolute", "relative"] = Field(
        "none", description="of candidates: turn their embeddings by their places, or relative to what was picked"
    )
    order: Literal["document", "pick"] = Field("document", description="of what was picked, in the text of a state")
    query_prefix: str = Field("", description='put before a state: "query: " for E5')
    document_prefix: str = Field("", description='put before a candidate: "passage: " for E5')
    max_length: PositiveInt | None = Field(None, description="tokens of a text; None takes the model's")
    hidden_size: int = Field(64, multiple_of=4, gt=0, description="from nothing: dimensions of an embedding")
    num_hidden_layers: PositiveInt = Field(1, description="from nothing")
    vocab_size: PositiveInt = Field(8192, description="from nothing: words")
    device: Annotated[str, Free()] = "auto"
