"""DSPy's provider for policies with local weights: it serves, finetunes and reinforces them on this machine."""

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
    """Trains the policy of a leret LM, also by GRPO, and runs it in this process or behind a server.

    ``train_kwargs`` are keys of a recipe of `leret train` (``algorithm`` is sft by default), or of
    `leret.optimize.reinforce.GRPOSettings`, and ``run_dir`` for the policies. Calling ``launch`` on an LM with
    ``launch_kwargs={"engine": "vllm"}`` starts a server, which answers until ``kill``; other keys are ``timeout_s``
    and those of `leret.policies.serving.launch.plan`.
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
        """Load the policy, or start its server, unless it is running."""
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
        """Stop the policy's server, and free its memory in this process. The next request loads it again."""
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
        """Train a policy on conversations, with the last message as target; return the name of the new policy."""
        if train_data_format != TrainDataFormat.CHAT:
            raise TrainingError(f"leret finetunes on data of format chat, not {train_data_format}; use a chat adapter")
        keys = {"algorithm": "sft", **(train_kwargs or {})}
        run_dir = keys.pop("run_dir", None) or default_run_dir()
        conversations = [tuple(row["messages"]) for row in train_data]
        examples = [TrainingExample(str(i), c[:-1], (c[-1]["content"],)) for i, c in enumerate(conversations)]
        return f"leret/{train_examples(model, examples, keys, run_dir, job=job)}"


class LM(PolicyLM):
    """A ``dspy.LM`` over a policy in this process that DSPy's optimizers can train.

    The weights follow the name: ``lm.copy(model=...)`` and ``lm.model = ...`` take a directory, ``demo`` or ``agent``.

    Args:
        model: a model or adapter directory, a repository of the Hugging Face hub, or ``demo`` or ``agent``.
        kwargs: arguments of ``dspy.LM``, and ``device``, ``dtype``, ``enable_thinking`` and ``template`` as in a
            recipe's ``policy``. The cache is off: it identifies models by name, not by weights.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        engine: PolicyEngine | None = None,
        async_engine: Any = None,
        **kwargs: Any,
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
        """Finetune as ``dspy.LM`` does, on prompts rendered by this LM's template."""
        keys = {"enable_thinking": self.engine.settings.enable_thinking, **(train_kwargs or self.train_kwargs)}
        return super().finetune(train_data, train_data_format, keys)


@atexit.register
def _stop_servers() -> None:
    for server in _servers.values():
        server.close()
