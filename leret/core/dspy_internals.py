"""All of DSPy that is private or may differ between its versions.

tests/core/test_dspy_internals.py states what leret expects of it.

Written against dspy 3.4.1. What is public and stable (Module, Predict, Signature, context) is imported from dspy.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import dspy
from dspy import lm15
from dspy.adapters.utils import parse_value
from dspy.clients.base_lm import LM_CLASS_STATE_KEY
from dspy.clients.provider import Provider, ReinforceJob, TrainingJob
from dspy.clients.utils_finetune import TrainDataFormat, TrainingStatus, get_finetune_directory
from dspy.dsp.utils.settings import main_thread_config, thread_local_overrides
from dspy.dsp.utils.utils import dotdict
from dspy.primitives.prediction import Completions
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMError

from leret.core.types import SharedInstance

__all__ = ["AdapterParseError", "ContextWindowExceededError", "LMError", "Provider", "ReinforceJob", "TrainDataFormat",
           "TrainingJob", "TrainingStatus", "get_finetune_directory", "lm15", "parse_value"]  # fmt: skip

LM_ATTRIBUTES = frozenset(
    {LM_CLASS_STATE_KEY, "model", "model_type", "num_retries", "finetuning_model", "launch_kwargs", "train_kwargs"}
)
"""What ``dspy.LM.dump_state`` holds beside its engines and the keyword arguments of its requests."""

_GENERATION = frozenset(
    {"temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "frequency_penalty",
     "presence_penalty", "reasoning_effort", "response_format"}
)  # fmt: skip
"""Keyword arguments of an LM that belong into a request; the others are its client's."""

PART_MARKER = "<<CUSTOM-TYPE-"
"""DSPy's base adapter splits a message into parts at such a marker."""


class PlainJSONAdapter(dspy.JSONAdapter):
    """DSPy's without ``response_format``, which a policy in this process and the sampler do not take."""

    __call__ = dspy.ChatAdapter.__call__
    acall = dspy.ChatAdapter.acall


def rm_rows(ranking: Sequence[Any]) -> list[Any]:
    """Return passages as `dspy.Retrieve` takes them from ``dspy.settings.rm``."""
    texts = [f"{p.title} | {p.text}" if p.title else p.text for p in ranking]
    return [dotdict(long_text=text, pid=p.doc_id, score=p.score) for p, text in zip(ranking, texts, strict=True)]


