"""DSPy language models that run policies. The LM's name selects the weights.

DSPy's optimizers set new weights by changing the name: ``lm.copy(model=new)``, or ``lm.model =
new``. An LM's engine therefore looks up the policy by the name in each request:
``leret/DIRECTORY``, or ``leret/demo``.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import dspy

from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings, PolicySettings
from leret.core.aio import submit
from leret.core.dspy_internals import CLIENT_KEYS, AsyncEngine, lm15, messages_of, text_response
from leret.core.errors import ConfigError, LeretError, PolicyError
from leret.core.types import SharedInstance, digest
from leret.http.endpoints import ApiKey
from leret.policies.base import Completion, Policy, PromptTooLongError, Request
from leret.policies.load import SERVED, close_shared, policy_state, shared_policy
from leret.policies.local.policy import LocalPolicy
from leret.policies.tool_calls import ToolReader, read_calls


def policy_lm(policy: Policy | PolicySettings, *, tools: bool = False, **kwargs: Any) -> dspy.LM:
    """Return a DSPy language model that runs a policy.

    DSPy's response cache is off by default, because its keys have the model's name but not a digest
    of its weights.

    Args:
        policy: a loaded policy, or settings. Equal settings share one policy per process.
        tools: whether the program uses native tool calls. DSPy sends no tools to a model that it
            does not know.
        kwargs: arguments of ``dspy.LM``; ``temperature`` and ``max_tokens`` override the settings.

    Returns:
        A plain ``dspy.LM`` for settings of kind openai with one URL and no tools; otherwise a
        `PolicyLM`.

    Raises:
        PolicyError: the model cannot be loaded.
    """
    settings = policy if isinstance(policy, PolicySettings) else LocalPolicySettings()
    asked: dict[str, Any] = {
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        "cache": False,
    }
    asked |= kwargs
    if settings.top_p < 1:
        asked.setdefault("top_p", settings.top_p)
    if isinstance(policy, OpenAIPolicySettings) and len(policy.urls) == 1 and not tools:
        return _served_lm(policy, asked)
    engine = _engine(policy)
    engine.policy(engine.model)
    return PolicyLM(engine.model, **{**engine.arguments(), **asked})


def _engine(policy: Policy | PolicySettings) -> PolicyEngine:
    if isinstance(policy, LocalPolicySettings):
        return PolicyEngine(settings=policy)
    if isinstance(policy, PolicySettings):
        policy = shared_policy(policy)
    return PolicyEngine(policy)


def policy_of(lm: dspy.BaseLM) -> Policy:
    """Return the policy that a leret LM runs.

    It stays open until `N_OPEN` other models have been used.
    """
    engine = getattr(lm, "engine", None)
    if not isinstance(engine, PolicyEngine):
        raise PolicyError(
            f"{lm.model} ({type(lm).__name__}) does not run a leret policy; create the LM with "
            "leret.LM(DIRECTORY), or with leret.policies.dspy_lm.policy_lm(SETTINGS) for a server"
        )
    return engine.policy(lm.model)


def _served_lm(settings: OpenAIPolicySettings, asked: dict[str, Any]) -> dspy.LM:
    key = ApiKey.from_env(settings.api_key_env, "policy.api_key_env")
    arguments = {
        "api_base": settings.urls[0],
        "api_key": key.reveal() or "none",
        "engine": "litellm",  # sends n in one request; DSPy's engine sends n with one seed
        "num_retries": 5,
        "timeout": settings.timeout_s,
    }
    thinking = settings.model_copy(update={"logprobs": False}).request_keys()
    body = settings.merged_body(thinking)
    if body:
        arguments["extra_body"] = body
    return dspy.LM(f"openai/{settings.model}", **{**arguments, **asked})


@dataclass
class _Call:
    """Arguments of an LM call that DSPy does not pass to engines, and completions to return."""

    n: int = 1
    rollout_id: Any = None
    ready: list[Completion] = field(default_factory=list)


_call: ContextVar[_Call | None] = ContextVar("leret_lm_call", default=None)


class PolicyLM(dspy.LM):
    """A ``dspy.LM`` that decodes the ``n`` completions of a call in one batch, with ``n`` seeds.

    DSPy requests one completion at a time from an engine, without ``n`` and ``rollout_id``. This
    class adds both.
    """

    def copy(self, **kwargs: Any) -> Any:
        refuse_client_keys(kwargs)
        return super().copy(**kwargs)

    def __call__(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        with self._calling(kwargs):
            return super().__call__(prompt, messages=messages, **kwargs)

    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        with self._calling(kwargs):
            return await super().acall(prompt, messages=messages, **kwargs)

    @contextmanager
    def _calling(self, kwargs: dict[str, Any]) -> Iterator[None]:
        refuse_client_keys(kwargs)
        asked = {**self.kwargs, **kwargs}
        token = _call.set(_Call(asked.get("n") or 1, asked.get("rollout_id")))
        try:
            yield
        finally:
            _call.reset(token)


def refuse_client_keys(kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError if arguments configure a connection, which belongs to the LM's policy."""
    keys = sorted(key for key, value in kwargs.items() if key in CLIENT_KEYS and value is not None)
    if keys:
        raise ConfigError(
            f"{', '.join(keys)}: cannot be changed or used here; create an LM with the connection: "
            "leret.LM(MODEL, api_base=URL), with api_key_env, api_key or timeout if needed"
        )


