"""The LM of a saved program: what is written of it, and the LM again, in this process or on a server.

A leret policy is written as its settings and as a name with the digest of its weights, any other ``dspy.LM`` as its
model, endpoint and settings. No key is written, but the environment variable that holds it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import dspy

from leret.config.base import portable, resolve_paths
from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings, PolicySettings
from leret.core.aio import submit
from leret.core.bundled import POLICIES
from leret.core.classes import class_at, path_of
from leret.core.dspy_internals import LM_ATTRIBUTES
from leret.core.errors import ConfigError, PolicyError, ProgramError
from leret.core.types import SharedInstance
from leret.policies.base import Policy, Request
from leret.policies.checkpoints import find_model, load_tokenizer, model_digest
from leret.policies.dspy_lm import PolicyLM, policy_lm
from leret.policies.load import PROBE_S, shared_policy
from leret.policies.local.chat_template import PromptEncoder
from leret.policies.remote.openai import OpenAIPolicy
from leret.policies.serving.engines import Listening
from leret.policies.serving.launch import BackgroundServer, free_port, plan
from leret.policies.serving.model import resolve_policy

_PROBE = ({"role": "user", "content": "Which city?"},)
"""A prompt whose length tells one chat template from another."""

_START_S = 600.0
"""Until a server that is started here must answer."""

_SECRET = re.compile(r"(?i)key|secret|credential|password|header|(^|_)token($|_)")
_UNSAFE = re.compile(rf"{_SECRET.pattern}|(?<!api_)base|url|endpoint|host|proxy|provider|client|fallback|model_list")
"""Settings of an LM that hold a secret, or send its requests elsewhere than to ``api_base``."""
_NO_KEY = {None, "", "none", "None", "EMPTY"}


class Servers(SharedInstance, ExitStack):
    """The servers that run for a program; copies of the program share them, but not those in other processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Servers, ()


def lm_record(lm: dspy.BaseLM, directory: Path) -> dict[str, Any]:
    """What `open_lm` needs, in JSON values; weights that leret trained are copied into ``directory``.

    Raises:
        ProgramError: the LM is of a class that only Python can make again, or holds a secret.
        PolicyError: the weights are not there.
    """
    name = f"the LM {getattr(lm, 'model', type(lm).__name__)}"
    instead = "set it to None before the program is saved, and pass it as leret.load(..., lm=...)"
    try:
        state = lm.dump_state()
        json.dumps(state)
    except (TypeError, PolicyError) as error:
        raise ProgramError(f"{name} cannot be saved ({error}); {instead}") from error
    engine, _ = state.pop("engine", "auto"), state.pop("async_engine", None)
    if str(state["model"]).startswith("leret/") and isinstance(engine, dict):
        settings = PolicySettings.model_validate(engine["state"])
        if isinstance(settings, LocalPolicySettings):  # the weights follow the LM's name
            settings = settings.model_copy(update={"model": state["model"].removeprefix("leret/")})
        config = {key: value for key, value in state.items() if key not in LM_ATTRIBUTES}
        record = policy_record(settings, directory, config, keep=True)
        return record if type(lm) is PolicyLM else {**record, "class": path_of(type(lm))}
    if type(lm) is not dspy.LM or isinstance(engine, dict):
        raise ProgramError(f"{name} cannot be saved: its class {type(lm).__name__} or its engine is its own; {instead}")
    url = state.pop("base_url", None) or state.get("api_base") or _default_url(lm.model)
    secret = [key for key, value in state.items() if value and _UNSAFE.search(key)]
    if secret or "@" in str(url):
        raise ProgramError(
            f"{name} may hold a secret or another endpoint ({', '.join(secret) or 'in its URL'}); it is not saved; "
            f"{instead}"
        )
    key = lm.kwargs.get("api_key")
    variable = next((var for var, value in os.environ.items() if value == key and _SECRET.search(var)), None)
    if key not in _NO_KEY and variable is None:
        raise ProgramError(f"{name} has a key that no environment variable holds, and keys are not saved; {instead}")
    return {"lm": {**state, "engine": engine, **({"api_base": url} if url else {})}, "api_key_env": variable}


def _default_url(model: str) -> str | None:
    """Where the environment sends the requests of an LM without an endpoint; another process may not have it."""
    url = os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")
    return url if model.startswith("openai/") else None


def policy_record(
    settings: PolicySettings, directory: Path, config: Mapping[str, Any], keep: bool = False
) -> dict[str, Any]:
    """What `open_lm` needs of a leret policy.

    ``config``: keyword arguments of the LM's requests. With ``keep``, trained weights are copied into ``directory``.
    """
    record: dict[str, Any] = {"config": dict(config)}
    if isinstance(settings, LocalPolicySettings):
        path = find_model(settings.model).resolve()
        mark = f"-{model_digest(path)[:8]}"
        record["name"] = f"{settings.model if settings.model in POLICIES else path.name.removesuffix(mark)}{mark}"
        encoder = PromptEncoder(load_tokenizer(path, settings.template), None, path.name, settings.enable_thinking)
        record["n_tokens"] = len(encoder.encode(_PROBE).token_ids)
    elif keep and (path := Path(settings.model)).is_dir():
        record["name"] = f"{path.name}-{shared_policy(settings).digest[:8]}"
    if keep and "name" in record and (path / "training.json").is_file():
        settings = settings.model_copy(update={"model": str(_keep(path, directory / "policies" / record["name"]))})
    return {"policy": portable(settings, directory), **record}


