"""A policy by its recipe's words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.core.errors import ConfigError, PolicyError
from leret.core.types import digest

if TYPE_CHECKING:
    from leret.config.policy import PolicySettings
    from leret.policies.base import Policy


_DISPATCH = ("timeout_s", "deadline_s", "max_retries", "concurrency", "price_prompt", "price_completion")
_OF_REQUESTS = ("temperature", "top_p", "max_tokens")
_LIST_S, _TOKEN_S = 3.0, 8.0
"""Of a probe: for the list of models, and for a completion; connecting may take `CONNECT_SHARE` of it."""

_shared: dict[tuple[str, str], Policy] = {}
_shared_lock = threading.Lock()


def load_policy(
    kind: str,
    model: str | Path,
    *,
    urls: Sequence[str] = (),
    threads: int | None = None,
    max_batch_tokens: int | None = None,
    **settings: Any,
) -> Policy:
    """Load a model into this process, or connect to one that is served.

    Args:
        kind: ``local``, ``openai``, ``tgi`` or ``together``.
        model: directory, ``demo`` (the model shipped with leret) or hub repository; the served model's name.
        urls: of servers: base URLs.
        threads: of kind local: of torch in the worker; None chooses by the model's size.
        max_batch_tokens: of kind local: tokens of a batch; None chooses by device.
        settings: others of ``policy.*``, by the names of a recipe.

    Raises:
        ConfigError: ``kind`` or a setting is unknown, or they do not go together.
        MissingDependency: the kind needs a package that is not installed.
        PolicyError: the model cannot be loaded.
    """
    from pydantic import ValidationError

    from leret.config.policy import PolicySettings

    try:
        checked = PolicySettings.model_validate({"kind": kind, "model": str(model), "urls": tuple(urls), **settings})
    except ValidationError as error:
        raise ConfigError([_fault(detail) for detail in error.errors()]) from None
    if kind == "local":
        return _local(checked, threads, max_batch_tokens)
    return policy_of(checked)


def policy_of(settings: PolicySettings) -> Policy:
    """The policy that a recipe's settings name.

    Args:
        settings: of a recipe.

    Raises:
        MissingDependency: the kind needs a package that is not installed.
        PolicyError: the model cannot be loaded.
    """
    if settings.kind == "local":
        return _local(settings)
    dispatch: dict[str, Any] = {name: getattr(settings, name) for name in _DISPATCH}
    served: dict[str, Any] = {"api_key_env": settings.api_key_env, **dispatch}
    thinking: dict[str, Any] = {"enable_thinking": settings.enable_thinking}
    if settings.kind == "openai":
        from leret.policies.remote.openai import OpenAIPolicy

        return OpenAIPolicy(settings.model, settings.urls, logprobs=settings.logprobs, **thinking, **served)
    if settings.kind == "tgi":
        from leret.policies.remote.tgi import TgiPolicy

        return TgiPolicy(
            settings.model, settings.urls, tokenizer=settings.tokenizer, best_of=settings.best_of, **thinking, **served
        )
    from leret.policies.remote.together import TogetherPolicy

    return TogetherPolicy(
        settings.model,
        settings.urls,
        logprobs=settings.logprobs,
        **served,
    )


async def probe(settings: PolicySettings) -> None:
    """See that every server of a policy answers, takes the key and knows the model.

    A list of models that names it is enough; else a completion of one token decides, where a server that is slow to
    answer is let pass. One that is still loading is waited for a few seconds.

    Raises:
        PolicyError: a server is away, or refuses; its URL is in the message.
    """
    each = [settings.model_copy(update={"urls": urls}) for urls in zip(settings.urls)] or [settings]
    if settings.kind != "local":
        await asyncio.gather(*map(_probe_server, each))


async def _probe_server(settings: PolicySettings) -> None:
    from leret.policies.base import Request
    from leret.policies.remote.replies import RefusedError, TryAgainError

    def within(seconds: float) -> aclosing[Any]:
        brief = {"timeout_s": min(settings.timeout_s, seconds), "deadline_s": seconds}
        return aclosing(policy_of(settings.model_copy(update=brief)))

    def kind(error: PolicyError) -> str:
        return error.__cause__.kind if isinstance(error.__cause__, TryAgainError) else "refused"

    served: list[str] = []
    if settings.kind == "openai":
        async with within(_LIST_S) as policy:
            try:
                served = await policy.served_models()
            except PolicyError as error:
                if kind(error) not in {"refused", "garbled"}:
                    raise
    if settings.model in served:
        return
    request = Request(({"role": "user", "content": "Hello"},), (0,), settings.temperature, 1, settings.top_p)
    try:
        async with within(_TOKEN_S) as policy:
            await policy.complete(request)
    except RefusedError as error:
        hint = f"; it serves {', '.join(served)}" if served else ""
        if error.status in {404, 405} and settings.kind == "openai" and "/v1" not in settings.urls[0]:
            hint += "; is /v1 missing at the end of policy.urls?"
        raise PolicyError(f"{error}{hint}") from error
    except PolicyError as error:
        if kind(error) not in {"incomplete", "timeout"}:  # one token may be too few for it, or the server slow
            raise


def shared_policy(settings: PolicySettings) -> Policy:
    """The policy that settings name, loaded once a process as long as its files stay the same.

    Raises:
        PolicyError: the model cannot be loaded.
    """
    weights = ""
    if settings.kind == "local":
        from leret.policies.checkpoints import find_model, model_digest

        weights = model_digest(find_model(demo_directory() if settings.model == "demo" else settings.model))
    key = (digest(settings.model_dump(mode="json", exclude=set(_OF_REQUESTS))), weights)
    with _shared_lock:
        policy = _shared.get(key)
        if policy is None or getattr(policy, "closed", False):
            policy = _shared[key] = policy_of(settings)
        return policy


def policy_state(policy: Policy) -> dict[str, Any]:
    """The keys of ``PolicySettings`` that load this policy again; no secret among them.

    Raises:
        PolicyError: the policy is of a kind that no recipe names.
    """
    from leret.policies.local.policy import LocalPolicy
    from leret.policies.remote.openai import OpenAIPolicy
    from leret.policies.remote.tgi import TgiPolicy
    from leret.policies.remote.together import TogetherPolicy

    if isinstance(policy, LocalPolicy):
        model = "demo" if policy.name == "demo" else str(policy.path)
        return {"kind": "local", "model": model, "dtype": policy.dtype, "enable_thinking": policy.enable_thinking}
    if isinstance(policy, OpenAIPolicy | TgiPolicy | TogetherPolicy):
        served = {"model": policy.model, "urls": list(policy.urls), "api_key_env": policy.api_key_env}
        served["enable_thinking"] = getattr(policy, "enable_thinking", None)
        match policy:
            case OpenAIPolicy():
                return {"kind": "openai", **served}
            case TgiPolicy():
                return {"kind": "tgi", **served, "tokenizer": policy.tokenizer, "best_of": policy.best_of}
            case _:
                return {"kind": "together", **served}
    raise PolicyError(f"a {type(policy).__name__} cannot be saved by name; save the program without its LM")


def _local(settings: PolicySettings, threads: int | None = None, max_batch_tokens: int | None = None) -> Policy:
    from leret.policies.local.policy import LocalPolicy

    demo = settings.model == "demo"
    return LocalPolicy(
        demo_directory() if demo else settings.model,
        device=settings.device,
        dtype=settings.dtype,
        threads=threads,
        max_batch_tokens=max_batch_tokens,
        name="demo" if demo else None,
        enable_thinking=settings.enable_thinking,
        price_prompt=settings.price_prompt,
        price_completion=settings.price_completion,
    )


def _fault(detail: Any) -> str:
    """A fault of a setting; the value is left out where it may hold a key."""
    key = ".".join(["policy", *(str(part) for part in detail["loc"])])
    if detail["type"] == "value_error":
        told = str(detail["ctx"]["error"])
        return told if told.startswith("policy.") else f"{key} {told}"
    given = f", is {detail['input']!r}" if detail["loc"] == ("kind",) else ""
    return f"{key}: {detail['msg'][:1].lower()}{detail['msg'][1:]}{given}"


def demo_directory() -> Path:
    """Where the policy shipped with leret lies.

    Raises:
        PolicyError: this installation lacks it.
    """
    path = Path(str(resources.files("leret.demo"))) / "policy"
    if not (path / "config.json").is_file():
        raise PolicyError(f"the demo policy is not in {path}; install leret again, or rebuild it with `leret pretrain`")
    return path
