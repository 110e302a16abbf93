"""Creation of policies from settings: kinds, policies per predictor, and shared policies."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass
from typing import Any

from leret.config.policy import (
    EncoderSettings,
    FeaturesSettings,
    LocalPolicySettings,
    OpenAIPolicySettings,
    PickerSettings,
    PolicySettings,
    ServedPolicySettings,
    TgiPolicySettings,
    TogetherPolicySettings,
)
from leret.core.aio import gathered
from leret.core.classes import identity, is_path, with_identity
from leret.core.errors import PolicyError
from leret.core.types import digest
from leret.policies.base import Completion, Policy, Request
from leret.policies.checkpoints import adapter_base, find_model, model_digest, picker_digest
from leret.policies.local.policy import LocalPolicy
from leret.policies.remote.openai import OpenAIPolicy
from leret.policies.tool_calls import ToolReader, read_calls, reader_of

PROBE_S = 8.0  # timeout of a probe, which requests one completion token
_OF_REQUESTS = {"temperature", "top_p", "max_tokens"}
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "picker.json",
)


def _picker(settings: PickerSettings) -> Policy:
    from leret.policies.pickers.picker import open_picker

    return open_picker(settings)


@dataclass(frozen=True)
class PolicyKind:
    """A kind of policy: settings class, constructor, digest without loading weights, and probe."""

    settings: type[PolicySettings]
    make: Callable[[Any], Policy]
    digest: Callable[[Any], str] | None = None
    probe: Callable[[Any], Awaitable[None]] | None = None


POLICIES = {
    "local": PolicyKind(
        LocalPolicySettings, LocalPolicy, lambda settings: model_digest(find_model(settings.model))
    ),
    "openai": PolicyKind(OpenAIPolicySettings, OpenAIPolicy),
    "tgi": PolicyKind(TgiPolicySettings, OpenAIPolicy),
    "together": PolicyKind(TogetherPolicySettings, OpenAIPolicy),
    "features": PolicyKind(FeaturesSettings, _picker, picker_digest),
    "encoder": PolicyKind(EncoderSettings, _picker, picker_digest),
}
"""Policy kinds by `policy.kind`."""

PolicySettings.table = POLICIES

N_OPEN = 4
"""Maximum number of local models that `shared_policy` keeps open."""

SERVED: dict[str, Policy] = {}
"""Policies on servers that leret started, by model directory.

