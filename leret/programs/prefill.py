"""DSPy adapters that write the fixed beginning of the answer themselves, and know where the answer ends.

The beginning is the last message of a request, with role assistant: policies continue it. A
completion is the text after the beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dspy

from leret.core.dspy_internals import PlainJSONAdapter

_Adapter: Any = dspy.ChatAdapter if TYPE_CHECKING else object
_VALUE = "\N{OBJECT REPLACEMENT CHARACTER}"
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
"""Request keys of vLLM and SGLang that make a server continue the last message."""


class AnswerAdapter(_Adapter):
    """Mixin for adapters that may begin the answer (``prefill``) and know the strings that end it.

    It is no adapter itself: DSPy gives each subclass of an adapter its parent's ``format`` and
    ``parse``.
    """

    prefill = False

    def beginning(self, signature: Any) -> str:
        """Return the text of an answer before its first value; "" without ``prefill``."""
        if not self.prefill or not signature.output_fields:
            return ""
        [name, *_] = signature.output_fields
        values = dict.fromkeys(signature.output_fields, "") | {name: _VALUE}
        before = str(self.format_assistant_message_content(signature, values)).partition(_VALUE)[0]
        if signature.output_fields[name].annotation is not str:
            before = before.rstrip('"')  # JSON: the value may be a list or a number
        return before.rstrip(" ")  # LMs write words with the space before them

    def after_beginning(self, signature: Any, outputs: Any) -> str:
        """Return the completion with these outputs."""
        answer = str(self.format_assistant_message_content(signature, outputs))
        return answer.removeprefix(self.beginning(signature))

    def stop(self, signature: Any) -> tuple[str, ...]:
        """Return the strings that end an answer."""
        return ()

    def __call__(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
        lm_kwargs = self._with_ending(lm, lm_kwargs, signature)
        return super().__call__(lm, lm_kwargs, signature, demos, inputs)

    async def acall(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
        lm_kwargs = self._with_ending(lm, lm_kwargs, signature)
        return await super().acall(lm, lm_kwargs, signature, demos, inputs)

    def format_finetune_data(
        self, signature: Any, demos: Any, inputs: Any, outputs: Any
    ) -> dict[str, list[Any]]:
        """Return the messages of a call, and the answer after its beginning as the last message."""
        answer = {"role": "assistant", "content": self.after_beginning(signature, outputs)}
        return {"messages": [*self.format(signature, demos, inputs), answer]}

    def _with_ending(self, lm: Any, lm_kwargs: Any, signature: Any) -> dict[str, Any]:
        """Add stop strings, and for other LMs the request keys that continue the last message."""
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

    def format(self, signature: Any, demos: Any, inputs: Any) -> list[dict[str, Any]]:
        return [*super().format(signature, demos, inputs), *prefill_messages(self, signature)]

    def parse(self, signature: Any, completion: str) -> Any:
        return super().parse(signature, self.beginning(signature) + completion)


class PrefilledChatAdapter(_Prefilled, dspy.ChatAdapter):
    """DSPy's chat adapter with the header of the first output as the beginning of the answer."""

    def __init__(self) -> None:
        super().__init__(use_json_adapter_fallback=False)

    def stop(self, signature: Any) -> tuple[str, ...]:
        return ("[[ ## completed ## ]]",)


class PrefilledJSONAdapter(_Prefilled, PlainJSONAdapter):
    """DSPy's JSON adapter; the answer begins with the first key and a text's opening quote."""

    def __init__(self) -> None:
        super().__init__(use_native_function_calling=False)

    def stop(self, signature: Any) -> tuple[str, ...]:
        annotations = {field.annotation for field in signature.output_fields.values()}
        if annotations != {str}:
            return ()
        if len(signature.output_fields) > 1:
            return ('"}', '"\n}')
        return ('"}', '",', '"\n', "\n")


class PrefilledXMLAdapter(_Prefilled, dspy.XMLAdapter):
    """DSPy's XML adapter with the first tag as the beginning of the answer."""

    def __init__(self) -> None:
        super().__init__(use_json_adapter_fallback=False)


def prefill_messages(adapter: Any, signature: Any) -> list[dict[str, Any]]:
    """Return the message with the beginning of the answer; [] if the adapter sends none."""
    text = adapter.beginning(signature) if isinstance(adapter, AnswerAdapter) else ""
    if not text:
        return []
    return [{"role": "assistant", "content": text}]
