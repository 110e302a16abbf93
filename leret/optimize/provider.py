"""DSPy provider that serves, finetunes and reinforces policies with local weights on this machine."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dspy

from leret.config.policy import LocalPolicySettings
from leret.core import dspy_internals
from leret.core.aio import submit
from leret.core.bundled import POLICIES
from leret.core.dspy_internals import TrainDataFormat
from leret.core.errors import ConfigError, TrainingError
from leret.optimize.finetune import FinetuneJob, default_run_dir, train_examples
from leret.optimize.reinforce import GRPOJob
from leret.policies.dspy_lm import PolicyEngine, PolicyLM, policy_of
from leret.policies.load import SERVED, make_policy
from leret.policies.serving.engines import SERVERS
from leret.policies.serving.launch import BackgroundServer
from leret.training.data import TrainingExample

_servers: dict[str, BackgroundServer] = {}


class Provider(dspy_internals.Provider):
    """Trains the policy of a leret LM, and runs the policy in this process or on a server.

    ``train_kwargs`` takes ``run_dir`` and the keys of a `leret train` recipe (``algorithm`` defaults to sft), or of
    `leret.optimize.reinforce.GRPOSettings` for GRPO. With ``launch_kwargs={"engine": "vllm"}``, ``launch`` starts a
    server that runs until ``kill``. Other ``launch_kwargs`` are for `leret.policies.serving.launch.BackgroundServer`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.finetunable = self.reinforceable = True
        self.TrainingJob, self.ReinforceJob = FinetuneJob, GRPOJob

    @staticmethod
    def is_provider_model(model: str) -> bool:
        return model.startswith("leret/")

    @staticmethod
    def launch(lm: dspy.LM, launch_kwargs: dict[str, Any] | None = None) -> None:
        """Load the policy or start its server, unless the policy is already running."""
        name, keys = lm.model.removeprefix("leret/"), dict(launch_kwargs or lm.launch_kwargs)
        if not keys:
            policy_of(lm)
        elif name not in _servers:
            engine, timeout_s = keys.pop("engine", None), keys.pop("timeout_s", 600.0)
            if engine not in SERVERS:
                raise ConfigError(f"launch_kwargs: engine: {engine!r} is not one of {', '.join(SERVERS)}")
            server = _servers[name] = BackgroundServer(name, engine, timeout_s, **keys)
            thinking = lm.engine.settings.enable_thinking
            SERVED[name] = make_policy(server.settings.model_copy(update={"enable_thinking": thinking}))

    @staticmethod
    def kill(lm: dspy.LM, launch_kwargs: dict[str, Any] | None = None) -> None:
        """Stop the policy's server and free the policy's memory; the next request loads the policy again."""
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
        """Train a policy to write the last message of each conversation; return the name of the new policy."""
        if train_data_format != TrainDataFormat.CHAT:
            raise TrainingError(f"leret finetunes only on chat data, not {train_data_format}; use a chat adapter")
        keys = {"algorithm": "sft", **(train_kwargs or {})}
        run_dir = keys.pop("run_dir", None) or default_run_dir()
        conversations = [tuple(row["messages"]) for row in train_data]
        examples = [TrainingExample(str(i), c[:-1], (c[-1]["content"],)) for i, c in enumerate(conversations)]
        return f"leret/{train_examples(model, examples, keys, run_dir, job=job)}"


class LM(PolicyLM):
    """A ``dspy.LM`` that runs a policy in this process and can be trained by DSPy's optimizers.

    A new name loads new weights: ``lm.copy(model=...)`` and ``lm.model = ...`` take a directory, ``demo`` or ``agent``.

    Args:
        model: model or adapter directory, Hugging Face Hub repository, ``demo`` or ``agent``.
        kwargs: arguments of ``dspy.LM``, and ``device``, ``dtype``, ``enable_thinking`` and ``template`` as in a
            recipe's ``policy``. DSPy's cache is off by default, because it identifies models by name, not by weights.
    """

    def __init__(
        self, model: str | Path = "demo", *, engine: PolicyEngine | None = None, async_engine: Any = None, **kwargs: Any
    ) -> None:
        name = str(model).removeprefix("leret/")
        name = str(Path(name).resolve()) if name not in POLICIES and Path(name).is_dir() else name
        keys = {key: kwargs.pop(key) for key in ("device", "dtype", "enable_thinking", "template") if key in kwargs}
        engine = engine or PolicyEngine(settings=LocalPolicySettings.model_validate({"model": name, **keys}))
        arguments = {"temperature": 1.0, "max_tokens": engine.settings.max_tokens, "cache": False, **kwargs}
        super().__init__(f"leret/{name}", **{**engine.arguments(), **arguments})

    def infer_provider(self) -> Provider:
        return Provider()

    def finetune(self, train_data: Any, train_data_format: Any, train_kwargs: dict[str, Any] | None = None) -> Any:
        """Finetune like ``dspy.LM``, with this LM's ``enable_thinking`` unless ``train_kwargs`` sets another value."""
        keys = {"enable_thinking": self.engine.settings.enable_thinking, **(train_kwargs or self.train_kwargs)}
        return super().finetune(train_data, train_data_format, keys)


@atexit.register
def _stop_servers() -> None:
    for server in _servers.values():
        server.close()