They are used instead of loading the model.
"""

_shared: dict[tuple[Any, ...], Policy] = {}  # in order of last use
_shared_lock = threading.Lock()


def make_policy(settings: PolicySettings) -> Policy:
    """Create a policy from its settings.

    Raises:
        ConfigError: a URL is invalid, or the variable with the API key is not set.
        MissingDependency: a package for this kind of policy is not installed.
        PolicyError: the model cannot be loaded.
    """
    policy: Policy = _kind(settings).make(settings)
    return with_identity(policy, settings.kind)  # type: ignore[no-any-return]


def compute_digest(settings: PolicySettings) -> str:
    """Return the digest of the policy from `make_policy`, without loading local weights."""
    kind = _kind(settings)
    if kind.digest is None:
        return make_policy(settings).digest
    weights = kind.digest(settings)
    return digest(identity(settings.kind), weights) if is_path(settings.kind) else weights


def _kind(settings: PolicySettings) -> PolicyKind:
    kind: PolicyKind = PolicySettings.find(settings.kind)
    return kind


def tool_reader(settings: PolicySettings) -> ToolReader:
    """Return the reader of a policy's native tool calls.

    Calls from servers have the default format.
    """
    if not isinstance(settings, LocalPolicySettings):
        return read_calls
    try:
        path = find_model(settings.model)
    except PolicyError:  # a stage that reads stored samples does not need the model
        return read_calls
    return reader_of(
        path if (path / "tokenizer_config.json").is_file() else adapter_base(path) or path
    )


def sampled_policy(settings: PolicySettings) -> Policy:
    """Create a policy.

    For a model in `SERVED`, copy its server's policy and set the digest of the weights.
    """
    served = SERVED.get(settings.model) if isinstance(settings, LocalPolicySettings) else None
    if served is None:
        return make_policy(settings)
    policy: Any = copy(served)
    policy.digest = compute_digest(settings)
    return policy  # type: ignore[no-any-return]


class PolicySet:
    """A policy that forwards requests to their predictor's policy.

    Predictors without one use the policy of ``""``.
    """

    def __init__(self, by_predictor: Mapping[str, Policy]) -> None:
        self.by_predictor = dict(sorted(by_predictor.items()))
        names = []
        for predictor, policy in self.by_predictor.items():
            names.append(f"{predictor}: {policy.name}" if predictor else policy.name)
        self.name = ", ".join(names)
        self.meter = getattr(self.by_predictor[""], "meter", None)

    @property
    def digests(self) -> dict[str, str]:
        return {predictor: policy.digest for predictor, policy in self.by_predictor.items()}

    @property
    def digest(self) -> str:
        return digest("policies", self.digests)

    async def complete(self, request: Request) -> list[Completion]:
        return await policy_for(self, request.predictor).complete(request)

    async def aclose(self) -> None:
        for policy in {id(policy): policy for policy in self.by_predictor.values()}.values():
            await policy.aclose()


def combine_policies(by_predictor: Mapping[str, Policy]) -> Policy:
    """Return a `PolicySet`, or the policy itself if there is only one."""
    return PolicySet(by_predictor) if len(by_predictor) > 1 else by_predictor[""]


def policy_for(policy: Policy, predictor: str) -> Policy:
    """Return the policy for a predictor: ``policy`` itself, unless it is a `PolicySet`."""
    if not isinstance(policy, PolicySet):
        return policy
    return policy.by_predictor.get(predictor, policy.by_predictor[""])


def open_policies(
    by_predictor: Mapping[str, PolicySettings], make: Callable[[PolicySettings], Policy]
) -> Policy:
    """Open the policy of each predictor; predictors with identical settings share one."""
    policies = {settings: make(settings) for settings in dict.fromkeys(by_predictor.values())}
    return combine_policies(
        {predictor: policies[settings] for predictor, settings in by_predictor.items()}
    )


async def probe(settings: PolicySettings) -> None:
    """Check that all servers of a policy answer, accept the key and know the model.

    The check waits a few seconds for a server that is loading, and passes if a server is slow to
    complete a prompt.
    """
    kind = _kind(settings)
    if kind.probe is not None:
        await kind.probe(settings)
    if not isinstance(settings, ServedPolicySettings):
        return
    brief = {"timeout_s": min(settings.timeout_s, PROBE_S), "retry_for_s": PROBE_S}

    async def check(url: str) -> None:
        policy: Any = make_policy(settings.model_copy(update={**brief, "urls": (url,)}))
        async with aclosing(policy):
            await policy.check()

    await gathered(map(check, settings.urls))


def shared_policy(settings: PolicySettings) -> Policy:
    """Return the policy with these settings, loaded once, and again if its weight files change.

    At most `N_OPEN` local models stay open: the least recently used model is closed.
    """
    key = _key(settings)
    with _shared_lock:
        policy = _shared.pop(key, None)
        if policy is None or getattr(policy, "closed", False):
            policy = make_policy(settings)
        _shared[key] = policy
        models = [key for key, shared in _shared.items() if isinstance(shared, LocalPolicy)]
        old = [_shared.pop(key) for key in models[:-N_OPEN]]
    _close(old)
    return policy


def close_shared(settings: LocalPolicySettings) -> None:
    """Close a local model if it is open, and free its memory; the next request loads it again."""
    with _shared_lock:
        old = _shared.pop(_key(settings), None)
    _close([old] if old else [])


def _key(settings: PolicySettings) -> tuple[Any, ...]:
    """Build the cache key.

    Runs on every request, so it uses the weight files' sizes and times, not their content.
    """
    stamps = []
    if isinstance(settings, LocalPolicySettings | PickerSettings):
        for name in _WEIGHTS:
            file = f"{settings.model}/{name}"
            if os.path.exists(file):
                stat = os.stat(file)
                stamps.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
    return digest(settings.model_dump(mode="json", exclude=_OF_REQUESTS)), *stamps


def _close(policies: Sequence[Any]) -> None:
    for policy in policies:
        policy.close()
    if policies:
        gc.collect()  # a policy and its worker reference each other


def policy_state(policy: object) -> dict[str, Any]:
    """Return the policy's settings for `PolicySettings.model_validate`, without secrets."""
    settings = getattr(policy, "settings", None)
    if settings is None:
        raise PolicyError(
            f"a {type(policy).__name__} has no settings to save; save the program without its LM"
        )
    return {"kind": settings.kind, **settings.model_dump(mode="json", exclude_defaults=True)}
