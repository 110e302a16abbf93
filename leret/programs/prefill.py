"""DSPy adapters that write the fixed beginning of the answer themselves, and know where the answer ends.

The beginning is the last message of a request, with role assistant: policies continue it. A completion is the text
after the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dspy

from leret.core.dspy_internals import PlainJSONAdapter

_Adapter: Any = dspy.ChatAdapter if TYPE_CHECKING else object
_VALUE = "\N{OBJECT REPLACEMENT CHARACTER}"
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
"""Request keys of vLLM and SGLang that make a server continue the last message."""


class AnswerAdapter(_Adapter):  # type: ignore[misc]
    """Mixin for adapters that may send the beginning of the answer (``prefill``), and the strings that end it.

    It is no adapter itself: DSPy gives each subclass of an adapter its parent's ``format`` and ``parse``.
    """

    prefill = False

    def beginning(self, signature: type[dspy.Signature]) -> str:
        """Return the text of an answer before its first value; "" without ``prefill``."""
        if not self.prefill or not signature.output_fields:
            return ""
        [name, *_] = signature.output_fields
        values = dict.fromkeys(signature.output_fields, "") | {name: _VALUE}
        content = self.format_assistant_message_content(signature, values)
        before = content.partition(_VALUE)[0]
        if signature.output_fields[name].annotation is not str:
            before = before.rstrip('"')  # JSON: the value may be a list or a number
        return before.rstrip(" ")  # LMs write words with the space before them

    def stop(self, signature: type[dspy.Signature]) -> tuple[str, ...]:
        """Return the strings that end an answer."""
        return ()

    def __call__(
        self,
        lm: dspy.BaseLM,
        lm_kwargs: dict[str, Any],
        signature: type[dspy.Signature],
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        return super().__call__(lm, self._with_ending(lm, lm_kwargs, signature), signature, demos, inputs)

    async def acall(
        self,
        lm: dspy.BaseLM,
        lm_kwargs: dict[str, Any],
        signature: type[dspy.Signature],
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        return await super().acall(lm, self._with_ending(lm, lm_kwargs, signature), signature, demos, inputs)

    def format_finetune_data(
        self,
        signature: type[dspy.Signature],
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
        outputs: dict[str, Any],
    ) -> dict[str, list[Any]]:
        """Return the messages of a call, and the answer after its beginning as the last message."""
        answer = self.format_assistant_message_content(signature, outputs)
        text = answer.removeprefix(self.beginning(signature))
        messages = self.format(signature, demos, inputs)
        return {"messages": [*messages, {"role": "assistant", "content": text}]}

    def _with_ending(
        self, lm: dspy.BaseLM, lm_kwargs: Mapping[str, Any], signature: type[dspy.Signature]
    ) -> dict[str, Any]:
        """Add the stop strings, and for other LMs than leret's the request keys that continue the last message."""
        keys = dict(lm_kwargs)
        stop = self.stop(signature)
        if stop and "stop" not in lm.kwargs:
            keys.setdefault("stop", list(stop))
        if self.beginning(signature) and not lm.model.startswith("leret/"):
            body = keys.get("extra_body") or lm.kwargs.get("extra_body") or {}
            keys["extra_body"] = {**CONTINUE, **body}
        return keys


class _Prefilled(AnswerAdapter):
    prefill = True

    def format(
        self, signature: type[dspy.Signature], demos: list[dict[str, Any]], inputs: dict[str, Any]
    ) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = super().format(signature, demos, inputs)
        return [*messages, *prefill_messages(self, signature)]

    def parse(self, signature: type[dspy.Signature], completion: str) -> dict[str, Any]:
        fields: dict[str, Any] = super().parse(signature, self.beginning(signature) + completion)
        return fields


class PrefilledChatAdapter(_Prefilled, dspy.ChatAdapter):
    """DSPy's chat adapter with the header of the first output as the beginning of the answer."""

    def __init__(self) -> None:
        super().__init__(use_json_adapter_fallback=False)

    def stop(self, signature: type[dspy.Signature]) -> tuple[str, ...]:
        return ("[[ ## completed ## ]]",)


class PrefilledJSONAdapter(_Prefilled, PlainJSONAdapter):
    """DSPy's JSON adapter with the first key, and the opening quote of a text, as the beginning of the answer."""

    def __init__(self) -> None:
        super().__init__(use_native_function_calling=False)

    def stop(self, signature: type[dspy.Signature]) -> tuple[str, ...]:
        if not all(field.annotation is str for field in signature.output_fields.values()):
            return ()
        if len(signature.output_fields) == 1:
            return ('"}', '",', '"\n', "\n")
        return ('"}', '"\n}')


class PrefilledXMLAdapter(_Prefilled, dspy.XMLAdapter):
    """DSPy's XML adapter with the first tag as the beginning of the answer."""

    def __init__(self) -> None:
        super().__init__(use_json_adapter_fallback=False)


def prefill_messages(adapter: dspy.Adapter, signature: type[dspy.Signature]) -> list[dict[str, Any]]:
    """Return the message with the beginning of the answer; [] if the adapter sends none."""
    text = adapter.beginning(signature) if isinstance(adapter, AnswerAdapter) else ""
    return [{"role": "assistant", "content": text}] if text else []


def stop_strings(adapter: dspy.Adapter | None, signature: Any) -> tuple[str, ...]:
    """Return the strings that end an answer under an adapter."""
    if signature is None or not isinstance(adapter, AnswerAdapter):
        return ()
    return adapter.stop(signature)


def answer_after_beginning(adapter: dspy.Adapter, signature: type[dspy.Signature], outputs: Mapping[str, Any]) -> str:
    """Return the completion with these outputs."""
    content = str(adapter.format_assistant_message_content(signature, dict(outputs)))
    beginnings: Sequence[dict[str, Any]] = prefill_messages(adapter, signature)
    return content.removeprefix(beginnings[0]["content"]) if beginnings else content
