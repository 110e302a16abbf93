"""What DSPy's engines are asked, in leret's words, and leret's failures in DSPy's."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import dspy
from dspy import lm15

from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings, PolicySettings, policy_settings
from leret.core.aio import submit
from leret.core.errors import LeretError, PolicyError
from leret.core.types import digest
from leret.http.answers import ApiKey
from leret.policies.base import Completion, Messages, Policy, PromptTooLongError, Request
from leret.policies.load import policy_state, shared_policy
from leret.policies.local.policy import LocalPolicy


def messages_of(request: lm15.Request) -> Messages:
    """Text messages in order; the system's first.

    Raises:
        dspy.lm15.UnsupportedFeatureError: there is more than text in them.
    """
    messages: list[dict[str, str]] = []
    if request.system is not None:
        parts = request.system
        text = parts if isinstance(parts, str) else "".join(_text(part) for part in parts)
        messages.append({"role": "system", "content": text})
    for message in request.messages:
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": "".join(_text(part) for part in message.parts)})
    return tuple(messages)


def _text(part: Any) -> str:
    if not isinstance(part, lm15.TextPart):
        raise lm15.UnsupportedFeatureError(
            f"a leret policy reads text alone, and the prompt holds a {type(part).__name__}", feature="messages"
        )
    return cast(str, part.text)


def refuse_unsupported(request: lm15.Request, extensions: dict[str, Any]) -> None:
    """Say what a policy cannot do instead of leaving it out.

    Raises:
        dspy.lm15.UnsupportedFeatureError: it is asked for.
    """
    config = request.config
    asked = {
        "tools": request.tools,
        "response_format": config.response_format,
        "top_k": config.top_k,
        "frequency_penalty": config.frequency_penalty,
        "presence_penalty": config.presence_penalty,
        "logprobs": config.logprobs is not None,
        "reasoning": config.reasoning,
        **extensions,
    }
    refused = sorted(name for name, value in asked.items() if value)
    if refused:
        raise lm15.UnsupportedFeatureError(
            f"a leret policy does not take {', '.join(refused)}; leave it out, or serve the model and use dspy.LM",
            feature=refused[0],
        )


@contextmanager
def as_lm15() -> Iterator[None]:
    """A policy's failures in the words that DSPy's retries and callers understand."""
    try:
        yield
    except PromptTooLongError as error:
        raise lm15.ContextLengthError(str(error)) from error
    except (LeretError, CancelledError) as error:
        raise lm15.ProviderError(str(error) or "the policy's engine was closed while it was asked") from error


pass


def policy_lm(policy: Policy | PolicySettings, **kwargs: Any) -> dspy.LM:
    """A DSPy language model over a policy.

    DSPy's response cache is off unless ``cache=True`` is given: it knows a model by its name, not by its weights.

    Args:
        policy: a loaded policy, or settings. Equal settings share one policy in a process.
        kwargs: of ``dspy.LM``; ``temperature`` and ``max_tokens`` override the settings'.

    Returns:
        For settings of kind openai with one URL, a plain ``dspy.LM`` on that endpoint; else a `PolicyLM`.

    Raises:
        PolicyError: the model cannot be loaded.
    """
    settings = policy if isinstance(policy, PolicySettings) else LocalPolicySettings()
    asked = {"temperature": settings.temperature, "max_tokens": settings.max_tokens, "cache": False, **kwargs}
    if settings.top_p < 1:
        asked.setdefault("top_p", settings.top_p)
    if isinstance(policy, PolicySettings):
        if isinstance(policy, OpenAIPolicySettings) and len(policy.urls) == 1:
            return _served_lm(policy, asked)
        policy = shared_policy(policy)
    engine = PolicyEngine(policy)
    # The policy retries by itself; DSPy on top of it would multiply the attempts.
    return PolicyLM(
        f"leret/{policy.name}", engine=engine, async_engine=AsyncPolicyEngine(engine), **{"num_retries": 0, **asked}
    )


def _served_lm(settings: OpenAIPolicySettings, asked: dict[str, Any]) -> dspy.LM:
    if settings.enable_thinking is not None:
        asked = {"extra_body": {"chat_template_kwargs": {"enable_thinking": settings.enable_thinking}}, **asked}
    # litellm sends n in one request; DSPy's own engine sends n requests with one seed.
    return dspy.LM(
        f"openai/{settings.model}",
        **{
            "api_base": settings.urls[0],
            "api_key": ApiKey.from_env(settings.api_key_env, "policy.api_key_env").reveal() or "none",
            "engine": "litellm",
            "num_retries": 5,
            "timeout": settings.timeout_s,
            **asked,
        },
    )


@dataclass
class _Call:
    """What a call of the LM asked for that DSPy does not pass on to an engine."""

    n: int
    rollout_id: Any
    ready: list[Completion] = field(default_factory=list)


_call: ContextVar[_Call | None] = ContextVar("leret_lm_call", default=None)


@contextmanager
def _calling(lm: dspy.LM, kwargs: dict[str, Any]) -> Iterator[None]:
    asked = {**lm.kwargs, **kwargs}
    token = _call.set(_Call(asked.get("n") or 1, asked.get("rollout_id")))
    try:
        yield
    finally:
        _call.reset(token)


class PolicyLM(dspy.LM):
    """A ``dspy.LM`` that decodes the ``n`` candidates of a call together, each with a seed of its own.

    DSPy asks an engine for one candidate at a time and keeps ``n`` and ``rollout_id`` to itself; this class tells them
    to the engine, and changes nothing else.
    """

    def __call__(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        """Complete a prompt, as ``dspy.LM`` does."""
        with _calling(self, kwargs):
            return super().__call__(prompt, messages=messages, **kwargs)

    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        """Complete a prompt, as ``dspy.LM`` does."""
        with _calling(self, kwargs):
            return await super().acall(prompt, messages=messages, **kwargs)


class PolicyEngine:
    """DSPy's engine protocol over a policy; safe from many threads, whose requests are batched.

    Without a seed, calls are counted, so that two equal calls at a temperature above 0 are two draws. A ``seed`` or a
    ``rollout_id`` makes the draw repeatable instead.
    """

    supported_params = frozenset({"temperature", "max_tokens", "top_p", "stop", "seed", "n"})

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._counter = itertools.count()
        self._waiting: weakref.WeakSet[Future[list[Completion]]] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def __deepcopy__(self, memo: dict[int, object]) -> PolicyEngine:
        # Optimizers copy programs with their LM; the model is one.
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        """Complete one candidate; the first of a call decodes all of the call's."""
        call = _call.get()
        if call is None or not call.ready:
            with as_lm15():
                completions = self.submit(self.request(request, call)).result()
            return self._answer(request, call, completions)
        return self._answer(request, call, [])

    async def acomplete(self, request: lm15.Request) -> lm15.Response:
        """As ``complete``, without blocking the event loop."""
        call = _call.get()
        if call is None or not call.ready:
            with as_lm15():
                completions = await asyncio.wrap_future(self.submit(self.request(request, call)))
            return self._answer(request, call, completions)
        return self._answer(request, call, [])

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        """The whole completion as a stream of one piece."""
        yield from lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """End the requests that wait, which fail, and their connections; the policy itself is borrowed."""
        with self._lock:
            self._closed = True
            for future in list(self._waiting):
                future.cancel()
        if not isinstance(self.policy, LocalPolicy):
            submit(self.policy.aclose()).result()

    def dump_state(self) -> dict[str, Any]:
        """The policy by its name and settings; no weights and no keys."""
        return policy_state(self.policy)

    @classmethod
    def load_state(cls, state: dict[str, Any]) -> PolicyEngine:
        """Load the policy that ``dump_state`` named.

        Raises:
            PolicyError: it is gone.
        """
        return cls(shared_policy(policy_settings(state)))

    def submit(self, request: Request) -> Future[list[Completion]]:
        """Hand a request to the policy, from any thread."""
        if isinstance(self.policy, LocalPolicy):
            return self.policy.submit(request)
        with self._lock:
            if self._closed:
                raise PolicyError("the policy's engine is closed; make another one with policy_lm")
            future = submit(self.policy.complete(request))
            self._waiting.add(future)
        return future

    def request(self, request: lm15.Request, call: _Call | None) -> Request:
        """DSPy's request in leret's words.

        Raises:
            dspy.lm15.UnsupportedFeatureError: it asks for what a policy cannot do.
        """
        config = request.config
        extensions = dict(config.extensions or {})
        seed = extensions.pop("seed", config.seed)
        refuse_unsupported(request, extensions)
        temperature = 1.0 if config.temperature is None else config.temperature
        settings = (temperature, config.top_p or 1.0, config.max_tokens or 64, config.stop)
        messages = messages_of(request)
        rollout = call.rollout_id if call else None
        given = seed is not None or rollout is not None
        key = digest(messages, settings, seed, str(rollout), None if given else next(self._counter))
        n = call.n if call else 1
        seeds = tuple(int(digest(key, index)[:16], 16) >> 1 for index in range(n))
        return Request(messages, seeds, temperature, settings[2], settings[1], config.stop)

    def _answer(self, request: lm15.Request, call: _Call | None, completions: list[Completion]) -> lm15.Response:
        waiting = completions if call is None else call.ready
        if call is not None:
            call.ready += completions
        completion = waiting.pop(0)
        return lm15.Response(
            id=None,
            model=request.model,
            message=lm15.Message.assistant([lm15.TextPart(completion.text)]),
            finish_reason="length" if completion.finish_reason == "length" else "stop",
            usage=lm15.Usage(input_tokens=completion.n_prompt_tokens, output_tokens=completion.n_completion_tokens),
        )


class AsyncPolicyEngine:
    """The async counterpart of a `PolicyEngine`, on the same policy."""

    def __init__(self, engine: PolicyEngine) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, object]) -> AsyncPolicyEngine:
        return self

    async def complete(self, request: lm15.Request) -> lm15.Response:
        """Complete one candidate."""
        return await self.engine.acomplete(request)

    async def stream(self, request: lm15.Request) -> Any:
        """The whole completion as a stream of one piece."""
        for event in lm15.response_to_events(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        """Nothing: the policy is borrowed."""

    def dump_state(self) -> dict[str, Any]:
        """As the engine's."""
        return self.engine.dump_state()

    @classmethod
    def load_state(cls, state: dict[str, Any]) -> AsyncPolicyEngine:
        """As the engine's."""
        return cls(PolicyEngine.load_state(state))
