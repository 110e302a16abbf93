"""Wrap the parts of DSPy 3.4.1 that are private or may change; tests/core/test_dspy_internals.py checks them."""

from __future__ import annotations

import ast
import asyncio
import copy
import functools
import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, TextIO, cast

import dspy
from dspy import lm15
from dspy.adapters.utils import parse_value
from dspy.clients.backend_selection import CLIENT_KEYS
from dspy.clients.base_lm import LM_CLASS_STATE_KEY
from dspy.clients.provider import Provider, TrainingJob
from dspy.clients.utils_finetune import TrainDataFormat, TrainingStatus, get_finetune_directory
from dspy.dsp.utils.settings import main_thread_config, thread_local_overrides
from dspy.dsp.utils.utils import dotdict
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMError

from leret.core.errors import ProgramError
from leret.core.types import Message, Messages, SharedInstance, digest, message

__all__ = ["CLIENT_KEYS", "AdapterParseError", "ContextWindowExceededError", "LMError", "Provider",
           "TrainDataFormat", "TrainingJob", "TrainingStatus", "get_finetune_directory", "lm15",
           "parse_value"]  # fmt: skip

LM_ATTRIBUTES = frozenset(
    {
        LM_CLASS_STATE_KEY,
        "model",
        "model_type",
        "num_retries",
        "finetuning_model",
        "launch_kwargs",
        "train_kwargs",
    }
)
"""Keys of ``dspy.LM.dump_state`` that are neither engines nor request arguments."""

_GENERATION = frozenset(
    {"temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "frequency_penalty",
     "presence_penalty", "reasoning_effort", "response_format"}
)  # fmt: skip
"""LM keyword arguments that are sent in a request; all other arguments configure the client."""

PART_MARKER = "<<CUSTOM-TYPE-"
"""Start of the marker at which DSPy's base adapter splits a message into parts."""


def parse_in_turns() -> None:
    """Let only one thread at a time parse Python code.

    DSPy parses in threads: at each step of `dspy.ReAct`, and for outputs that are not text. Before
    3.11.8, CPython raises SystemError if another thread parses at the same time (gh-106905).
    """
    parse = ast.parse
    lock = threading.RLock()

    @functools.wraps(parse)
    def parse_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return parse(*args, **kwargs)

    ast.parse = parse_alone


if sys.version_info < (3, 11, 8):
    parse_in_turns()


class PlainJSONAdapter(dspy.JSONAdapter):
    """DSPy's JSON adapter without ``response_format``, which in-process policies do not support."""

    __call__ = dspy.ChatAdapter.__call__
    acall = dspy.ChatAdapter.acall


@contextmanager
def one_truncation_warning() -> Iterator[None]:
    """Let DSPy warn only once about truncated LM responses, which it otherwise does for each of them."""
    log = logging.getLogger("dspy.clients.lm")
    warned: list[logging.LogRecord] = []

    def is_first(record: logging.LogRecord) -> bool:
        if "truncated" not in record.getMessage():
            return True
        warned.append(record)
        return len(warned) == 1

    log.addFilter(is_first)
    try:
        yield
    finally:
        log.removeFilter(is_first)


def rm_rows(ranking: Sequence[Any]) -> list[Any]:
    """Convert passages to the rows that `dspy.Retrieve` expects from ``dspy.settings.rm``."""
    rows = []
    for passage in ranking:
        text = f"{passage.title} | {passage.text}" if passage.title else passage.text
        rows.append(dotdict(long_text=text, pid=passage.doc_id, score=passage.score))
    return rows


class AdapterProxy:
    """A proxy for ``dspy.settings.adapter``. Calls go to ``answer``; all attributes are those of the adapter.

    It is not a subclass: DSPy would wrap ``format`` and ``parse`` again, and callbacks would see each call twice.
    """

    def __init__(self, adapter: dspy.Adapter, answer: Callable[..., list[dict[str, Any]]]) -> None:
        self.__dict__.update(_adapter=adapter, _answer=answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._adapter)

    def __call__(
        self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any
    ) -> list[dict[str, Any]]:
        return cast(
            list[dict[str, Any]],
            self._answer(self._adapter, lm, lm_kwargs, signature, demos, inputs),
        )

    async def acall(
        self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any
    ) -> list[dict[str, Any]]:
        return self(lm, lm_kwargs, signature, demos, inputs)


