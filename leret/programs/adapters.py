"""DSPy adapter for small policies. It leaves out field instructions, which cost about 200 tokens per call."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import dspy

from leret.config.sampling import AdapterSettings
from leret.core.classes import class_at, path_of, plain_value
from leret.core.dspy_internals import AdapterParseError, PlainJSONAdapter, parse_value
from leret.core.errors import ConfigError, ProgramError
from leret.programs.prefill import (
    AnswerAdapter,
    PrefilledChatAdapter,
    PrefilledJSONAdapter,
    PrefilledXMLAdapter,
    prefill_messages,
)


class CompactAdapter(AnswerAdapter, dspy.ChatAdapter):
    """Formats each call as bare fields, one message per turn, without a system message.

    An answer with one output is a line: a line break ends the completion. It subclasses the chat
    adapter only because DSPy's finetuning requires a chat adapter.

    Args:
        words_per_item: maximum number of words per item of a list-valued input (such as a passage).
        items: maximum number of items per list-valued input.
        demo_items: maximum number of items per list-valued input in a demo; 0 omits the field.
        instructions: whether to send the signature's instructions as a system message.
        outputs: whether to end each call with the output names, the choices of ``Literal`` outputs,
            and the types of other non-text outputs, so that a policy can distinguish signatures.
        prefill: whether to write the first output's name as the beginning of the answer, as in
            ``query:``.
    """

    def __init__(
        self,
        words_per_item: int = 40,
        items: int = 6,
        demo_items: int = 0,
        instructions: bool = False,
        outputs: bool = False,
        prefill: bool = False,
    ) -> None:
        super().__init__(use_json_adapter_fallback=False)
        self.words_per_item = words_per_item
        self.items = items
        self.demo_items = demo_items
        self.instructions = instructions
        self.outputs = outputs
        self.prefill = prefill

    def format(
        self,
        signature: type[dspy.Signature],
        demos: Sequence[Mapping[str, Any]],
        inputs: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": signature.instructions})
        for demo in demos:
            if all(name in demo for name in signature.output_fields):
                call = self._call(signature, demo, self.demo_items)
                answer = self.format_assistant_message_content(signature, demo)
                messages.append({"role": "user", "content": call})
                messages.append({"role": "assistant", "content": answer})
        call = self._call(signature, inputs, self.items)
        messages.append({"role": "user", "content": call})
        return messages + prefill_messages(self, signature)

    def stop(self, signature: type[dspy.Signature]) -> tuple[str, ...]:
        annotations = [field.annotation for field in signature.output_fields.values()]
        return ("\n",) if annotations == [str] else ()

    def format_user_message_content(
        self,
        signature: type[dspy.Signature],
        inputs: dict[str, Any],
        prefix: str = "",
        suffix: str = "",
        main_request: bool = False,
    ) -> str:
        """Return a call, or the bare fields: `dspy.ReAct` formats trajectories with this method."""
        if main_request:
            return self._call(signature, inputs, self.items)
        fields = self._inputs(signature, inputs, self.items)
        return "\n".join(filter(None, (prefix, fields, suffix)))

    def format_assistant_message_content(
        self,
        signature: type[dspy.Signature],
        outputs: Mapping[str, Any],
        missing_field_message: str | None = None,
    ) -> str:
        with_names = self.prefill or len(signature.output_fields) != 1
        lines = []
        for name in signature.output_fields:
            line = _line(outputs.get(name, missing_field_message))
            lines.append(f"{name}: {line}" if with_names else line)
        return "\n".join(lines)

    def parse(self, signature: type[dspy.Signature], completion: str) -> dict[str, Any]:
        names = list(signature.output_fields)
        if len(names) == 1:
            raw = {names[0]: completion.strip()}
        else:
            raw = _labelled(names, self.beginning(signature) + completion)
        missing = [name for name in names if not raw.get(name)]
        if missing:
            raise AdapterParseError(
                "CompactAdapter", signature, completion, f"missing fields: {', '.join(missing)}"
            )
        values = {}
        try:
            for name, field in signature.output_fields.items():
                values[name] = _bare(parse_value(raw[name], field.annotation))
        except Exception as error:
            raise AdapterParseError("CompactAdapter", signature, completion, str(error)) from error
        return values

    def _call(self, signature: type[dspy.Signature], values: Mapping[str, Any], items: int) -> str:
        text = self._inputs(signature, values, items)
        if not self.outputs:
            return text
        outputs = [_described(name, field) for name, field in signature.output_fields.items()]
        return f"{text}\noutputs: {', '.join(outputs)}"

    def _inputs(
        self, signature: type[dspy.Signature], values: Mapping[str, Any], items: int
    ) -> str:
        lines = []
        for name in signature.input_fields:
            value = values.get(name)
            if isinstance(value, list | tuple):
                rows = [self._item(item) for item in value[:items]]
                if rows:
                    lines += [f"{name}:", *rows]
            elif value is not None:
                lines.append(f"{name}: {_line(value)}")
        return "\n".join(lines)

    def _item(self, item: Any) -> str:
        cells = item.values() if isinstance(item, Mapping) else [item]
        words = " | ".join(map(str, cells)).split()
        return " ".join(words[: self.words_per_item])


def _line(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping | list):
        value = json.dumps(value, ensure_ascii=False)
    return " ".join(str(value).split())


def _described(name: str, field: Any) -> str:
    kind = get_origin(field.annotation) or field.annotation
    if kind is str:
        return name
    choices = getattr(kind, "__name__", kind)
    if kind is Literal:
        choices = " | ".join(map(str, get_args(field.annotation)))
    return f"{name} ({choices})"


def _bare(value: Any) -> Any:
    """Strip each text, as policies with word-level tokens write spaces around quotation marks."""
    if isinstance(value, dict):
        return {_bare(name): _bare(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_bare(item) for item in value]
    if isinstance(value, str):
        return value.strip()
    return value


def _labelled(names: Sequence[str], completion: str) -> dict[str, str]:
    labels = "|".join(map(re.escape, names))
    marks = list(re.finditer(rf"^\s*({labels})\s*:", completion, re.MULTILINE))
    ends = [*(mark.start() for mark in marks[1:]), len(completion)]
    values = {}
    for mark, end in zip(marks, ends, strict=False):
        values[mark[1]] = completion[mark.end() : end].strip()
    return values


def takes_tools(signature: Any) -> bool:
    """Return whether an output of a signature is `dspy.ToolCalls`."""
    return any(field.annotation is dspy.ToolCalls for field in signature.output_fields.values())


def make_adapter(settings: AdapterSettings) -> dspy.Adapter:
    """Return a recipe's adapter.

    The chat adapter does not retry with JSON, which would be a silent second call.
    """
    if settings.prefill and settings.use_native_function_calling:
        raise ConfigError(
            "adapter.prefill: a native tool call has no fixed beginning; remove prefill"
        )
    tools = {"use_native_function_calling": settings.use_native_function_calling}
    if settings.kind == "compact":
        if settings.use_native_function_calling:
            raise ConfigError("adapter: compact does not pass tools; use kind: chat, or xml")
        return CompactAdapter(**settings.model_dump(exclude={"kind", *tools}))
    if settings.prefill:
        prefilled = {
            "chat": PrefilledChatAdapter,
            "json": PrefilledJSONAdapter,
            "xml": PrefilledXMLAdapter,
        }
        return prefilled[settings.kind]()
    if settings.kind == "chat":
        return dspy.ChatAdapter(use_json_adapter_fallback=False, **tools)
    return {"json": PlainJSONAdapter, "xml": dspy.XMLAdapter}[settings.kind](**tools)


def adapter_record(adapter: dspy.Adapter) -> dict[str, Any]:
    """Return an adapter's class and arguments as JSON values.

    Raises:
        ProgramError: they do not recreate the adapter.
    """
    kind = type(adapter)
    values = vars(adapter)
    settings = {}
    for name in _argument_names(kind):
        if name in values and name != "callbacks" and plain_value(values[name]):
            settings[name] = values[name]
    record = {"class": path_of(kind), "settings": settings}
    differ = set()
    try:
        again = vars(load_adapter(record))
        for name in {**values, **again}:
            if name != "callbacks" and values.get(name) != again.get(name):
                differ.add(name)
    except (ProgramError, TypeError, ValueError) as error:
        raise ProgramError(f"the adapter {kind.__name__} cannot be saved: {error}") from error
    if differ:
        raise ProgramError(
            f"the adapter {kind.__name__} cannot be saved: its constructor does not restore "
            f"{', '.join(sorted(differ))} from JSON values; "
            "accept JSON values as arguments with these names"
        )
    return record


def _argument_names(kind: type) -> Iterator[str]:
    """Yield a class's constructor arguments, and its parent's if it takes ``**kwargs``."""
    for parent in kind.__mro__:
        constructor = vars(parent).get("__init__", object.__init__)
        parameters = inspect.signature(constructor).parameters.values()
        for parameter in parameters:
            if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
                yield parameter.name
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break


def load_adapter(record: Mapping[str, Any]) -> dspy.Adapter:
    """Recreate an adapter from its record."""
    adapter: dspy.Adapter = class_at(record["class"], dspy.Adapter)(**record["settings"])
    return adapter
