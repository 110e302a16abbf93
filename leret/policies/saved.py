"""Saving and loading of a program's LMs, as JSON records.

The record of a leret policy has its settings, and a name that includes the digest of its weights.
Records of other LMs have the model, endpoint and settings. API keys are not saved: `leret.load`
takes the name of a variable.
"""

from __future__ import annotations

import json
import os
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
from leret.http.endpoints import ApiKey
from leret.policies.base import Policy, Request
from leret.policies.checkpoints import find_model, load_tokenizer, model_digest
from leret.policies.dspy_lm import PolicyEngine, PolicyLM, policy_lm
from leret.policies.load import PROBE_S, shared_policy
from leret.policies.local.chat_template import PromptEncoder
from leret.policies.remote.openai import OpenAIPolicy
from leret.policies.serving.launch import BackgroundServer

# its number of tokens depends on the chat template
_PROBE = ({"role": "user", "content": "Which city?"},)
_SAVED = LM_ATTRIBUTES | {
    *(
        "api_base",
        "cache",
        "engine",
        "extra_body",
        "n",
        "rollout_id",
        "timeout",
        "use_developer_role",
    ),
    *(
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "response_format",
    ),
    *("frequency_penalty", "presence_penalty", "reasoning_effort"),
}
"""Settings of a ``dspy.LM`` that are saved.

Any other setting is refused: it may hold a secret or redirect requests.
"""

_NO_KEY = {None, "", "none", "None", "EMPTY"}