class PolicyEngine(SharedInstance):
    """DSPy engine that looks up policies by name, and batches requests from many threads.

    Requests with the name `model` go to ``policy``; any other name is a model directory, loaded
    with the device, dtype and enable_thinking of ``settings``. Repeated calls at a temperature
    above 0 give different completions: the engine counts identical calls and derives the seed from
    the count. A ``seed`` or a ``rollout_id`` makes calls repeatable.
    """

    supported_params = frozenset({"temperature", "max_tokens", "top_p", "stop", "seed", "n"})
    supports_function_calling = True

    def __init__(
        self, policy: Policy | None = None, settings: LocalPolicySettings | None = None
    ) -> None:
        loaded = getattr(policy, "settings", None)
        local = loaded if isinstance(loaded, LocalPolicySettings) else None
        self.settings = settings or local or LocalPolicySettings()
        self.model = f"leret/{policy.name if policy and not local else self.settings.model}"
        self._policy = policy
        self._n_equal: Counter[str] = Counter()
        self._waiting: weakref.WeakSet[Future[list[Completion]]] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def arguments(self) -> dict[str, Any]:
        """Return arguments for ``dspy.LM``. Retries by DSPy are off, because the policy retries."""
        return {"engine": self, "async_engine": AsyncPolicyEngine(self), "num_retries": 0}

    def policy(self, model: str) -> Policy:
        """Return the policy with this model name; raise PolicyError if it cannot be loaded."""
        if self._policy is not None and model == self.model:
            return self._policy
        name = model.removeprefix("leret/")
        return SERVED.get(name) or shared_policy(self.settings.model_copy(update={"model": name}))

    def settings_of(self, model: str) -> PolicySettings | None:
        """Return the settings of the policy with this model name; None if the policy has none."""
        if self._policy is not None and model == self.model:
            settings: PolicySettings | None = getattr(self._policy, "settings", None)
            return settings
        return self.settings.model_copy(update={"model": model.removeprefix("leret/")})

    def has_secret_key(self, model: str) -> bool:
        """Return True if requests for this model send an API key from outside the environment."""
        client = getattr(self.policy(model), "client", None)
        settings = self.settings_of(model)
        return (
            client is not None
            and client.key.reveal() is not None
            and not getattr(settings, "api_key_env", None)
        )

    def reader(self, model: str) -> ToolReader:
        """Return the reader of native tool calls for the policy with this model name."""
        policy = self.policy(model)
        return policy.model.encoder.read_calls if isinstance(policy, LocalPolicy) else read_calls

    def release(self, model: str) -> None:
        """Close the model with this name in this process; the next request loads it again."""
        close_shared(self.settings.model_copy(update={"model": model.removeprefix("leret/")}))

    def complete(self, request: lm15.Request) -> lm15.Response:
        """Return one completion; the first request of an LM call decodes all of its completions."""
        call = _call.get() or _Call()
        if not call.ready:
            with _dspy_errors():
                call.ready = list(
                    self._submit(request.model, self._request(request, call)).result()
                )
        return _response(request, call, self.reader(request.model) if request.tools else None)

    async def acomplete(self, request: lm15.Request) -> lm15.Response:
        call = _call.get() or _Call()
        if not call.ready:
            with _dspy_errors():
                future = self._submit(request.model, self._request(request, call))
                completions = await asyncio.wrap_future(future)
            call.ready = list(completions)
        return _response(request, call, self.reader(request.model) if request.tools else None)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        yield from lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Cancel waiting requests and close connections.

        A local policy stays open for its owner.
        """
        with self._lock:
            self._closed = True
            for future in list(self._waiting):
                future.cancel()
        if self._policy is not None and not hasattr(self._policy, "submit"):
            submit(self._policy.aclose()).result()

    def dump_state(self) -> dict[str, Any]:
        """Return the policy's name and settings, without weights and keys."""
        return policy_state(self._policy or self)

    @classmethod
    def load_state(cls, state: dict[str, Any]) -> PolicyEngine:
        """Return an engine from its state; the first request loads a local model."""
        return _engine(PolicySettings.model_validate(state))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).load_state, (self.dump_state(),)

    def _submit(self, model: str, request: Request) -> Future[list[Completion]]:
        policy = self.policy(model)
        if isinstance(policy, LocalPolicy):  # completes requests in a worker thread
            try:
                return policy.submit(request)
            except PolicyError:
                if not policy.closed or policy is self._policy:
                    raise
                # it was closed because other models were opened
                return self._submit(model, request)
        with self._lock:
            if self._closed:
                raise PolicyError("the LM's engine is closed; create a new LM with policy_lm")
            future = submit(policy.complete(request))
            self._waiting.add(future)
        return future

    def _request(self, request: lm15.Request, call: _Call) -> Request:
        config = request.config
        extensions = dict(config.extensions or {})
        seed = extensions.pop("seed", config.seed)
        _refuse_unsupported(request, extensions)
        temperature = 1.0 if config.temperature is None else config.temperature
        settings = (temperature, config.top_p or 1.0, config.max_tokens or 64, config.stop)
        messages = messages_of(request)
        key = digest(messages, settings, seed, str(call.rollout_id))
        if temperature and seed is None and call.rollout_id is None:
            with self._lock:
                self._n_equal[key] += 1
                key = digest(key, self._n_equal[key])
        seeds = tuple(int(digest(key, index)[:16], 16) >> 1 for index in range(call.n))
        return Request(messages, seeds, temperature, settings[2], settings[1], config.stop)


