"""Native tool calls in completions and messages.

A completion with tool calls stays the text that the policy wrote, so it is stored, compared and
trained like any other text. A reader parses the calls from the text. The default format is that of
Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A tokenizer's
``response_template`` can define another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from leret.core.errors import PolicyError
from leret.core.types import Json, Messages, message

ToolReader = Callable[[str, Sequence[Json]], tuple[str, list[dict[str, Any]]]]
"""Maps a completion and the tools' schemas to the text and the calls.

A call has ``name`` and ``arguments``.
"""

_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe description",
        "parameters": {
            "type": "object",
            "properties": {"probe_b": {"type": "string"}, "probe_a": {"type": "integer"}},
        },
    },
}
_SHOWN = {
    "probe description": "tools",
    "probe value": "tool calls",
    "probe text": "the text beside a tool call",
    "probe result": "tool results",
}
_ARGUMENTS = '{"probe_b": "probe value é", "probe_a": 1}'
_THINKING = "<think>\nprobe thought\n</think>\n\n"


def read_calls(text: str, tools: Sequence[Json] = ()) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the first tool call, and all calls.

    If a call is malformed, the completion is all text.

    >>> read_calls('so<tool_call>{"name": "look", "arguments": {"k": 2}}</tool_call>')
    ('so', [{'name': 'look', 'arguments': {'k': 2}}])
    """
    try:
        calls = [json.loads(block) for block in _BLOCK.findall(text)]
    except (ValueError, RecursionError):
        return text, []
    if not _are_calls(calls):
        return text, []
    start = text.index("<tool_call>")
    return text[:start].rstrip(), calls


def write_calls(text: str, calls: Sequence[tuple[str, str]]) -> str:
    """Return a completion that `read_calls` parses.

    A call is a name and its arguments as JSON.
    """
    parts = [text] if text else []
    for name, arguments in calls:
        call = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
        parts.append(f"<tool_call>\n{call}\n</tool_call>")
    return "\n".join(parts)


def reader_of(tokenizer: Any) -> ToolReader:
    """Return the reader for the format of a tokenizer, or of a model directory."""
    template = None
    if not isinstance(tokenizer, Path):
        template = getattr(tokenizer, "response_template", None)
    else:
        path = tokenizer / "tokenizer_config.json"
        if path.is_file():
            template = json.loads(path.read_text(encoding="utf-8")).get("response_template")
    if template is None:
        return read_calls
    return partial(_read_by_template, template)


def _read_by_template(
    template: Any, text: str, tools: Sequence[Json] = ()
) -> tuple[str, list[dict[str, Any]]]:
    from transformers.utils.chat_parsing import parse_response

    try:
        parsed = parse_response(text, template, prefix="", tools=list(tools))
        functions = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return text, []
    calls = []
    for function in functions:
        arguments = function.get("arguments") or {}
        calls.append({"name": function.get("name"), "arguments": arguments})
    if not _are_calls(calls):
        return text, []
    return str(parsed.get("content") or ""), calls


def _are_calls(calls: list[Any]) -> bool:
    try:
        # NaN and lone surrogates cannot be sent.
        json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return bool(calls) and all(map(_is_call, calls))


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict):
        return False
    name = call.get("name")
    return isinstance(name, str) and bool(name) and isinstance(call.get("arguments"), dict)


def split_tools(
    messages: Messages, *, parsed: bool = False
) -> tuple[list[Mapping[str, Any]], list[Json]]:
    """Return the messages of a native tool call without the tools, and the tools' schemas.

    ``parsed`` converts the arguments of calls from JSON to objects, as chat templates expect;
    servers expect JSON.
    """
    turns: list[Mapping[str, Any]] = []
    for turn in messages:
        plain = dict(turn)
        plain.pop("tools", None)
        if parsed and "tool_calls" in plain:
            plain["tool_calls"] = [_with_object(call) for call in plain["tool_calls"]]
        turns.append(plain)
    return turns, json.loads(messages[0]["tools"])


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object instead of JSON."""
    function = call["function"]
    arguments = json.loads(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def refuse_template(
    render: Callable[[Messages, bool], str], name: str, read: ToolReader, thinks: bool
) -> None:
    """Refuse a chat template that leaves out tools or rewrites turns of a test conversation.

    Args:
        render: function that renders messages to text, with or without the generation prompt.
        name: name of the model, for the error.
        read: the reader for the model's tool calls.
        thinks: whether the template knows ``<think>``.

    Raises:
        PolicyError: the template leaves out tools or rewrites turns; the message says what to do.
    """
    turns = _conversation(thinks)
    otherwise = "or use an adapter with use_native_function_calling=False"
    whole = render(turns, False)
    first = render(turns[:1], True)
    turn = render(turns[:2], False)
    for word, part in _SHOWN.items():
        if word not in whole:
            fault = f"{name}'s chat template leaves out {part}"
            raise PolicyError(f"{fault}; use another model, {otherwise}")
    _, calls = read(turn.removeprefix(first), [_TOOL])
    arguments = json.loads(_ARGUMENTS)
    if turn.startswith(first) and [call["arguments"] for call in calls] != [arguments]:
        raise PolicyError(
            f"{name}'s chat template shows tool calls in a format that leret does not read; "
            "set response_template in tokenizer_config.json "
            f"(trl.chat_template_utils.add_response_schema has some), {otherwise}"
        )
    keeps_order = [list(call["arguments"]) for call in calls] == [list(arguments)]
    before_result = turn.startswith(first) and render(turns[:3], True).startswith(turn)
    before_user = whole.startswith(render(turns[:4], False))
    if not (keeps_order and before_result and before_user):
        raise PolicyError(
            f"{name}'s chat template rewrites earlier turns (order of arguments, thinking or "
            "ends), so the policy would read turns that it did not write. Save a template that "
            "keeps turns "
            "(trl.chat_template_utils.get_training_chat_template has some) "
            f"as chat_template.jinja in the model directory, {otherwise}"
        )


def _conversation(thinks: bool) -> Messages:
    call = {
        "id": "probe0001",
        "type": "function",
        "function": {"name": "probe_tool", "arguments": _ARGUMENTS},
    }
    thought = _THINKING if thinks else ""
    return (
        message("user", "probe question", tools=json.dumps([_TOOL])),
        message("assistant", f"{thought}probe text", tool_calls=[call]),
        message("tool", "probe result", tool_call_id=call["id"], name="probe_tool"),
        message("assistant", f"{thought}probe answer"),
        message("user", "probe again"),
    )
