"""Native tool calls in completions and messages.

A completion with tool calls stays the text that the policy wrote, so it is stored, compared and trained like any other
text. A reader parses the calls from the text. The default format is that of Hermes and Qwen:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A tokenizer's ``response_template`` can define another.
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
"""Function of a completion and the tools' schemas that returns the text and the calls (``name`` and ``arguments``)."""

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
    """Return the text before the first tool call, and all calls. If a call is malformed, the completion is all text.

    >>> read_calls('so<tool_call>{"name": "look", "arguments": {"k": 2}}</tool_call>')
    ('so', [{'name': 'look', 'arguments': {'k': 2}}])
    """
    try:
        calls = [json.loads(block) for block in _BLOCK.findall(text)]
    except (ValueError, RecursionError):
        return text, []
    return (text[: text.index("<tool_call>")].rstrip(), calls) if _are_calls(calls) else (text, [])


def write_calls(text: str, calls: Sequence[tuple[str, str]]) -> str:
    """Return a completion from text and calls, each a name and its arguments as JSON; `read_calls` parses it."""
    objects = [
        f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls
    ]
    return "\n".join(
        [*([text] if text else []), *(f"<tool_call>\n{one}\n</tool_call>" for one in objects)]
    )


def reader_of(tokenizer: Any) -> ToolReader:
    """Return the reader for the format of a tokenizer, or of a model directory."""
    if isinstance(tokenizer, Path):
        config = tokenizer / "tokenizer_config.json"
        template = (
            json.loads(config.read_text(encoding="utf-8")).get("response_template")
            if config.is_file()
            else None
        )
    else:
        template = getattr(tokenizer, "response_template", None)
    return read_calls if template is None else partial(_read_by_template, template)


def _read_by_template(
    template: Any, text: str, tools: Sequence[Json] = ()
) -> tuple[str, list[dict[str, Any]]]:
    from transformers.utils.chat_parsing import parse_response

    try:
        parsed = parse_response(text, template, prefix="", tools=list(tools))
        calls = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return text, []
    calls = [{"name": call.get("name"), "arguments": call.get("arguments") or {}} for call in calls]
    return (str(parsed.get("content") or ""), calls) if _are_calls(calls) else (text, [])


def _are_calls(calls: list[Any]) -> bool:
    try:
        json.dumps(
            calls, ensure_ascii=False, allow_nan=False
        ).encode()  # NaN and lone surrogates cannot be sent
    except ValueError:
        return False
    known = (
        isinstance(one, dict) and one.get("name") and isinstance(one.get("arguments"), dict)
        for one in calls
    )
    return bool(calls) and all(known) and all(isinstance(one["name"], str) for one in calls)


def split_tools(
    messages: Messages, *, parsed: bool = False
) -> tuple[list[Mapping[str, Any]], list[Json]]:
    """Return messages without the tools, and the tools' schemas (empty without native tool calls).

    ``parsed`` converts the arguments of calls from JSON to objects, as chat templates expect; servers expect JSON.
    """
    if not (messages and messages[0].get("tools")):
        return list(messages), []
    plain = [{name: value for name, value in one.items() if name != "tools"} for one in messages]
    for one in plain if parsed else ():
        if "tool_calls" in one:
            functions = [call["function"] for call in one["tool_calls"]]
            read = [
                {**function, "arguments": json.loads(function["arguments"])}
                for function in functions
            ]
            calls = zip(one["tool_calls"], read, strict=True)
            one["tool_calls"] = [{**call, "function": function} for call, function in calls]
    return [*plain], json.loads(messages[0]["tools"])


def refuse_template(
    render: Callable[[Messages, bool], str], name: str, read: ToolReader, thinks: bool
) -> None:
    """Render a test conversation, and refuse a chat template that leaves out tools or rewrites earlier turns.

    Args:
        render: function that renders messages to text, with or without the generation prompt.
        name: name of the model, for the error.
        read: the reader for the model's tool calls.
        thinks: whether the template knows ``<think>``.

    Raises:
        PolicyError: the template leaves out tools or rewrites turns; the message says which, and what to do.
    """
    turns, otherwise = (
        _conversation(thinks),
        "or use an adapter with use_native_function_calling=False",
    )
    whole, first, turn = render(turns, False), render(turns[:1], True), render(turns[:2], False)
    if missing := [what for word, what in _SHOWN.items() if word not in whole]:
        raise PolicyError(
            f"{name}'s chat template leaves out {missing[0]}; use another model, {otherwise}"
        )
    calls, arguments = read(turn.removeprefix(first), [_TOOL])[1], json.loads(_ARGUMENTS)
    if turn.startswith(first) and [call["arguments"] for call in calls] != [arguments]:
        raise PolicyError(
            f"{name}'s chat template shows tool calls in a format that leret does not read; set response_template in "
            f"tokenizer_config.json (trl.chat_template_utils.add_response_schema has some), {otherwise}"
        )
    changes = {
        "a turn does not begin with the generation prompt": not turn.startswith(first),
        "the arguments of a tool call change order": [list(one["arguments"]) for one in calls]
        != [[*arguments]],
        "a turn changes when a tool result follows": not render(turns[:3], True).startswith(turn),
        "a turn changes (for example, loses its thinking) when a user message follows": not whole.startswith(
            render(turns[:4], False)
        ),
    }
    if where := [what for what, changed in changes.items() if changed]:
        raise PolicyError(
            f"{name}'s chat template rewrites earlier turns: {where[0]}, so the policy "
            "would read turns that it did not write. Save a template that keeps turns "
            "(trl.chat_template_utils.get_training_chat_template has some) as chat_template.jinja in the model "
            f"directory, {otherwise}"
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
