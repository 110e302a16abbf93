"""A DSPy adapter for small policies: the fields and nothing else.

The chat adapter spends about 200 tokens of instructions on every call, which a policy of a few million parameters
cannot read and a context of 512 tokens cannot hold. This one sends the inputs, field by field, and takes back the
bare value of the output field (or one ``name: value`` line a field where a signature has several).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import dspy

from leret.config.sampling import AdapterSettings
from leret.core.classes import class_at, path_of, plain_value
from leret.core.dspy_internals import AdapterParseError, PlainJSONAdapter, parse_value
from leret.core.errors import ProgramError


class CompactAdapter(dspy.ChatAdapter):
    """Formats a call as bare fields, one message a turn, without a system message.

    Of a chat adapter it has the kind alone: DSPy's finetuning and GRPO take no other.

    Args:
        words_per_item: words kept of every item of a list-valued input (a passage of the context).
        items: items kept of a list-valued input; the first ones.
        demo_items: items kept of a list-valued input in a demo; 0 leaves the field out.
        instructions: send the signature's instructions as a system message.
        outputs: end a call with the names of the outputs, the choices of a ``Literal`` and other types than text; a
            policy that answers several signatures tells them apart by it.
    """

    def __init__(
        self,
        words_per_item: int = 40,
        items: int = 6,
        demo_items: int = 0,
        instructions: bool = False,
        outputs: bool = False,
    ) -> None:
        super().__init__(use_json_adapter_fallback=False)
        self.words_per_item, self.items, self.demo_items = words_per_item, items, demo_items
        self.instructions, self.outputs = instructions, outputs

    def settings(self) -> dict[str, Any]:
        """The arguments that rebuild this adapter."""
        names = ("words_per_item", "items", "demo_items", "instructions", "outputs")
        return {name: getattr(self, name) for name in names}

    def format(
        self, signature: type[dspy.Signature], demos: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Messages of one call: the demos as turns, then the inputs."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": signature.instructions})
        for demo in demos:
            if all(name in demo for name in signature.output_fields):
                answer = self.format_assistant_message_content(signature, demo)
                messages.append({"role": "user", "content": self._call(signature, demo, self.demo_items)})
                messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": self._call(signature, inputs, self.items)})
        return messages

    def format_user_message_content(
        self,
        signature: type[dspy.Signature],
        inputs: dict[str, Any],
        prefix: str = "",
        suffix: str = "",
        main_request: bool = False,
    ) -> str:
        """Fields and nothing else; `dspy.ReAct` lays a trajectory out so."""
        return "\n".join(filter(None, (prefix, self._inputs(signature, inputs, self.items), suffix)))

    def format_assistant_message_content(
        self, signature: type[dspy.Signature], outputs: Mapping[str, Any], missing_field_message: str | None = None
    ) -> str:
        """The completion that carries these outputs; ``parse`` undoes it."""
        values = {name: _line(outputs.get(name, missing_field_message)) for name in signature.output_fields}
        if len(values) == 1:
            return next(iter(values.values()))
        return "\n".join(f"{name}: {value}" for name, value in values.items())

    def parse(self, signature: type[dspy.Signature], completion: str) -> dict[str, Any]:
        names = list(signature.output_fields)
        raw = {names[0]: completion.strip()} if len(names) == 1 else _labelled(names, completion)
        missing = [name for name in names if not raw.get(name)]
        if missing:
            raise AdapterParseError("CompactAdapter", signature, completion, f"no value for {', '.join(missing)}")
        try:
            return {name: _bare(parse_value(raw[name], signature.output_fields[name].annotation)) for name in names}
        except Exception as error:
            raise AdapterParseError("CompactAdapter", signature, completion, str(error)) from error

    def _call(self, signature: type[dspy.Signature], values: Mapping[str, Any], items: int) -> str:
        text = self._inputs(signature, values, items)
        if not self.outputs:
            return text
        return f"{text}\noutputs: {', '.join(_described(*field) for field in signature.output_fields.items())}"

    def _inputs(self, signature: type[dspy.Signature], values: Mapping[str, Any], items: int) -> str:
        lines = []
        for name in signature.input_fields:
            value = values.get(name)
            if isinstance(value, list | tuple):
                kept = [" ".join(_item(item).split()[: self.words_per_item]) for item in value[:items]]
                lines += [f"{name}:", *kept] if kept else []
            elif value is not None:
                lines.append(f"{name}: {_line(value)}")
        return "\n".join(lines)


def _item(value: Any) -> str:
    return " | ".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)


def _line(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else value
    return " ".join("" if text is None else str(text).split())


def _described(name: str, field: Any) -> str:
    kind = get_origin(field.annotation) or field.annotation
    if kind is str:
        return name
    choices = " | ".join(map(str, get_args(field.annotation))) if kind is Literal else getattr(kind, "__name__", kind)
    return f"{name} ({choices})"


def _bare(value: Any) -> Any:
    """Without the spaces that a policy whose tokens are words writes beside every quotation mark."""
    if isinstance(value, dict):
        return {_bare(name): _bare(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_bare(one) for one in value]
    return value.strip() if isinstance(value, str) else value


def _labelled(names: Sequence[str], completion: str) -> dict[str, str]:
    """Values by ``name:`` at a line's start; a value runs to the next label."""
    label = re.compile(rf"^\s*({'|'.join(map(re.escape, names))})\s*:", re.MULTILINE)
    marks = list(label.finditer(completion))
    ends = [mark.start() for mark in marks[1:]] + [len(completion)]
    return {mark[1]: completion[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=False)}


def make_adapter(settings: AdapterSettings) -> dspy.Adapter:
    """The adapter that a recipe names.

    The chat adapter's silent second call through JSON is off: one state and one seed are one call, and a completion
    that does not parse is a fact to record.
    """
    match settings.kind:
        case "compact":
            return CompactAdapter(**settings.model_dump(exclude={"kind"}))
        case "json":
            return PlainJSONAdapter()
        case "xml":
            return dspy.XMLAdapter()
        case "chat":
            return dspy.ChatAdapter(use_json_adapter_fallback=False)


def adapter_record(adapter: dspy.Adapter) -> dict[str, Any]:
    """Class and constructor arguments of an adapter, in JSON values; callbacks, which only listen, are left out.

    Raises:
        ProgramError: these arguments do not make an equal adapter.
    """
    kind, names = type(adapter), dict[str, None]()
    for parent in kind.__mro__:
        parameters = inspect.signature(vars(parent).get("__init__", object.__init__)).parameters.values()
        names |= {one.name: None for one in parameters if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}}
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    held = vars(adapter)
    settings = {name: held[name] for name in names if name in held and name != "callbacks" and plain_value(held[name])}
    record = {"class": path_of(kind), "settings": settings}
    try:
        again = vars(load_adapter(record))
        differ = [name for name in {**held, **again} if name != "callbacks" and held.get(name) != again.get(name)]
    except (ProgramError, TypeError, ValueError) as error:
        raise ProgramError(f"the adapter {kind.__name__} cannot be saved: {error}") from error
    if differ:
        raise ProgramError(
            f"the adapter {kind.__name__} cannot be saved: its constructor does not make {', '.join(sorted(differ))} "
            "again of JSON values; let it take such under these names"
        )
    return record


def load_adapter(record: Mapping[str, Any]) -> dspy.Adapter:
    """The adapter of a record."""
    adapter: dspy.Adapter = class_at(record["class"], dspy.Adapter)(**record["settings"])
    return adapter
