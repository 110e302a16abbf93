"""The `policy` section: one settings class per kind of policy."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, PositiveInt, field_validator

from leret.config.base import (
    BaseUrls,
    Free,
    KeyVariable,
    KindName,
    KindSettings,
    RecipePath,
    default_variable,
)
from leret.core.bundled import MINILM, POLICIES
from leret.core.types import digest

TOGETHER_URL = "https://api.together.ai/v1"

T = TypeVar("T")

Thinking = Annotated[
    bool | None, Field(description="enable_thinking in the chat template; None: the default")
]


class PolicySettings(KindSettings):
    """Keys shared by all kinds of policies."""

    default_kind = "local"
    shelf: ClassVar[Mapping[str, str]] = {"tinker": "leret.extras.tinker:POLICY"}
    repeatable: ClassVar[bool] = True  # whether a seed gives the same completion at any time

    kind: Annotated[KindName, Free()]
    model: Annotated[str, Free()]
    temperature: float = Field(
        1.0, ge=0, description="sampling temperature; `leret eval` has its own, 0 by default"
    )
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: PositiveInt = Field(64, description="maximum number of completion tokens")
    price_prompt: Annotated[float, Free()] = Field(
        0.0, ge=0, description="price per million prompt tokens"
    )
    price_completion: Annotated[float, Free()] = Field(
        0.0, ge=0, description="price per million completion tokens"
    )

    def in_process(self, model: str) -> PolicySettings:
        """Return settings that load a model directory in this process and keep the sampling keys."""
        keys = set(LocalPolicySettings.model_fields) - {
            "kind",
            "model",
            "price_prompt",
            "price_completion",
        }
        shared = {name: getattr(self, name) for name in keys & set(type(self).model_fields)}
        return LocalPolicySettings(model=model, **shared)


def by_predictor(
    first: T, others: Mapping[str, T], new: T, predictors: Collection[str] | None
) -> dict[str, T]:
    """Return values by predictor: ``others``, then ``new`` for ``predictors``; the default (key ``""``) is ``first``.

    If ``predictors`` is empty, ``new`` replaces ``first``. If ``others`` is empty, the result is only ``{"": new}``.
    """
    if not others:
        return {"": new}
    return {"": first, **others, **dict.fromkeys(predictors or [""], new)}


class LocalPolicySettings(PolicySettings):
    """A model that runs in this process."""

    kind: Annotated[Literal["local"], Free()] = "local"
    model: Annotated[
        str,
        Free(),
        RecipePath(
            "model directory", "download the model there, or fix the path", hub=True, names=POLICIES
        ),
    ] = Field(
        "demo",
        description="model directory, hub name, shipped model (`demo`, `agent`, `leret-english-6m`) or `smollm2`",
    )
    enable_thinking: Thinking = None
    template: Literal["plain"] | None = Field(
        None,
        description="plain: join messages with newlines, for base models without a chat template (GPT-2)",
    )
    device: Annotated[str, Free()] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Free()] = "auto"


def _names_a_variable(value: str) -> str:
    # The message omits the value, which may be the key.
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
        raise ValueError(
            "must be the name of an environment variable, as in TOGETHER_API_KEY, not the key"
        )
    return value


VariableName = Annotated[str, AfterValidator(_names_a_variable)]


_OWN_KEYS = frozenset(
    {
        "model",
        "messages",
        "temperature",
        "top_p",
        "max_tokens",
        "seed",
        "n",
        "stop",
        "stream",
        "tools",
        "logprobs",
    }
)
GRAMMAR_KEYS = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
     "regex", "json_schema", "ebnf", "structural_tag", "grammar"}
)  # fmt: skip
"""Request keys of vLLM, SGLang, TGI and llama.cpp that exclude tokens, so that a server samples from fewer tokens."""


class RequestBody(dict[str, Any]):
    """Extra request keys. They are hashable, because policies are looked up by their settings."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(digest(self))


def _request_body(value: dict[str, Any]) -> RequestBody:
    reserved = sorted(_OWN_KEYS & set(value))
    if reserved:
        raise ValueError(
            f"leret sets {', '.join(reserved)} itself; remove it (policy and program have keys for most)"
        )
    return RequestBody(value)