class AsyncPolicyEngine(AsyncEngine):
    """Async interface of a `PolicyEngine`; ``dspy.LM`` saves and loads its state."""

    def dump_state(self) -> Any:
        return self.engine.dump_state()

    @classmethod
    def load_state(cls, state: dict[str, Any]) -> AsyncPolicyEngine:
        return cls(PolicyEngine.load_state(state))


def _response(request: lm15.Request, call: _Call, read: ToolReader | None) -> lm15.Response:
    completion = call.ready.pop(0)
    return text_response(
        request,
        completion.text,
        completion.n_prompt_tokens,
        completion.n_completion_tokens,
        completion.finish_reason,
        read,
    )


def _refuse_unsupported(request: lm15.Request, extensions: dict[str, Any]) -> None:
    config = request.config
    names = ("response_format", "top_k", "frequency_penalty", "presence_penalty", "reasoning")
    asked = (
        {name: getattr(config, name) for name in names}
        | {"logprobs": config.logprobs is not None}
        | extensions
    )
    refused = sorted(name for name, value in asked.items() if value)
    if refused:
        raise lm15.UnsupportedFeatureError(
            f"leret policies do not support {', '.join(refused)}; omit the setting, or serve the "
            "model and use dspy.LM",
            feature=refused[0],
        )


@contextmanager
def _dspy_errors() -> Iterator[None]:
    try:
        yield
    except PromptTooLongError as error:
        raise lm15.ContextLengthError(str(error)) from error
    except (LeretError, CancelledError) as error:
        raise lm15.ProviderError(
            str(error) or "the LM's engine was closed during a request"
        ) from error
