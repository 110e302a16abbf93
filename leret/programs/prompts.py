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
from leret.programs.replay import PLAIN

_PROOFS = 3
"""Messages of a prompt that are formatted both ways."""


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
        demos = to_jsonable_python(self.demos, fallback=str)
        value = {"name": self.name, "score": self.score, "demos": demos, "instructions": dict(self.instructions)}
        path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Prompt:
        """Read what ``save`` wrote; RunError where the file is missing or is not a prompt."""
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

    Instructions and demos are most of the work, so they are formatted once a prompt, and then only the last turn.
    Whether that equals what the adapter gives is tested on the first messages of every prompt, and a prompt where it
    does not is formatted in full each time; so is every call of an adapter with a ``format`` of its own.
    """

    def __init__(self, program: dspy.Module, adapter: dspy.Adapter) -> None:
        self.adapter = adapter
        self._predictors = dict(program.named_predictors())
        self._splits = is_turn_by_turn(adapter, [CompactAdapter])
        # The messages before the last one, and how often that was proven; None: formatted in full.
        self._heads: dict[tuple[str, str], tuple[Messages, int] | None] = {}
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

        ``last`` is the last one for the same inputs under another prompt, where it is known; that saves work.
        """
        key = (predictor, prompt.digest)
        head = self._heads.get(key)
        plain = all(  # a history or an image is laid out over several messages
            isinstance(value, PLAIN) or (isinstance(value, list) and all(isinstance(item, PLAIN) for item in value))
            for value in inputs.values()
        )
        if head is None or not plain:
            whole = self._in_full(predictor, inputs, prompt)
            if key not in self._heads and self._splits and plain:
                self._heads[key] = whole[:-1], 0
            return whole
        signature = self.signature(predictor, prompt)
        if last is not None:
            message = dict(last)
        elif isinstance(self.adapter, CompactAdapter):
            message = self.adapter.format(signature, (), inputs)[-1]
        else:
            message = last_message(self.adapter, signature, inputs)
        if not message["content"] or PART_MARKER in message["content"]:
            return self._in_full(predictor, inputs, prompt)
        before, n_proofs = head
        made = (*before, message)
        if n_proofs < _PROOFS:
            whole = self._in_full(predictor, inputs, prompt)
            self._heads[key] = (before, n_proofs + 1) if made == whole else None
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

    def _in_full(self, predictor: str, inputs: Mapping[str, Any], prompt: Prompt) -> Messages:
        demos = prompt.demos.get(predictor, self._predictors[predictor].demos)
        signature = self.signature(predictor, prompt)
        return tuple(self.adapter.format(signature, [dict(demo) for demo in demos], dict(inputs)))