def open_policy(record: Mapping[str, Any], directory: Path) -> Policy:
    """The policy of a record in ``directory``, which answers picks; PolicyError where its files are not there."""
    settings = resolve_paths(PolicySettings.model_validate(record["policy"]), directory)
    if isinstance(settings, LocalPolicySettings):
        _check_files(settings, record)
    return shared_policy(settings)


def open_lm(
    record: Mapping[str, Any], directory: Path, serve: str | None, servers: Servers, api_key_env: str | None
) -> dspy.LM:
    """The LM of a record in ``directory``; ``serve`` and ``api_key_env`` as in `leret.load`.

    Raises:
        PolicyError: the weights are not there, the server does not have them, or the chat template is another one.
    """
    if "policy" not in record:
        return _plain_lm(record)
    settings, config = resolve_paths(PolicySettings.model_validate(record["policy"]), directory), record["config"]
    local = isinstance(settings, LocalPolicySettings)
    if serve in {"local", "vllm"} and not local:
        raise PolicyError(
            f"the policy {settings.model} was on a server when the program was saved, and its weights are not known "
            "here; load with serve=None, or serve=URL of a server that has it"
        )
    if serve in {None, "local", "vllm"} and local:
        _check_files(settings, record)
    if serve in {None, "local"}:
        if not local or "class" not in record:
            return policy_lm(settings, **config)
        how = settings.model_dump(include={"model", "device", "dtype", "enable_thinking", "template"})
        lm: dspy.LM = class_at(record["class"], PolicyLM)(**how, **config)
        return lm
    if serve == "vllm":
        planned = plan(resolve_policy(settings.model), "vllm", Listening("127.0.0.1", free_port("127.0.0.1")))
        servers.callback(BackgroundServer(planned, _START_S).close)
        url, model = f"{planned.at.url}/v1", planned.model
    else:
        url, model = str(serve), record.get("name", settings.model)
    sampling = settings.model_dump(include={"temperature", "top_p", "max_tokens", "enable_thinking"})
    key = api_key_env or getattr(settings, "api_key_env", None)
    served = OpenAIPolicySettings(model=model, urls=(url,), api_key_env=key, **sampling)
    found = submit(_find(served, record)).result()
    return policy_lm(served.model_copy(update={"model": found}), **config)


def _keep(path: Path, target: Path) -> Path:
    """A copy of a model directory, of links where the file system has them."""

    def link(source: str, place: str) -> None:
        try:
            os.link(source, place)
        except OSError:
            shutil.copyfile(source, place)

    if not target.is_dir():  # the name holds the digest of the weights
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.")
        os.replace(shutil.copytree(path, scratch, copy_function=link, dirs_exist_ok=True), target)
    return target


def _check_files(settings: PolicySettings, record: Mapping[str, Any]) -> None:
    """Refuse a policy if its directory is gone or its files have changed."""
    name, again = record["name"], "or say where it is served: leret.load(..., serve=URL)"
    try:
        path = find_model(settings.model)
    except PolicyError as error:
        raise PolicyError(f"the policy {name} of this program is missing: {error}; put it back, {again}") from error
    if not name.endswith(f"-{model_digest(path)[:8]}"):
        raise PolicyError(
            f"the weights, tokenizer or chat template in {path} are not those that {name} was saved with; put them "
            f"back, or save the program again; {again}"
        )


async def _find(settings: OpenAIPolicySettings, record: Mapping[str, Any]) -> str:
    """The name under which a server has the policy, once its chat template has been seen to be the same."""
    settings = settings.model_copy(update={"retry_for_s": PROBE_S})
    [url] = settings.urls
    async with aclosing(OpenAIPolicy(settings)) as policy:
        served = await policy.served()
    ends = f"-{settings.model.rpartition('-')[2]}" if "name" in record else settings.model
    names = [name for name in served if name == settings.model] or [name for name in served if name.endswith(ends)]
    if len(names) != 1:
        raise PolicyError(
            f"{url} serves {', '.join(served) or 'no model'}, and not {settings.model}; start it by `leret serve "
            "policy DIR`, or give the server's model this name (--served-model-name)"
        )
    if (expected := record.get("n_tokens")) is not None:
        async with aclosing(OpenAIPolicy(settings.model_copy(update={"model": names[0]}))) as policy:
            [one] = await policy.complete(Request(_PROBE, (0,), 0.0, 1))
        if one.n_prompt_tokens not in {0, expected}:  # 0: the server does not count
            raise PolicyError(
                f"{url} makes {one.n_prompt_tokens} tokens of a prompt that is {expected} under the chat template of "
                f"{settings.model}; let the server use the template of the policy's directory"
            )
    return names[0]


def _plain_lm(record: Mapping[str, Any]) -> dspy.LM:
    """A ``dspy.LM`` as it was: at its own endpoint, with the key of the environment."""
    state, variable = dict(record["lm"]), record.get("api_key_env")
    if unsafe := [key for key, value in state.items() if value and _UNSAFE.search(key)]:
        raise ProgramError(f"the LM {state['model']} of this program sets {', '.join(unsafe)}; load it with lm=...")
    if variable is not None and variable not in os.environ:
        raise ConfigError(f"the LM {state['model']} of this program takes its key from {variable}, which is not set")
    if variable is not None or state.get("api_base"):
        state["api_key"] = os.environ[variable] if variable else "none"  # another server's key is not sent to it
    return dspy.LM.load_state(state)