def current_adapter() -> dspy.Adapter:
    """Return ``dspy.settings.adapter``, or DSPy's default adapter."""
    return dspy.settings.adapter or dspy.ChatAdapter()


def one_call(adapter: dspy.Adapter) -> dspy.Adapter:
    """Return the adapter without its JSON fallback (a second call after a parse error), so a seed makes one call."""
    if not getattr(adapter, "use_json_adapter_fallback", False):
        return adapter
    adapter = copy.copy(adapter)
    adapter.use_json_adapter_fallback = False
    return adapter


def run_program(program: dspy.Module, /, *args: Any, **inputs: Any) -> Any:
    """Call a program through ``forward``, or through ``aforward`` if ``forward`` is missing."""
    if callable(getattr(type(program), "forward", None)):
        return program(*args, **inputs)
    return asyncio.run(program.acall(*args, **inputs))


def calling_predictor() -> Any:
    """Return the innermost module that is being called."""
    callers = dspy.settings.caller_modules
    return callers[-1] if callers else None


settings_here: Callable[[], Mapping[str, Any]] = thread_local_overrides.get
"""Return this thread's DSPy settings: all settings in a context from `carrying`, and only the overrides elsewhere."""


def carried_run() -> Any:
    """Return the run that `carrying` stored in the current context; None in other contexts."""
    return thread_local_overrides.get().get("_leret_run")


passes: list[Any] = []
"""Program runs that are being replayed, in any thread."""


def watching_run() -> Any:
    """Return the result of `carried_run`, but raise ProgramError in a thread that a replayed program started."""
    run = carried_run()
    if run is None:
        for replayed in tuple(passes):
            replayed.refuse_own_thread()
    return run


QUIET: dict[str, Any] = {"callbacks": [], "disable_history": True, "warn_on_type_mismatch": False}
"""Settings that stop DSPy from recording calls."""


def carrying(run: Any, settings: Mapping[str, Any]) -> Context:
    """Return a copy of the context that holds ``run`` and ``settings``; threads of `dspy.Parallel` inherit both."""
    context = copy_context()
    whole = {**main_thread_config, **settings_here(), **settings, "_leret_run": run}
    context.run(thread_local_overrides.set, dotdict(whole))
    return context


def forward_of(program: dspy.Module) -> Callable[..., Any]:
    """Return a module's ``forward`` to skip DSPy's bookkeeping, or the module if it overrides ``__call__``."""
    plain = type(program).__call__ is dspy.Module.__call__
    return cast(
        Callable[..., Any], object.__getattribute__(program, "forward") if plain else program
    )


def prediction_of(
    outputs: Sequence[Mapping[str, Any]], signature: type[dspy.Signature]
) -> dspy.Prediction:
    """Return the prediction with copies of a call's outputs."""
    fields: dict[str, list[Any]] = {}
    for name in outputs[0] if outputs else ():
        fields[name] = copy.deepcopy([completion[name] for completion in outputs])
    return dspy.Prediction.from_completions(fields, signature)