class Servers(SharedInstance, ExitStack):
    """Servers that a loaded program started. Copies of the program in this process share them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Servers, ()


def lm_record(lm: dspy.BaseLM, directory: Path) -> dict[str, Any]:
    """Return an LM's record for `open_lm`, and copy weights that leret trained into ``directory``.

    Raises:
        ProgramError: leret cannot save LMs of this class, or a setting of the LM may hold a secret.
        PolicyError: the weights are missing.
    """
    name = f"the LM {getattr(lm, 'model', type(lm).__name__)}"
    instead = "set it to None before saving the program, and pass it to leret.load(..., lm=...)"
    try:
        state = lm.dump_state()
        json.dumps(state)
    except (TypeError, PolicyError) as error:
        raise ProgramError(f"{name} cannot be saved ({error}); {instead}") from error
    engine = state.pop("engine", "auto")
    state.pop("async_engine", None)
    if isinstance(lm, PolicyLM) and isinstance(lm.engine, PolicyEngine):
        settings = lm.engine.settings_of(lm.model)  # the LM's name selects the weights
        if settings is None:
            raise ProgramError(f"{name} cannot be saved: its policy has no settings; {instead}")
        config = {key: value for key, value in state.items() if key not in LM_ATTRIBUTES}
        record = policy_record(settings, directory, config, keep=True)
        if not isinstance(settings, LocalPolicySettings) and lm.engine.has_secret_key(lm.model):
            record["has_key"] = True
        if type(lm) is not PolicyLM:
            record["class"] = path_of(type(lm))
        return record
    if type(lm) is not dspy.LM or isinstance(engine, dict):
        fault = f"its class {type(lm).__name__} or its engine is custom"
        raise ProgramError(f"{name} cannot be saved: {fault}; {instead}")
    url = state.pop("base_url", None) or state.get("api_base")
    if url:
        state["api_base"] = url
    unknown = _unknown_settings(state)
    if unknown or "@" in str(url):
        secrets = ", ".join(unknown) or "its URL"
        raise ProgramError(f"{name} may hold a secret in {secrets}; {instead}")
    return {"lm": {**state, "engine": engine}, "has_key": lm.kwargs.get("api_key") not in _NO_KEY}


def _unknown_settings(state: Mapping[str, Any]) -> list[str]:
    return [key for key, value in state.items() if value and key not in _SAVED]


def policy_record(
    settings: PolicySettings, directory: Path, config: Mapping[str, Any], keep: bool = False
) -> dict[str, Any]:
    """Return a policy's record for `open_lm` or `open_policy`.

    ``config`` has the keyword arguments of the LM's requests. With ``keep``, weights that leret
    trained are copied into ``directory``.
    """
    record: dict[str, Any] = {"config": dict(config)}
    path = Path(settings.model)
    if isinstance(settings, LocalPolicySettings):
        path = find_model(settings.model).resolve()
        mark = f"-{model_digest(path)[:8]}"
        stem = settings.model if settings.model in POLICIES else path.name.removesuffix(mark)
        record["name"] = f"{stem}{mark}"
        tokenizer = load_tokenizer(path, settings.template)
        encoder = PromptEncoder(tokenizer, None, path.name, settings.enable_thinking)
        record["n_tokens"] = len(encoder.encode(_PROBE).token_ids)
    elif keep and path.is_dir():
        record["name"] = f"{path.name}-{shared_policy(settings).digest[:8]}"
    if keep and "name" in record and (path / "training.json").is_file():
        target = _copy(path, directory / "policies" / record["name"])
        settings = settings.model_copy(update={"model": str(target)})
    return {"policy": portable(settings, directory), **record}


def open_policy(record: Mapping[str, Any], directory: Path) -> Policy:
    """Open the policy of a `leret.Pick` from its record.

    Raise PolicyError if its files are missing or have changed.
    """
    settings = resolve_paths(PolicySettings.model_validate(record["policy"]), directory)
    if isinstance(settings, LocalPolicySettings):
        _check_files(settings, record)
    return shared_policy(settings)


def open_lm(
    record: Mapping[str, Any],
    directory: Path,
    serve: str | None,
    servers: Servers,
    key: str | None,
    tools: bool = False,
) -> dspy.LM:
    """Open an LM from its record and the files in ``directory``, as `leret.load` does.

    ``tools`` is for `policy_lm`.

    Raises:
        ConfigError: the LM was saved with an API key, and ``key`` does not name a variable with a
            key.
        PolicyError: the weights are missing or not on the server, or the server's chat template
            differs.
    """
    if "policy" not in record:
        return _plain_lm(record, key)
    settings = resolve_paths(PolicySettings.model_validate(record["policy"]), directory)
    config = record["config"]
    local = isinstance(settings, LocalPolicySettings)
    if serve in {"local", "vllm"} and not local:
        raise PolicyError(
            f"policy {settings.model} was on a server when the program was saved, so the program "
            "does not have its weights; load the program with serve=None, or with serve=URL, the "
            "URL of a server that has this policy"
        )
    if serve in {None, "local", "vllm"} and local:
        _check_files(settings, record)
    if serve is None and record.get("has_key") and isinstance(settings, OpenAIPolicySettings):
        named = _key_variable(f"the LM {settings.model} of this program", settings.urls[0], key)
        settings = settings.model_copy(update={"api_key_env": named})
    if serve in {None, "local"}:
        if not local or "class" not in record:
            return policy_lm(settings, tools=tools, **config)
        how = settings.model_dump(
            include={"model", "device", "dtype", "enable_thinking", "template"}
        )
        lm: dspy.LM = class_at(record["class"], PolicyLM)(**how, **config)
        return lm
    if serve == "vllm":
        server = BackgroundServer(settings.model, "vllm")
        servers.callback(server.close)
        url = server.settings.urls[0]
        model = server.settings.model
    else:
        url = str(serve)
        model = record.get("name", settings.model)
    sampling = settings.model_dump(
        include={"temperature", "top_p", "max_tokens", "enable_thinking", "extra_body"}
    )
    served = OpenAIPolicySettings(model=model, urls=(url,), api_key_env=key, **sampling)
    name = submit(_served_name(served, record)).result()
    return policy_lm(served.model_copy(update={"model": name}), tools=tools, **config)


def _copy(path: Path, target: Path) -> Path:
    """Copy a model directory, with hard links if the file system supports them."""
    # an existing target has the same weights: its name includes their digest
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            shutil.copytree(path, scratch, copy_function=os.link, dirs_exist_ok=True)
        except OSError:
            shutil.copytree(path, scratch, dirs_exist_ok=True)
        os.replace(scratch, target)
    return target


def _check_files(settings: PolicySettings, record: Mapping[str, Any]) -> None:
    name = record["name"]
    again = "or use a server: leret.load(..., serve=URL)"
    try:
        path = find_model(settings.model)
    except PolicyError as error:
        fault = f"policy {name} of this program is missing ({error})"
        raise PolicyError(f"{fault}; restore it, {again}") from error
    if not name.endswith(f"-{model_digest(path)[:8]}"):
        raise PolicyError(
            f"weights, tokenizer or chat template in {path} have changed since {name} was saved; "
            f"restore the files, save the program again, {again}"
        )


async def _served_name(settings: OpenAIPolicySettings, record: Mapping[str, Any]) -> str:
    """Return the policy's name on a server.

    Raise PolicyError if the server lacks it or has another chat template.
    """
    settings = settings.model_copy(update={"retry_for_s": PROBE_S})
    [url] = settings.urls
    async with aclosing(OpenAIPolicy(settings)) as policy:
        served = await policy.served()
    names = [name for name in served if name == settings.model]
    if not names:
        ending = f"-{settings.model.rpartition('-')[2]}" if "name" in record else settings.model
        names = [name for name in served if name.endswith(ending)]
    if len(names) != 1:
        raise PolicyError(
            f"{url} serves {', '.join(served) or 'no model'}, but not {settings.model}; "
            "start the server with `leret serve policy DIR`, or with this model name "
            "(--served-model-name)"
        )
    expected = record.get("n_tokens")
    if expected is not None:
        named = settings.model_copy(update={"model": names[0]})
        async with aclosing(OpenAIPolicy(named)) as policy:
            [completion] = await policy.complete(Request(_PROBE, (0,), 0.0, 1))
        n_tokens = completion.n_prompt_tokens
        if n_tokens not in {0, expected}:  # 0: the server does not report it
            raise PolicyError(
                f"{url} has a different chat template from {settings.model}: a prompt has "
                f"{n_tokens} tokens instead of {expected}; start the server with the chat "
                "template in the policy's directory"
            )
    return names[0]


def _key_variable(name: str, url: str | None, variable: str | None) -> str:
    """Return the variable with the API key of an LM that was saved with one.

    Raise ConfigError if it is None.
    """
    if variable is None:
        raise ConfigError(
            f"{name} needs an API key for {url or 'its provider'}; pass the name of a variable "
            "that holds it: leret.load(..., api_key_env=...), or pass another LM: leret.load(..., "
            "lm=...)"
        )
    return variable


def _plain_lm(record: Mapping[str, Any], api_key_env: str | None) -> dspy.LM:
    """Return a ``dspy.LM`` for its record; variable ``api_key_env`` has the API key."""
    state = dict(record["lm"])
    has_key = record["has_key"]
    url = state.get("api_base")
    name = f"the LM {state['model']} of this program"
    unknown = _unknown_settings(state)
    if unknown:
        settings = ", ".join(unknown)
        raise ProgramError(
            f"{name} sets {settings}, which may be unsafe; use leret.load(..., lm=...)"
        )
    if has_key:
        variable = _key_variable(name, url, api_key_env)
        state["api_key"] = ApiKey.from_env(variable, "api_key_env").reveal() or "none"
    elif url:  # litellm would send OPENAI_API_KEY
        state["api_key"] = "none"
    return dspy.LM.load_state(state)
