"""DSPy provider that serves and finetunes policies with local weights on this machine."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import dspy

from leret.config.messages import validated
from leret.config.policy import LocalPolicySettings, OpenAIPolicySettings
from leret.core import dspy_internals
from leret.core.aio import submit
from leret.core.bundled import POLICIES
from leret.core.dspy_internals import TrainDataFormat
from leret.core.errors import ConfigError, TrainingError
from leret.http.endpoints import ApiKey
from leret.optimize.finetune import FinetuneJob, default_run_dir, train_examples
from leret.policies.dspy_lm import PolicyEngine, PolicyLM, policy_of, refuse_client_keys
from leret.policies.load import SERVED, make_policy
from leret.policies.remote.openai import OpenAIPolicy
from leret.policies.serving.engines import SERVERS
from leret.policies.serving.launch import BackgroundServer
from leret.training.data import TrainingExample

SERVED_MAX_TOKENS = 1024
"""Default ``max_tokens`` on a server. DSPy's prompts ask for field names around each output."""

_servers: dict[str, BackgroundServer] = {}


class Provider(dspy_internals.Provider):
    """Trains the policy of a leret LM, and runs the policy in this process or on a server.

    ``train_kwargs`` takes ``run_dir`` and the keys of a `leret train` recipe (``algorithm``
    defaults to sft). With ``launch_kwargs={"engine": "vllm"}``, ``launch`` starts a server that
    runs until ``kill``. Other ``launch_kwargs`` are for
    `leret.policies.serving.launch.BackgroundServer`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.finetunable = True
        self.TrainingJob = FinetuneJob

    @staticmethod
    def is_provider_model(model: str) -> bool:
        return model.startswith("leret/")

    @staticmethod
    def launch(lm: dspy.LM, launch_kwargs: dict[str, Any] | None = None) -> None:
        """Load the policy or start its server, unless the policy is already running."""
        name = lm.model.removeprefix("leret/")
        keys = dict(launch_kwargs or lm.launch_kwargs)
        if not keys:
            policy_of(lm)
        elif name not in _servers:
            engine = keys.pop("engine", None)
            timeout_s = keys.pop("timeout_s", 600.0)
            if engine not in SERVERS:
                raise ConfigError(
                    f"launch_kwargs: engine: {engine!r} is not one of {', '.join(SERVERS)}"
                )
            server = BackgroundServer(name, engine, timeout_s, **keys)
            _servers[name] = server
            update = {"enable_thinking": lm.engine.settings.enable_thinking}
            SERVED[name] = make_policy(server.settings.model_copy(update=update))

    @staticmethod
    def kill(lm: dspy.LM, launch_kwargs: dict[str, Any] | None = None) -> None:
        """Stop the policy's server and free the policy's memory.

        The next request loads the policy again.
        """
        name = lm.model.removeprefix("leret/")
        if name in _servers:
            submit(SERVED.pop(name).aclose()).result()
            _servers.pop(name).close()
        if isinstance(lm.engine, PolicyEngine):
            lm.engine.release(lm.model)

    @staticmethod
    def finetune(
        job: FinetuneJob,
        model: str,
        train_data: Sequence[Mapping[str, Any]],
        train_data_format: TrainDataFormat | str | None,
        train_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Train a policy to write the last message of each conversation.

        Return the name of the new policy.
        """
        if train_data_format != TrainDataFormat.CHAT:
            raise TrainingError(
                f"leret finetunes only on chat data, not {train_data_format}; use a chat adapter"
            )
        keys = {"algorithm": "sft", **(train_kwargs or {})}
        run_dir = keys.pop("run_dir", None) or default_run_dir()
        examples: list[TrainingExample] = []
        for number, row in enumerate(train_data):
            *prompt, answer = row["messages"]
            example = TrainingExample(str(number), tuple(prompt), (answer["content"],))
            examples.append(example)
        path = train_examples(model, examples, keys, run_dir, job=job)
        return f"leret/{path}"


