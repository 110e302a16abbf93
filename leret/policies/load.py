"""A policy by its recipe's words."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.errors import ConfigError, PolicyError
from leret.types import digest

if TYPE_CHECKING:
    from leret.config import PolicySettings
    from leret.policies.base import Policy

__all__ = ["api_key_of", "demo_directory", "load_policy", "policy_of", "policy_state", "shared_policy"]

_shared: dict[tuple[str, str], Policy] = {}
_shared_lock = threading.Lock()


def load_policy(
    kind: str,
    model: str | Path,
    *,
    urls: Sequence[str] = (),
    api_key_env: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    timeout_s: float = 60.0,
    concurrency: int = 32,
    threads: int | None = None,
    max_batch_tokens: int | None = None,
) -> Policy:
    """Load a model into this process, or connect to one that is served.

    Args:
        kind: ``local`` or ``openai``.
        model: directory, ``demo`` (the model shipped with leret) or hub repository; the served model's name.
        urls: of kind openai: base URLs ending in /v1.
        api_key_env: of kind openai: environment variable that holds the key.
        device: of kind local.
        dtype: of kind local.
        timeout_s: of kind openai: a request's deadline.
        concurrency: of kind openai: requests in flight.
        threads: of kind local: of torch in the worker; None chooses by the model's size.
        max_batch_tokens: of kind local: tokens of a batch; None chooses by device.

    Raises:
        ConfigError: ``kind`` is unknown.
        PolicyError: the model cannot be loaded.
    """
    if kind == "local":
        from leret.policies.local import LocalPolicy

        path = demo_directory() if str(model) == "demo" else model
        name = "demo" if str(model) == "demo" else None
        return LocalPolicy(
            path, device=device, dtype=dtype, threads=threads, max_batch_tokens=max_batch_tokens, name=name
        )
    if kind == "openai":
        from leret.policies.openai import OpenAIPolicy

        return OpenAIPolicy(str(model), urls, api_key_env=api_key_env, timeout_s=timeout_s, concurrency=concurrency)
    raise ConfigError(f"policy.kind is {kind!r}; it is local or openai")


def policy_of(settings: PolicySettings) -> Policy:
    """The policy that a recipe's settings name.

    Raises:
        PolicyError: the model cannot be loaded.
    """
    return load_policy(
        settings.kind,
        settings.model,
        urls=settings.urls,
        api_key_env=settings.api_key_env,
        device=settings.device,
        dtype=settings.dtype,
        timeout_s=settings.timeout_s,
        concurrency=settings.concurrency,
    )


def shared_policy(settings: PolicySettings) -> Policy:
    """The policy that settings name, loaded once a process as long as its files stay the same.

    Raises:
        PolicyError: the model cannot be loaded.
    """
    names = ("kind", "model", "urls", "api_key_env", "device", "dtype", "timeout_s", "concurrency")
    weights = ""
    if settings.kind == "local":
        from leret.policies.model_dir import find_model, model_digest

        weights = model_digest(find_model(demo_directory() if settings.model == "demo" else settings.model))
    key = (digest({name: getattr(settings, name) for name in names}), weights)
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
    from leret.policies.local import LocalPolicy
    from leret.policies.openai import OpenAIPolicy

    if isinstance(policy, LocalPolicy):
        model = "demo" if policy.name == "demo" else str(policy.path)
        return {"kind": "local", "model": model, "dtype": policy.dtype}
    if isinstance(policy, OpenAIPolicy):
        return {"kind": "openai", "model": policy.model, "urls": list(policy.urls), "api_key_env": policy.api_key_env}
    raise PolicyError(f"a {type(policy).__name__} cannot be saved by name; save the program without its LM")


def api_key_of(variable: str | None) -> str | None:
    """The key in an environment variable; None where none is asked for.

    Raises:
        PolicyError: the variable is named and not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise PolicyError(
            f"the environment variable {variable} (policy.api_key_env) is not set; export the server's key in it"
        )
    return key


def demo_directory() -> Path:
    """Where the policy shipped with leret lies.

    Raises:
        PolicyError: this installation lacks it.
    """
    path = Path(str(resources.files("leret.demo"))) / "policy"
    if not (path / "config.json").is_file():
        raise PolicyError(f"the demo policy is not in {path}; install leret again, or rebuild it with `leret pretrain`")
    return path
