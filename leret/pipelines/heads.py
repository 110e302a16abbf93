"""Formatting the messages of a prompt without formatting its instructions and demos every time.

What stands before the last message is the same for all inputs of one predictor under one prompt, and it is most of
the work. It is kept, and only the last turn is formatted anew. Whether that gives what the adapter itself would give is
not taken for granted: the first messages of every prompt are formatted both ways, and a prompt where they differ is
formatted in full for ever after.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import dspy

from leret.pipelines.compact import CompactAdapter

__all__ = ["Heads"]

_PROOFS = 3
"""Messages of a prompt that are formatted both ways."""

_MARKER = "<<CUSTOM-TYPE-"
"""DSPy splits a message at such a marker."""

Messages = tuple[dict[str, str], ...]


class Heads:
    """The messages before the last one, by prompt.

    Args:
        adapter: any of DSPy's; one with a ``format`` of its own is asked for all messages, every time.
    """

    def __init__(self, adapter: dspy.Adapter) -> None:
        self._adapter = adapter
        self._splits = _is_turn_by_turn(adapter)
        self._kept: dict[object, Messages] = {}
        self._proofs: Counter[object] = Counter()
        self._refused: set[object] = set()

    def messages(
        self,
        key: object,
        signature: type[dspy.Signature],
        demos: Sequence[Mapping[str, Any]],
        inputs: Mapping[str, Any],
        last: Mapping[str, str] | None = None,
    ) -> Messages:
        """What ``adapter.format`` gives.

        Args:
            key: names the signature and the demos.
            signature: of the predictor, under the prompt's instructions.
            demos: of the prompt.
            inputs: by field name.
            last: the last message of the same inputs under another prompt, where it is known.
        """
        if not self._splits or key in self._refused or not all(map(_is_plain, inputs.values())):
            return self._in_full(signature, demos, inputs)
        head = self._kept.get(key)
        if head is None:
            whole = self._in_full(signature, demos, inputs)
            self._kept[key] = whole[:-1]
            return whole
        message = dict(last) if last is not None else self._last(signature, inputs)
        if not message["content"] or _MARKER in message["content"]:
            return self._in_full(signature, demos, inputs)
        made = (*head, message)
        if self._proofs[key] < _PROOFS:
            self._proofs[key] += 1
            whole = self._in_full(signature, demos, inputs)
            if made != whole:
                self._refused.add(key)
            return whole
        return made

    def _last(self, signature: type[dspy.Signature], inputs: Mapping[str, Any]) -> dict[str, str]:
        if isinstance(self._adapter, CompactAdapter):
            message: dict[str, str] = self._adapter.format(signature, (), inputs)[-1]
            return message
        content = self._adapter.format_user_message_content(signature, dict(inputs), main_request=True)
        return {"role": "user", "content": content}

    def _in_full(
        self, signature: type[dspy.Signature], demos: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]
    ) -> Messages:
        return tuple(self._adapter.format(signature, [dict(demo) for demo in demos], dict(inputs)))


def _is_turn_by_turn(adapter: dspy.Adapter) -> bool:
    """Whether an adapter puts demos first and then the inputs, as DSPy's base class does."""
    ours = inspect.unwrap(type(adapter).format)  # DSPy wraps it in every subclass
    return ours in (inspect.unwrap(dspy.Adapter.format), inspect.unwrap(CompactAdapter.format))


def _is_plain(value: Any) -> bool:
    """Text, numbers and lists of them; a history or an image is laid out over several messages."""
    return isinstance(value, str | int | float | None) or (isinstance(value, list) and all(map(_is_plain, value)))
