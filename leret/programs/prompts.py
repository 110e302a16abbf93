"""Formatting the messages of a prompt without formatting its instructions and demos every time.

What stands before the last message is the same for all inputs of one predictor under one prompt, and it is most of
the work. It is kept, and only the last turn is formatted anew. Whether that gives what the adapter itself would give is
not taken for granted: the first messages of every prompt are formatted both ways, and a prompt where they differ is
formatted in full for ever after.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError
from pydantic_core import to_jsonable_python

from leret.core.errors import RunError
from leret.core.types import digest
from leret.programs.adapters import CompactAdapter

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


pass


@dataclass(frozen=True)
class Prompt:
    """Demos, and instructions where they differ from the program's own, for each predictor by name.

    Attributes:
        name: "0" is the zero-shot prompt; few-shot ones count from "1".
        score: mean reward on the bank's dev questions; None where it was not measured.
    """

    name: str
    demos: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    instructions: Mapping[str, str] = field(default_factory=dict)
    score: float | None = None

    @cached_property
    def digest(self) -> str:
        """Names what the prompt says, not what it is called."""
        return digest(to_jsonable_python(self.demos), dict(self.instructions))

    def save(self, path: Path) -> None:
        """Write as JSON."""
        value = {
            "name": self.name,
            "score": self.score,
            "demos": to_jsonable_python(self.demos, fallback=str),
            "instructions": dict(self.instructions),
        }
        path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Prompt:
        """Read what ``save`` wrote.

        Raises:
            RunError: the file is missing or is not a prompt.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if not all(isinstance(demos, list) for demos in value["demos"].values()):
                raise TypeError("demos of a predictor are no list")
            return cls(str(value["name"]), value["demos"], value.get("instructions", {}), value.get("score"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path} is not a prompt of a bank ({type(error).__name__}: {error}); a prompt file is "
                '{"name": NAME, "demos": {PREDICTOR: [{FIELD: VALUE, ...}, ...]}}'
            ) from error


ZERO_SHOT = Prompt("0")


class Formatter:
    """Turns a step into messages and a completion into outputs, exactly as the DSPy program would.

    Args:
        program: its predictors' signatures and own demos are read.
        adapter: any DSPy adapter.
    """

    def __init__(self, program: dspy.Module, adapter: dspy.Adapter) -> None:
        self.adapter = adapter
        self._predictors = dict(program.named_predictors())
        self._heads = Heads(adapter)
        self._signatures: dict[tuple[str, str], type[dspy.Signature]] = {}

    def signature(self, predictor: str, prompt: Prompt = ZERO_SHOT) -> type[dspy.Signature]:
        """The predictor's signature under a prompt's instructions."""
        text = prompt.instructions.get(predictor)
        signature: type[dspy.Signature] = self._predictors[predictor].signature
        if text is None:
            return signature
        key = (predictor, prompt.digest)  # making one takes a thousand times as long as finding it
        if key not in self._signatures:
            self._signatures[key] = signature.with_instructions(text)
        return self._signatures[key]

    def messages(
        self,
        predictor: str,
        inputs: Mapping[str, Any],
        prompt: Prompt = ZERO_SHOT,
        last: Mapping[str, str] | None = None,
    ) -> tuple[dict[str, str], ...]:
        """What is sent to the LM for these inputs under this prompt.

        Args:
            predictor: its name.
            inputs: by field name.
            prompt: of the bank.
            last: the last message of the same inputs under another prompt, where it is known; saves work.
        """
        demos = prompt.demos.get(predictor, self._predictors[predictor].demos)
        return self._heads.messages((predictor, prompt.digest), self.signature(predictor, prompt), demos, inputs, last)

    def parse(self, predictor: str, completion: str) -> dict[str, Any] | None:
        """The outputs in a completion, or None where it is not in the adapter's format."""
        try:
            outputs: dict[str, Any] = self.adapter.parse(self._predictors[predictor].signature, completion)
        except AdapterParseError:
            return None
        return outputs

    def completion(self, predictor: str, outputs: Mapping[str, Any]) -> str:
        """The completion that carries these outputs."""
        return str(self.adapter.format_assistant_message_content(self._predictors[predictor].signature, dict(outputs)))
