"""Prompts of a bank, and the formatter that turns a step into messages and a completion into outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import dspy
from pydantic_core import to_jsonable_python

from leret.core.dspy_internals import PART_MARKER, AdapterParseError, is_turn_by_turn, last_message
from leret.core.errors import RunError
from leret.core.types import digest
from leret.policies.base import Messages
from leret.programs.adapters import CompactAdapter

_PROOFS = 3
"""Messages of a prompt that are formatted both ways."""

_PLAIN = (str, int, float, bool, type(None))


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


@dataclass
class _Head:
    """The messages before the last one, which are the same for all inputs of a predictor under a prompt."""

    messages: Messages
    n_proofs: int = 0


class Formatter:
    """Turns a step into messages and a completion into outputs, exactly as the DSPy program would.

    Instructions and demos are most of the work, so they are formatted once a prompt, and then only the last turn.
    Whether that equals what the adapter gives is tested on the first messages of every prompt, and a prompt where it
    does not is formatted in full each time; so is every call of an adapter with a ``format`` of its own.
    """

    def __init__(self, program: dspy.Module, adapter: dspy.Adapter) -> None:
        self.adapter = adapter
        self._predictors = dict(program.named_predictors())
        self._splits = is_turn_by_turn(adapter, [CompactAdapter])
        self._heads: dict[tuple[str, str], _Head | None] = {}  # None: formatted in full
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
    ) -> Messages:
        """The messages that are sent to the LM.

        Args:
            predictor: its name.
            inputs: by field name.
            prompt: of the bank.
            last: the last message of the same inputs under another prompt, where it is known; saves work.
        """
        key = (predictor, prompt.digest)
        head = self._heads.get(key)
        plain = all(  # a history or an image is laid out over several messages
            isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(item, _PLAIN) for item in value))
            for value in inputs.values()
        )
        if head is None or not plain:
            whole = self._in_full(predictor, inputs, prompt)
            if key not in self._heads and self._splits and plain:
                self._heads[key] = _Head(whole[:-1])
            return whole
        message = dict(last) if last is not None else self._last(predictor, inputs, prompt)
        if not message["content"] or PART_MARKER in message["content"]:
            return self._in_full(predictor, inputs, prompt)
        made = (*head.messages, message)
        if head.n_proofs < _PROOFS:
            head.n_proofs += 1
            whole = self._in_full(predictor, inputs, prompt)
            if made != whole:
                self._heads[key] = None
            return whole
        return made

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

    def _last(self, predictor: str, inputs: Mapping[str, Any], prompt: Prompt) -> dict[str, str]:
        signature = self.signature(predictor, prompt)
        if isinstance(self.adapter, CompactAdapter):
            return self.adapter.format(signature, (), inputs)[-1]
        return last_message(self.adapter, signature, inputs)

    def _in_full(self, predictor: str, inputs: Mapping[str, Any], prompt: Prompt) -> Messages:
        demos = prompt.demos.get(predictor, self._predictors[predictor].demos)
        signature = self.signature(predictor, prompt)
        return tuple(self.adapter.format(signature, [dict(demo) for demo in demos], dict(inputs)))
