"""`policy.kind: tinker`: a policy on a server of the Tinker API.

leret renders prompts and decodes text, and the server samples. `leret.extras.tinker_training`
trains such policies.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from pydantic import Field

from leret.config.base import BaseUrl, Free, KeyVariable, RecipePath, default_variable
from leret.config.policy import PolicySettings, Thinking, VariableName
from leret.core.aio import submit
from leret.core.errors import PolicyError, import_optional, reason
from leret.core.types import SharedInstance, digest
from leret.http.endpoints import ApiKey
from leret.policies.base import Completion, Messages, Request
from leret.policies.checkpoints import load_tokenizer, model_digest, read_model_json
from leret.policies.load import PolicyKind
from leret.policies.local.chat_template import PromptEncoder
from leret.policies.local.model import stop_ids

TINKER_RECORD = "tinker.json"
"""Name of the file with a policy's base model and the paths of its weights on the server."""

TINKER_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"

_HEALTH_S = 8.0  # timeout of the first request, because the client retries for minutes
_SEED_BITS = 2**31 - 1

_NO_KEY = "eyJhbGciOiJub25lIn0.eyJleHAiOjQyOTQ5NjcyOTZ9.none"
"""Sent if there is no key.

The client takes it for a token, so it reads neither TINKER_API_KEY nor a stored login.
"""

_opening = threading.RLock()


def _tinker_url() -> str:
    return os.environ.get("TINKER_BASE_URL") or TINKER_URL


class TinkerPolicySettings(PolicySettings):
    """A server of the Tinker API, which samples and trains token ids."""

    repeatable = False

    kind: Annotated[Literal["tinker"], Free()] = "tinker"
    model: Annotated[
        str,
        Free(),
        RecipePath("policy directory", "name the server's base model as owner/name", hub=True),
    ] = Field(description="base model on the server, or a directory that `leret train` wrote")
    url: Annotated[BaseUrl, Free()] = Field(
        default_factory=_tinker_url,
        description="base URL; default: $TINKER_BASE_URL, or the service of Thinking Machines",
    )
    api_key_env: Annotated[VariableName | None, Free(), KeyVariable("url")] = Field(
        default_factory=lambda data: default_variable(
            "TINKER_API_KEY", data.get("url", ()), TINKER_URL, _tinker_url().rstrip("/")
        ),
        description="environment variable with the API key; TINKER_API_KEY for the default URL",
    )
    timeout_s: Annotated[float, Free()] = Field(
        1800.0, gt=0, description="maximum wait for a result"
    )
    tokenizer: Annotated[str | None, RecipePath("tokenizer directory", hub=True)] = Field(
        None, description="tokenizer directory or name on the hub; None: the model's name"
    )
    template: Literal["plain"] | None = Field(
        None, description="plain: for base models without a chat template"
    )
    enable_thinking: Thinking = None

    def in_process(self, model: str) -> PolicySettings:
        return self.model_copy(update={"model": model})


class TinkerServer:
    """A session with a server; ``context`` maps each model on the server to its maximum length."""

    def __init__(self, url: str, api_key_env: str | None, timeout_s: float) -> None:
        tinker = import_optional("tinker", "tinker", "tinker")
        self.url = url
        self.timeout_s = timeout_s
        self.types = tinker.types
        self._faults = (tinker.TinkerError, ValueError, RuntimeError, TimeoutError, AssertionError)
        self._key = ApiKey.from_env(api_key_env, "policy.api_key_env")
        try:
            httpx.get(f"{url}/api/v1/healthz", timeout=_HEALTH_S).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PolicyError(
                f"policy.url: {url} does not answer ({reason(error)}); start it or fix url"
            ) from error
        connection = {"base_url": url, "api_key": self._key.reveal() or _NO_KEY}
        capabilities = self.call(lambda: tinker.RestClient(**connection).get_server_capabilities())
        models = capabilities.supported_models
        self.context = {model.model_name: model.max_context_length for model in models}
        self.service = tinker.ServiceClient(**connection)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert errors of the client to `PolicyError`, without the API key."""
        try:
            yield
        except self._faults as error:
            fault = reason(error)
            if isinstance(error, TimeoutError):
                fault = f"no result in {self.timeout_s:g} s"
            status = getattr(error, "status_code", 0)
            if status == 401 and self._key.reveal() is None:
                fault += "; name the variable with the key for this server in policy.api_key_env"
            failure = PolicyError(f"{self.url}: {self._key.redact(fault)}")
            if not 400 <= status < 500:
                failure = failure.failed()
            raise failure from error

    def call(self, ask: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a method of the client and wait for the result of its future."""
        with self.errors():
            return ask(*arguments, **named).result(self.timeout_s)

    async def answer(self, future: Any) -> Any:
        """Return the result of a future, in an event loop."""
        with self.errors():
            return await asyncio.wait_for(asyncio.wrap_future(future.future()), self.timeout_s)


_connect = cache(TinkerServer)


