"""Messages to tokens by the model's own chat template, and tokens back to text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leret.errors import PolicyError
from leret.policies.base import Completion, Messages
from leret.policies.replies import PromptTooLongError
from leret.policies.templates import apply_template

if TYPE_CHECKING:
    from leret.policies.generate import Generated

__all__ = ["EncodedPrompt", "PromptEncoder", "n_common"]

_BEGINNINGS = 256


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in tokens.

    Attributes:
        n_shared: tokens of all messages but the last: demonstrations and instructions, the same at many states.
        room: completion tokens that still fit the model's positions.
    """

    token_ids: tuple[int, ...]
    n_shared: int
    room: int


class PromptEncoder:
    """Encodes for one tokenizer.

    Args:
        tokenizer: with a chat template.
        n_positions: the model's longest sequence; None where it has no limit.
        name: of the model, for messages.
        enable_thinking: of the chat template; None leaves it to the template.
    """

    def __init__(self, tokenizer: Any, n_positions: int | None, name: str, enable_thinking: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._n_positions = n_positions
        self._name = name
        self._enable_thinking = enable_thinking
        self._ends: frozenset[int] = frozenset()
        # A fast tokenizer refuses to be changed and read at the same time, and padding settings are changed by a call.
        self._lock = threading.RLock()
        self._beginnings: OrderedDict[tuple[tuple[tuple[str, str], ...], ...], list[int]] = OrderedDict()

    def set_ends(self, ids: int | Sequence[int] | None) -> list[int]:
        """Take the end tokens of the generation configuration, the tokenizer's own included.

        Raises:
            PolicyError: there is none, so that no completion would ever end.
        """
        given = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        own = self._tokenizer.eos_token_id
        self._ends = frozenset([*given, *([] if own is None else [own])])
        if not self._ends:
            raise PolicyError(f"{self._name} has no end token; set eos_token_id in its generation_config.json")
        return sorted(self._ends)

    def encode(self, messages: Messages) -> EncodedPrompt:
        """The prompt that asks for the next assistant message.

        Raises:
            PromptTooLongError: it has as many tokens as the model has positions, or more.
            PolicyError: the template refuses the messages.
        """
        with self._lock:
            ids = self._render(messages, add_generation_prompt=True)
            n_shared = n_common(ids, self._beginning(messages[:-1])) if len(messages) > 1 else 0
        if self._n_positions is not None and len(ids) >= self._n_positions:
            raise PromptTooLongError(
                f"a prompt of {len(ids)} tokens does not fit {self._name}, which has {self._n_positions} positions; "
                "send fewer or shorter passages and demos (adapter.items, adapter.words_per_item, sampling.prompts)"
            )
        room = 2**31 if self._n_positions is None else self._n_positions - len(ids)
        return EncodedPrompt(tuple(ids), n_shared, room)

    def to_text(self, ids: Sequence[int]) -> str:
        """Tokens as text, special tokens and the end token left out, spaces as the tokenizer gives them."""
        kept = ids[:-1] if ids and ids[-1] in self._ends else ids
        with self._lock:
            text: str = self._tokenizer.decode(list(kept), skip_special_tokens=True)
        return text

    def completion(self, n_prompt: int, generated: Generated, stop: Sequence[str]) -> Completion:
        """What was generated, as text up to the first stop string."""
        text = self.to_text(generated.token_ids)
        ends = [found for found in (text.find(mark) for mark in stop) if found >= 0]
        return Completion(
            text=text[: min(ends)] if ends else text,
            finish_reason=generated.finish_reason,
            n_prompt_tokens=n_prompt,
            n_completion_tokens=len(generated.token_ids),
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
        )

    def _render(self, messages: Messages, add_generation_prompt: bool) -> list[int]:
        how = {"add_generation_prompt": add_generation_prompt, "tokenize": True, "return_dict": True}
        encoded = apply_template(self._tokenizer, messages, self._name, enable_thinking=self._enable_thinking, **how)
        ids: list[int] = list(encoded["input_ids"])
        return ids

    def _beginning(self, messages: Messages) -> list[int]:
        key = tuple(tuple(sorted(message.items())) for message in messages)
        known = self._beginnings.get(key)
        if known is None:
            try:
                known = self._render(messages, add_generation_prompt=False)
            except PolicyError:
                known = []  # some templates insist on a last user message; then nothing is shared
            self._beginnings[key] = known
            if len(self._beginnings) > _BEGINNINGS:
                self._beginnings.popitem(last=False)
        return known


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts begin with alike."""
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n