class AdapterProxy:
    """Stands in ``settings.adapter``: a call of the adapter goes to ``answer``, all else to the adapter itself.

    A proxy and no subclass: DSPy wraps the methods of every subclass again, and programs ask the ambient adapter for
    more than calls (ReAct formats its trajectory by it). ``answer`` gets the adapter and the arguments of its call.
    """

    def __init__(self, adapter: dspy.Adapter, answer: Callable[..., list[dict[str, Any]]]) -> None:
        self.__dict__.update(_adapter=adapter, _answer=answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._adapter)

    def __call__(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self._answer(self._adapter, lm, lm_kwargs, signature, demos, inputs))

    async def acall(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> list[dict[str, Any]]:
        return self(lm, lm_kwargs, signature, demos, inputs)


class _FirstAdapter(BaseCallback):
    found: dspy.Adapter | None = None

    def on_adapter_format_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        self.found = self.found or instance


def current_adapter() -> dspy.Adapter:
    """Return the adapter of ``dspy.settings``, or the one that DSPy takes where none is set."""
    if dspy.settings.adapter is not None:
        return cast(dspy.Adapter, dspy.settings.adapter)
    first, lm = _FirstAdapter(), EngineLM("adapter", lambda request: text_response(request, "-"))
    with dspy.context(lm=lm, callbacks=[first], disable_history=True, trace=None), suppress(Exception):
        dspy.Predict("question -> answer")(question="?")
    assert first.found is not None
    return first.found


def one_call(adapter: dspy.Adapter) -> dspy.Adapter:
    """The adapter without a second call where a completion does not parse: one state and one seed are one call."""
    if not getattr(adapter, "use_json_adapter_fallback", False):
        return adapter
    adapter = copy.copy(adapter)
    adapter.use_json_adapter_fallback = False
    return adapter


def run_program(program: dspy.Module, /, *args: Any, **inputs: Any) -> Any:
    """Call a program, also one that has ``aforward`` alone."""
    if callable(getattr(type(program), "forward", None)):
        return program(*args, **inputs)
    return asyncio.run(program.acall(*args, **inputs))


def calling_predictor() -> Any:
    """The module whose call is at work."""
    callers = dspy.settings.caller_modules
    return callers[-1] if callers else None


settings_here: Callable[[], Mapping[str, Any]] = thread_local_overrides.get
"""Return all settings inside `carrying`; elsewhere those that differ from the process's."""


def carried_run() -> Any:
    """Return the run that `carrying` carries; None elsewhere."""
    return settings_here().get("_leret_run")


passes: list[Any] = []
"""Runs of programs that are replayed at this moment, in any thread."""


def watching_run() -> Any:
    """Return what `carrying` carries; None elsewhere, except in threads that a replayed program has started itself.

    Raises:
        ProgramError: this is such a thread.
    """
    run = carried_run()
    if run is None:
        for one in tuple(passes):
            one.refuse_own_thread()
    return run


QUIET: dict[str, Any] = {"callbacks": [], "disable_history": True, "warn_on_type_mismatch": False}
"""Settings without what DSPy notes of a call."""


@dataclass
class carrying:  # noqa: N801 - a context manager; `dspy.context` takes twice as long
    """Settings of a pass that leret watches: they reach `dspy.Parallel`'s threads, as context variables do not."""

    run: Any
    settings: Mapping[str, Any]

    def __enter__(self) -> None:
        settings = {**main_thread_config, **settings_here(), **self.settings, "_leret_run": self.run}
        self._token = thread_local_overrides.set(dotdict(settings))

    def __exit__(self, *error: object) -> None:
        thread_local_overrides.reset(self._token)


def forward_of(program: dspy.Module) -> Callable[..., Any]:
    """A module's call, without DSPy's bookkeeping where it has no call of its own."""
    plain = type(program).__call__ is dspy.Module.__call__
    return cast(Callable[..., Any], object.__getattribute__(program, "forward") if plain else program)


def prediction_of(outputs: Sequence[Mapping[str, Any]], signature: type[dspy.Signature]) -> dspy.Prediction:
    """`dspy.Prediction.from_completions`, in a third of the time."""
    made, completions = dspy.Prediction.__new__(dspy.Prediction), Completions.__new__(Completions)
    fields = {name: [one[name] for one in outputs] for name in outputs[0]} if outputs else {}
    store = {name: values[0] for name, values in fields.items()}
    vars(completions).update(signature=signature, _completions=fields)
    vars(made).update(_store=store, _completions=completions, _lm_usage=None)
    return made


def is_turn_by_turn(adapter: dspy.Adapter, kinds: Sequence[type[dspy.Adapter]]) -> bool:
    """Whether an adapter's ``format`` is DSPy's own or that of one of ``kinds``: demos first, then the inputs."""
    own = inspect.unwrap(type(adapter).format)  # DSPy wraps it in every subclass
    return any(own is inspect.unwrap(kind.format) for kind in (dspy.Adapter, *kinds))


def last_message(adapter: dspy.Adapter, signature: type[dspy.Signature], inputs: Mapping[str, Any]) -> dict[str, str]:
    """The last message of a call, of an adapter with DSPy's own ``format``."""
    return {"role": "user", "content": adapter.format_user_message_content(signature, dict(inputs), main_request=True)}


def messages_of(request: lm15.Request) -> tuple[dict[str, str], ...]:
    """Text messages of a request in order, the system's first; UnsupportedFeatureError where one holds more."""
    messages: list[dict[str, str]] = []
    if request.system is not None:
        parts = request.system
        text = parts if isinstance(parts, str) else "".join(_text(part) for part in parts)
        messages.append({"role": "system", "content": text})
    for message in request.messages:
        role = {"developer": "system", "tool": "user"}.get(message.role, message.role)
        between = "" if all(isinstance(part, lm15.TextPart) for part in message.parts) else "\n"
        messages.append({"role": role, "content": between.join(map(_text, message.parts))})
    return tuple(messages)


def _text(part: Any) -> str:
    if isinstance(part, lm15.ToolCallPart):
        return json.dumps({"name": part.name, "args": part.input}, ensure_ascii=False)
    if isinstance(part, lm15.ToolResultPart):
        return "".join(map(_text, part.content))
    if not isinstance(part, lm15.TextPart):
        raise lm15.UnsupportedFeatureError(
            f"a leret policy reads text alone, and the prompt holds a {type(part).__name__}", feature="messages"
        )
    return cast(str, part.text)


async def complete_messages(lm: dspy.BaseLM, messages: Sequence[Mapping[str, str]]) -> str:
    """Return what an LM writes after these messages, with its own settings."""
    if not isinstance(lm, dspy.LM):  # with a ``forward`` of its own, which DSPy 3.5 no longer takes
        [first, *_] = await lm.acall(messages=[dict(message) for message in messages])
        return str(first["text"] if isinstance(first, Mapping) else first)
    settings = {name: value for name, value in lm.kwargs.items() if name in _GENERATION and value is not None}
    body = {**settings, "model": lm.model, "messages": [dict(message) for message in messages]}
    cached = {name: lm.kwargs[name] for name in ("rollout_id",) if lm.kwargs.get(name) is not None}
    response = await lm.acall(lm15.request_from_openai_chat(body), **cached)
    return "".join(part.text for part in response.message.parts if isinstance(part, lm15.TextPart))


def text_response(
    request: lm15.Request, text: str, n_prompt_tokens: int = 0, n_completion_tokens: int = 0, finish: str = "stop"
) -> lm15.Response:
    """A response that holds one text."""
    return lm15.Response(
        id=None,
        model=request.model,
        message=lm15.Message.assistant([lm15.TextPart(text)]),
        finish_reason="length" if finish == "length" else "stop",
        usage=lm15.Usage(input_tokens=n_prompt_tokens, output_tokens=n_completion_tokens),
    )


class EngineLM(dspy.LM):
    """A ``dspy.LM`` that answers by a function, without cache and retries.

    ``settings`` are ``temperature``, ``max_tokens`` and ``top_p`` of requests that do not say.
    """

    def __init__(self, name: str, answer: Callable[[lm15.Request], lm15.Response], **settings: Any) -> None:
        engines = {"engine": _Engine(answer), "async_engine": _AsyncEngine(answer)}
        super().__init__(f"leret/{name}", cache=False, num_retries=0, **engines, **settings)


class StandInLM(EngineLM):
    """Stands for the LM of the predictor ``owner`` while leret runs a program; "" stands for ``dspy.settings.lm``."""

    owner = ""

    @classmethod
    def of(cls, owner: str, name: str, answer: Callable[[lm15.Request], lm15.Response]) -> StandInLM:
        made = cls(name, answer)
        made.owner = owner
        return made


class _Engine(SharedInstance):
    supported_params = frozenset({"temperature", "max_tokens", "top_p"})

    def __init__(self, answer: Callable[[lm15.Request], lm15.Response]) -> None:
        self.complete = answer

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        yield from lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Nothing is held."""


class _AsyncEngine(SharedInstance):
    def __init__(self, answer: Callable[[lm15.Request], lm15.Response]) -> None:
        self._answer = answer

    async def complete(self, request: lm15.Request) -> lm15.Response:
        return self._answer(request)