class ServedPolicySettings(PolicySettings):
    """Keys shared by all policies on servers with a chat completions API."""

    repeatable = False

    model: Annotated[str, Free()] = Field(description="name of the served model")
    urls: Annotated[BaseUrls, Free()] = Field(
        min_length=1, description="base URLs, which share the load"
    )
    api_key_env: Annotated[VariableName | None, Free(), KeyVariable("urls")] = Field(
        None, description="environment variable with the API key"
    )
    timeout_s: Annotated[float, Free()] = Field(300.0, gt=0, description="timeout per attempt")
    retry_for_s: Annotated[float, Free()] = Field(
        300.0, ge=0, description="how long to retry; 0: no retry"
    )
    concurrency: Annotated[PositiveInt, Free()] = Field(
        32, description="maximum number of requests in flight"
    )
    extra_body: Annotated[dict[str, Any], AfterValidator(_request_body)] = Field(
        default_factory=RequestBody,
        description="request keys to add, as in {response_format: {type: json_object}}",
    )

    @property
    def grammar(self) -> list[str]:
        """Keys of ``extra_body`` that exclude tokens."""
        return sorted(GRAMMAR_KEYS & set(self.extra_body))

    def merged_body(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Return ``extra_body`` with ``keys``; both may hold keys of the chat template."""
        name = "chat_template_kwargs"
        template = {**self.extra_body.get(name, {}), **keys.get(name, {})}
        return {**self.extra_body, **keys, **({name: template} if template else {})}

    id_keys: ClassVar[dict[str, bool]] = {}  # request keys for token ids without log-probabilities


class OpenAIPolicySettings(ServedPolicySettings):
    """Servers with OpenAI's chat completions API."""

    # a vLLM extension that other servers may reject
    id_keys: ClassVar[dict[str, bool]] = {"return_token_ids": True}

    kind: Annotated[Literal["openai"], Free()] = "openai"
    urls: Annotated[BaseUrls, Free()] = Field(
        min_length=1, description="base URLs, as in http://127.0.0.1:8000/v1"
    )
    enable_thinking: Thinking = None
    logprobs: Annotated[bool, Free()] = Field(
        False, description="ask for log-probabilities and token ids"
    )

    def request_keys(self) -> dict[str, Any]:
        """Return optional request keys."""
        keys: dict[str, Any] = {"logprobs": True, **self.id_keys} if self.logprobs else {}
        if self.enable_thinking is not None:
            keys["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        return keys


class TgiPolicySettings(ServedPolicySettings):
    """text-generation-inference, through its OpenAI-compatible API."""

    removed: ClassVar[Mapping[str, Any]] = {"tokenizer": "", "best_of": False}

    kind: Annotated[Literal["tgi"], Free()] = "tgi"
    urls: Annotated[BaseUrls, Free()] = Field(
        min_length=1, description="base URLs, as in http://127.0.0.1:3000"
    )
    enable_thinking: Thinking = None

    @field_validator("urls", mode="after")
    @classmethod
    def _of_the_api(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        roots = [url.rstrip("/").removesuffix("/generate").removesuffix("/v1") for url in urls]
        return tuple(f"{root}/v1" for root in roots)

    def request_keys(self) -> dict[str, Any]:
        """Return optional request keys. TGI's chat template ignores ``enable_thinking``."""
        keys: dict[str, Any] = {"logprobs": True}
        if self.enable_thinking is not None:
            keys["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        return keys


class TogetherPolicySettings(ServedPolicySettings):
    """Together AI, through its OpenAI-compatible API."""

    kind: Annotated[Literal["together"], Free()] = "together"
    urls: Annotated[BaseUrls, Free()] = (TOGETHER_URL,)
    api_key_env: Annotated[VariableName | None, Free(), KeyVariable("urls")] = Field(
        default_factory=lambda data: default_variable(
            "TOGETHER_API_KEY", data.get("urls", ()), TOGETHER_URL
        ),
        description="environment variable with the API key; TOGETHER_API_KEY for Together's URL",
    )
    logprobs: Annotated[bool, Free()] = Field(
        False, description="ask for log-probabilities and token ids"
    )

    def request_keys(self) -> dict[str, Any]:
        """Return optional request keys. Together's ``logprobs`` is the number of tokens, not a flag."""
        return {"logprobs": 1} if self.logprobs else {}


class PickerSettings(PolicySettings):
    """Keys shared by all pickers: policies that choose a candidate (`leret.Pick`) instead of writing text."""

    model: Annotated[
        str,
        Free(),
        RecipePath(
            "picker directory",
            "train the picker first, or fix the path",
            hub=True,
            names=("scratch", MINILM),
        ),
    ] = Field("scratch", description="directory written by `leret train`; scratch: new weights")
    top_k: PositiveInt | None = Field(
        None, description="sample only from the k best candidates; None: from all"
    )
    beam: PositiveInt = Field(1, description="beam width at temperature 0; 1 is greedy")
    budget: PositiveInt = Field(2, description="picks per episode that beam search plans")
    hidden_size: int = Field(32, multiple_of=4, gt=0)
    seed: int = Field(0, description="seed for the initial weights")

    def architecture(self) -> dict[str, Any]:
        return self.model_dump(mode="json", include=set(type(self).model_fields) - _OF_USE)

    def in_process(self, model: str) -> PolicySettings:
        return self.model_copy(update={"model": model})


_OF_USE = {*PolicySettings.model_fields, "top_k", "beam", "budget", "device"}


class FeaturesSettings(PickerSettings):
    """A linear layer plus a small network on numeric features of each candidate."""

    kind: Annotated[Literal["features"], Free()] = "features"
    features: Annotated[
        str,
        RecipePath(
            "file of the feature function", "name it as FILE.py:function", member=True, only=".py"
        ),
    ] = Field(
        "mentions", description="mentions, or a function (module:function or FILE.py:function)"
    )


class EncoderSettings(PickerSettings):
    """The similarity of a state embedding and a candidate embedding (Q-RAG, arXiv 2511.07328)."""

    kind: Annotated[Literal["encoder"], Free()] = "encoder"
    similarity: Literal["dot", "cosine"] = Field(
        "dot",
        description="dot: inner product divided by the square root of the dimension; cosine suits reranking",
    )
    score_weight: float = Field(
        0.0,
        ge=0,
        description="weight of the retriever's scores, which are standardised within each choice",
    )
    positions: Literal["none", "absolute", "relative"] = Field(
        "none",
        description="rotate candidate embeddings by position in the document, or relative to earlier picks",
    )
    order: Literal["document", "pick"] = Field(
        "document", description="order of earlier picks in a state's text"
    )
    query_prefix: str = Field("", description='prefix of states (E5: "query: ")')
    document_prefix: str = Field("", description='prefix of candidates (E5: "passage: ")')
    max_length: PositiveInt | None = Field(
        None, description="maximum tokens per text; None: the model's limit"
    )
    hidden_size: int = Field(
        64, multiple_of=4, gt=0, description="embedding dimensions, for new weights"
    )
    num_hidden_layers: PositiveInt = Field(1, description="for new weights")
    vocab_size: PositiveInt = Field(8192, description="vocabulary size, for new weights")
    device: Annotated[str, Free()] = "auto"