class LM(PolicyLM):
    """A ``dspy.LM`` that runs a policy in this process or on a server.

    DSPy's optimizers can train it.

    A new name loads new weights: ``lm.copy(model=...)`` and ``lm.model = ...`` take a directory,
    ``demo`` or ``agent``. A trained LM runs in this process, also if the first weights were on a
    server.

    Args:
        model: model or adapter directory, Hugging Face Hub repository, ``demo`` or ``agent``; with
            ``api_base``, the name of the served model.
        api_base: URL of an OpenAI-compatible server that runs, as in ``http://127.0.0.1:8000/v1``.
        weights: weights of the served model, for training: a directory or a Hugging Face Hub
            repository. None: the repository with the name of the served model.
        api_key: the server's key. It is not saved. `leret.load` then takes the name of a variable.
        api_key_env: environment variable with the server's key.
        timeout: seconds per attempt to get an answer from the server (default 300).
        kwargs: arguments of ``dspy.LM`` (``finetuning_model`` is ``weights``), and ``device``,
            ``dtype``, ``enable_thinking`` and ``template`` as in a recipe's ``policy``.
            ``max_tokens`` is 64 by default, and 1,024 on a server. DSPy's cache is off by default,
            because it identifies models by name, not by weights.

    Raises:
        ConfigError: an argument for servers is used without ``api_base``, or the URL or the key is
            invalid.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        api_base: str | None = None,
        weights: str | Path | None = None,
        api_key: str | None = None,
        api_key_env: str | None = None,
        timeout: float | None = None,
        engine: PolicyEngine | None = None,
        async_engine: Any = None,
        **kwargs: Any,
    ) -> None:
        name = str(model).removeprefix("leret/")
        url = kwargs.pop("base_url", None) or api_base
        refuse_client_keys(kwargs)
        local: dict[str, Any] = {}
        for key in ("device", "dtype", "enable_thinking", "template"):
            if key in kwargs:
                local[key] = kwargs.pop(key)
        if url is not None:
            # openai/gpt-oss-20b is a name; in openai/Qwen/Qwen3-8B, dspy.LM has added a prefix
            if name.count("/") > 1:
                name = name.removeprefix("openai/")
            served = {
                "model": name,
                "urls": (url,),
                "api_key_env": api_key_env,
                "enable_thinking": local.get("enable_thinking"),
            }
            if timeout is not None:
                served["timeout_s"] = timeout
            settings = validated(OpenAIPolicySettings, served, "leret.LM")
            policy = OpenAIPolicy(settings)
            if api_key is not None:
                policy.client.key = ApiKey(api_key)
            engine = PolicyEngine(policy, validated(LocalPolicySettings, local, "leret.LM"))
            max_tokens = SERVED_MAX_TOKENS
        else:
            _refuse_without_server(
                weights=weights, api_key=api_key, api_key_env=api_key_env, timeout=timeout
            )
            name = _absolute(name) or name
            engine = engine or PolicyEngine(
                settings=validated(LocalPolicySettings, {"model": name, **local}, "leret.LM")
            )
            max_tokens = engine.settings.max_tokens
        defaults = {
            "temperature": 1.0,
            "max_tokens": max_tokens,
            "cache": False,
            "finetuning_model": _absolute(weights),
        }
        super().__init__(f"leret/{name}", **(engine.arguments() | defaults | kwargs))

    def infer_provider(self) -> Provider:
        return Provider()

    def finetune(
        self, train_data: Any, train_data_format: Any, train_kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Finetune like ``dspy.LM``.

        ``enable_thinking`` is this LM's unless ``train_kwargs`` sets another value.
        """
        keys = {
            "enable_thinking": self.engine.settings.enable_thinking,
            **(train_kwargs or self.train_kwargs),
        }
        return super().finetune(train_data, train_data_format, keys)

    def reinforce(self, train_kwargs: Mapping[str, Any]) -> NoReturn:
        """Refuse a job of ``dspy.GRPO``, whose groups can mix prompts."""
        raise TrainingError(
            'dspy.GRPO cannot train a leret.LM; use leret.LeReT(algorithms=["grpo"], ...), which groups completions by '
            "prompt"
        )


def _refuse_without_server(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"leret.LM: {name} is for a server; add api_base=URL, or remove {name}"
            )


def _absolute(name: str | Path | None) -> str | None:
    if name is None:
        return None
    if str(name) in POLICIES or not Path(name).is_dir():
        return str(name)
    return str(Path(name).resolve())


@atexit.register
def _stop_servers() -> None:
    for server in _servers.values():
        server.close()