def last_message(
    adapter: dspy.Adapter, signature: type[dspy.Signature], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the user message that ends a call. The adapter must have DSPy's ``format``."""
    return message(
        "user", adapter.format_user_message_content(signature, dict(inputs), main_request=True)
    )


def messages_of(request: lm15.Request) -> Messages:
    """Return a request's messages, system message first; UnsupportedFeatureError for content other than text and tools.

    If the request has no tools, tool calls and results become text.
    """
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        parts = request.system
        text = parts if isinstance(parts, str) else "".join(_text(part) for part in parts)
        messages.append(message("system", text))
    tools = tools_of(request)
    for sent in request.messages:
        has_calls = any(
            isinstance(part, lm15.ToolCallPart | lm15.ToolResultPart) for part in sent.parts
        )
        if tools and has_calls:
            messages += _tool_messages(sent)
        else:
            role = {"developer": "system", "tool": "user"}.get(sent.role, sent.role)
            is_text = all(isinstance(part, lm15.TextPart) for part in sent.parts)
            separator = "" if is_text else "\n"
            messages.append(message(role, separator.join(map(_text, sent.parts))))
    if tools:
        messages[0]["tools"] = json.dumps(tools, ensure_ascii=False)
    return tuple(messages)


def tools_of(request: lm15.Request) -> list[dict[str, Any]]:
    """Return the schemas of a request's tools, or only of those that its tool choice allows."""
    choice = request.config.tool_choice
    if choice is not None and choice.parallel is False:
        fault = (
            "leret policies may call several tools in one turn; remove parallel_tool_calls=False"
        )
        raise lm15.UnsupportedFeatureError(fault, feature="parallel_tool_calls")
    names = {tool.name for tool in request.tools}
    if choice is not None and choice.allowed:
        names = {*choice.allowed}
    if choice is not None and choice.mode == "none":
        names = set()
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters,
            },
        }
        for tool in request.tools
        if tool.name in names
    ]


def _tool_messages(sent: lm15.Message) -> list[dict[str, Any]]:
    """Return a message for each tool result, or one message with the text and the tool calls."""
    results = [part for part in sent.parts if isinstance(part, lm15.ToolResultPart)]
    if results:
        return [
            message("tool", _text(part), tool_call_id=part.id, name=part.name) for part in results
        ]
    text = ""
    calls = []
    for part in sent.parts:
        if isinstance(part, lm15.ToolCallPart):
            arguments = json.dumps(part.input, ensure_ascii=False)
            function = {"name": part.name, "arguments": arguments}
            calls.append({"id": part.id, "type": "function", "function": function})
        else:
            text += _text(part)
    return [message(sent.role, text, tool_calls=calls)]


def _text(part: Any) -> str:
    if isinstance(part, lm15.ToolCallPart):  # as text, for a request without tools
        return json.dumps({"name": part.name, "args": part.input}, ensure_ascii=False)
    if isinstance(part, lm15.ToolResultPart):
        return "".join(map(_text, part.content))
    if not isinstance(part, lm15.TextPart):
        fault = f"the prompt contains a {type(part).__name__}; leret policies read only text, so remove it"
        raise lm15.UnsupportedFeatureError(fault, feature="messages")
    return cast(str, part.text)


async def complete_messages(lm: dspy.BaseLM, messages: Sequence[Message]) -> str:
    """Return the LM's reply to the messages, under its configured settings."""
    rows = [dict(message) for message in messages]
    if not isinstance(lm, dspy.LM):
        # A subclass that overrides ``forward``, which DSPy 3.5 will not support.
        [first, *_] = await lm.acall(messages=rows)
        return str(first["text"] if isinstance(first, Mapping) else first)
    settings = {
        name: value
        for name, value in lm.kwargs.items()
        if name in _GENERATION and value is not None
    }
    body = {**settings, "model": lm.model, "messages": rows}
    cached = {name: lm.kwargs[name] for name in ("rollout_id",) if lm.kwargs.get(name) is not None}
    response = await lm.acall(lm15.request_from_openai_chat(body), **cached)
    return "".join(part.text for part in response.message.parts if isinstance(part, lm15.TextPart))


def text_response(
    request: lm15.Request,
    text: str,
    n_prompt_tokens: int = 0,
    n_completion_tokens: int = 0,
    finish: str = "stop",
    read: Callable[[str, Sequence[Any]], tuple[str, Sequence[Mapping[str, Any]]]] | None = None,
) -> lm15.Response:
    """Return a response with a completion's text; ``read`` parses its tool calls if the request has tools."""
    tools = tools_of(request)
    content, calls = read(text, tools) if read and tools else (text, ())
    parts: list[Any] = []
    for index, call in enumerate(calls):
        call_id = digest(text, index)[:9]  # Mistral's templates require nine characters
        parts.append(lm15.ToolCallPart(call_id, call["name"], call["arguments"]))
    if content or not parts:
        parts.insert(0, lm15.TextPart(content))
    if finish != "length":
        finish = "tool_call" if calls else "stop"
    return lm15.Response(
        id=None,
        model=request.model,
        message=lm15.Message.assistant(parts),
        finish_reason=finish,
        usage=lm15.Usage(input_tokens=n_prompt_tokens, output_tokens=n_completion_tokens),
    )