def tinker_digest(settings: TinkerPolicySettings) -> str:
    """Return the digest of the model's name or the trained policy's record, and the tokenizer."""
    trained = Path(settings.model)
    if (trained / TINKER_RECORD).is_file():
        return model_digest(trained)
    tokenizer = Path(settings.tokenizer or settings.model)
    files = model_digest(tokenizer) if tokenizer.is_dir() else str(tokenizer)
    return digest("tinker", settings.model, files)


class TinkerPolicy(SharedInstance):
    """Samples token ids and log-probabilities on a server.

    A policy in training has the methods of `LocalPolicy`.

    ``weights`` returns a sampling client for the current weights in training; `renew` calls it.
    """

    def __init__(
        self, settings: TinkerPolicySettings, weights: Callable[[], Any] | None = None
    ) -> None:
        self.settings = settings
        self.name = settings.model
        self.digest = tinker_digest(settings)
        self._weights = weights
        self._sampler: Any = None
        ApiKey.from_env(settings.api_key_env, "policy.api_key_env")

    def connect(self) -> TinkerServer:
        """Open the session with the server, which must have the model, and load the tokenizer."""
        settings = self.settings
        path = Path(settings.model)
        trained = (path / TINKER_RECORD).is_file()
        with _opening:
            self.server = server = _connect(settings.url, settings.api_key_env, settings.timeout_s)
            self.record: dict[str, Any] = {"base_model": settings.model}
            if trained:
                self.record = read_model_json(path / TINKER_RECORD)
            base = self.record["base_model"]
            if base not in server.context:
                available = ", ".join(server.context)
                fault = f"{server.url} has no model {base!r}"
                raise PolicyError(f"policy.model: {fault}; available: {available}")
            source = path if trained else Path(settings.tokenizer or base)
            self.tokenizer = load_tokenizer(source, settings.template)
            self.encoder = PromptEncoder(
                self.tokenizer, server.context[base], self.name, settings.enable_thinking
            )
            self.ends = self.encoder.set_ends(_end_ids(source))
        return server

    def initial_sampler(self) -> Any:
        """Return a sampling client for the base model, or for the trained policy's weights."""
        path = self.record.get("sampler_weights")
        what = {"model_path": path} if path else {"base_model": self.record["base_model"]}
        return self.server.call(self.server.service.create_sampling_client, **what)

    async def complete(self, request: Request) -> list[Completion]:
        sampler = self._sampler or await asyncio.to_thread(self._open)
        types = self.server.types
        prompt = self.encoder.encode(request.messages)
        n = len(request.seeds) if request.temperature > 0 else 1
        sampling = types.SamplingParams(
            max_tokens=min(request.max_tokens, prompt.room),
            seed=request.seeds[0] & _SEED_BITS,
            stop=self.ends,
            temperature=request.temperature,
            top_p=request.top_p,
        )
        ids = types.ModelInput.from_ints(list(prompt.token_ids))
        answer = await self.server.answer(sampler.sample(ids, n, sampling))
        n_prompt = len(prompt.token_ids)
        completions = []
        for sequence in answer.sequences:
            completions.append(self._completion(request, n_prompt, sequence))
        return completions * (len(request.seeds) // n)

    def renew(self, digest: str) -> None:
        """Sample from the current weights, with digest ``digest``, from now on."""
        assert self._weights is not None
        self._sampler = self._weights()
        self.digest = digest

    def prompt_ids(self, messages: Messages) -> tuple[int, ...]:
        return self.encoder.encode(messages).token_ids

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion] | BaseException]:
        async def each() -> list[list[Completion] | BaseException]:
            return await asyncio.gather(*map(self.complete, requests), return_exceptions=True)

        return submit(each()).result()

    def close(self) -> None:
        """Do nothing, because the session is shared."""

    async def aclose(self) -> None:
        """Do nothing, because the session is shared."""

    def _open(self) -> Any:
        with _opening:
            if self._sampler is None:
                self.connect()
                self._sampler = self.initial_sampler()
            return self._sampler

    def _completion(self, request: Request, n_prompt: int, sequence: Any) -> Completion:
        from leret.policies.local.decoder import Generated

        ids = tuple(sequence.tokens)
        logprobs = tuple(sequence.logprobs or ())
        if not ids or len(ids) != len(logprobs):
            raise PolicyError(
                f"{self.server.url} sent {len(ids)} token ids and {len(logprobs)} log-probabilities"
            )
        generated = Generated(ids, logprobs, sequence.stop_reason)
        return self.encoder.completion(
            n_prompt, generated, request.stop, bool(request.messages[0].get("tools"))
        )


def _end_ids(source: Path) -> Sequence[int]:
    """Return the end tokens in a model's generation settings."""
    from transformers import GenerationConfig

    try:
        return stop_ids(GenerationConfig.from_pretrained(source))
    except OSError:
        return ()


async def _probe(settings: TinkerPolicySettings) -> None:
    await asyncio.to_thread(TinkerPolicy(settings).connect)


POLICY = PolicyKind(TinkerPolicySettings, TinkerPolicy, tinker_digest, _probe)