class EngineLM(dspy.LM):
    """A ``dspy.LM`` that calls a Python function, without cache or retries."""

    def __init__(
        self, name: str, answer: Callable[[lm15.Request], lm15.Response], **settings: Any
    ) -> None:
        engine = _Engine(answer)
        engines = {"engine": engine, "async_engine": AsyncEngine(engine)}
        super().__init__(f"leret/{name}", cache=False, num_retries=0, **engines, **settings)


class StandInLM(EngineLM):
    """A stand-in for a predictor's LM during a run. ``owner`` names the predictor; "" means ``dspy.settings.lm``."""

    owner = ""

    @classmethod
    def of(
        cls, owner: str, name: str, answer: Callable[[lm15.Request], lm15.Response]
    ) -> StandInLM:
        lm = cls(name, answer)
        lm.owner = owner
        return lm

    @property
    def history(self) -> list[Any]:
        raise ProgramError(
            "it reads the history of its LM, which is empty in a replay; use what the predictor returns"
        )

    @history.setter
    def history(self, value: list[Any]) -> None:
        """Ignore the history that DSPy assigns."""

    def inspect_history(self, *args: Any, **kwargs: Any) -> None:
        """Print nothing."""


class _Engine(SharedInstance):
    supported_params = frozenset({"temperature", "max_tokens", "top_p"})
    supports_function_calling = True

    def __init__(self, answer: Callable[[lm15.Request], lm15.Response]) -> None:
        self.complete = answer

    async def acomplete(self, request: lm15.Request) -> lm15.Response:
        return self.complete(request)


class AsyncEngine(SharedInstance):
    """Async interface of an engine that has the coroutine function ``acomplete``."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.complete = engine.acomplete

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.engine,)

    async def stream(self, request: lm15.Request) -> Any:
        for event in lm15.response_to_events(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        """Do nothing: the owner of the engine closes it."""


class _MutedStream(io.TextIOBase):
    """A stream that drops the output of muted threads. Other threads (a live progress display) still write."""

    stream: TextIO

    def write(self, text: str) -> int:
        if threading.get_ident() in _muted or (
            _muted and type(threading.current_thread()).__name__ == "TMonitor"
        ):
            return len(text)  # tqdm's monitor thread redraws the bars of muted threads
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    def close(self) -> None:
        """Do nothing, also when Python ends: the stream belongs to others."""

    def isatty(self) -> bool:
        return self.stream.isatty()


_streams_lock = threading.Lock()
_log_lock = threading.RLock()
_muted: dict[int, int] = {}  # number of `muted` blocks around each muted thread
# Never deleted: a ``print`` in another thread holds no reference to its stream.
_streams = {"stdout": _MutedStream(), "stderr": _MutedStream()}


class muted:  # noqa: N801 - a context manager; a generator takes 1.5 times as long
    """Drop the output of ``threads`` (default: this thread) in the block. Blocks may overlap across threads."""

    def __init__(self, threads: Collection[int] | None = None) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        with _streams_lock:
            for name, stream in _streams.items():
                current = getattr(sys, name)
                if current is not stream:
                    stream.stream = current
                    setattr(sys, name, stream)
            for thread in [threading.get_ident()] if self._threads is None else self._threads:
                _muted[thread] = _muted.get(thread, 0) + 1

    def __exit__(self, *error: object) -> None:
        with _streams_lock:
            for thread in [threading.get_ident()] if self._threads is None else self._threads:
                _muted[thread] -= 1
                if not _muted[thread]:
                    del _muted[thread]
            for name, stream in _streams.items():
                if not _muted and getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)


@contextmanager
def suppress_output(logger: str) -> Iterator[None]:
    """Drop this thread's output and one library's log in the block; only one thread is in the block at a time."""
    log = logging.getLogger(logger)
    with _log_lock:  # the log level is global: each thread restores it
        level = log.level
        log.setLevel(logging.CRITICAL + 1)
        try:
            with muted():
                yield
        finally:
            log.setLevel(level)
