"""Conversion of messages to prompts by chat templates, shared by sampling, training and evaluation."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from leret.core.errors import PolicyError
from leret.core.types import Messages, message, text_of
from leret.policies.base import Completion, PromptTooLongError
from leret.policies.tool_calls import reader_of, refuse_template, split_tools

if TYPE_CHECKING:
    from leret.policies.local.decoder import Generated

_BEGINNINGS = 256  # number of prompt beginnings cached as tokens


def apply_template(
    tokenizer: Any, messages: Messages, name: str, *, enable_thinking: bool | None = None, **how: Any
) -> Any:
    """Call ``tokenizer.apply_chat_template``. All prompts in leret are created by this function.

    If the template rejects system messages (Gemma 2's does), the system message is prepended to the user message.
    A prompt that ends with an assistant message is continued there. If ``enable_thinking`` is None, the template's
    default applies. ``name`` is the model's name in errors.
    """
    from jinja2 import TemplateError

    refusals = (TemplateError, TypeError, ValueError, KeyError)
    if enable_thinking is not None:
        how["enable_thinking"] = enable_thinking
    if how.get("add_generation_prompt") and messages[-1]["role"] == "assistant":
        how |= {"add_generation_prompt": False, "continue_final_message": True}
    turns, tools = split_tools(messages, parsed=True)
    if tools:
        how["tools"] = tools
    try:
        return tokenizer.apply_chat_template(turns, **how)
    except refusals as error:
        if [one.get("role") for one in turns[:2]] == ["system", "user"]:
            first = message("user", f"{text_of(turns[0])}\n\n{text_of(turns[1])}")
            with suppress(*refusals):
                return tokenizer.apply_chat_template([first, *turns[2:]], **how)
        roles = ", ".join(str(one.get("role")) for one in turns)
        raise PolicyError(f"{name}'s chat template rejects the roles {roles} ({error}); use another model") from error


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids."""

    token_ids: tuple[int, ...]
    n_shared: int  # number of tokens before the last message: demonstrations, which many states share
    room: int  # maximum number of completion tokens that fit after the prompt


class PromptEncoder:
    """Encodes messages with one tokenizer; ``n_positions`` is the model's maximum length (None means no limit)."""

    def __init__(self, tokenizer: Any, n_positions: int | None, name: str, enable_thinking: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self.n_positions = n_positions
        self._name = name
        self._enable_thinking = enable_thinking
        self._ends: frozenset[int] = frozenset()
        self.read_calls = reader_of(tokenizer)
        self._shows_tools = False  # whether the template passed the check for native tool calls
        # A call changes the padding settings of a fast tokenizer, which is not thread-safe.
        self._lock = threading.RLock()
        self._beginning = lru_cache(_BEGINNINGS)(self._render_beginning)

    def set_ends(self, ids: int | Sequence[int] | None) -> list[int]:
        """Set and return the end tokens: ``ids`` and the tokenizer's. Raise `PolicyError` if there are none."""
        configured = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        end = self._tokenizer.eos_token_id
        self._ends = frozenset([*configured, *([] if end is None else [end])])
        if not self._ends:
            raise PolicyError(f"{self._name} has no end token; set eos_token_id in its generation_config.json")
        return sorted(self._ends)

    def encode(self, messages: Messages) -> EncodedPrompt:
        """Return the prompt for the next assistant message; raise `PromptTooLongError` if no completion token fits."""
        with self._lock:
            if not self._shows_tools and messages[0].get("tools"):
                self._check_template()
            ids = self._render(messages)
            before = messages[:-2] if messages[-1]["role"] == "assistant" else messages[:-1]
            n_shared = n_common(ids, self._beginning(json.dumps(before))) if before else 0
        if self.n_positions is not None and len(ids) >= self.n_positions:
            raise PromptTooLongError(
                f"a prompt of {len(ids)} tokens does not fit {self._name}, whose limit is {self.n_positions} tokens; "
                "send fewer or shorter passages and demos (adapter.items, adapter.words_per_item, sampling.prompts)"
            )
        room = 2**31 if self.n_positions is None else self.n_positions - len(ids)
        return EncodedPrompt(tuple(ids), n_shared, room)

    def to_text(self, ids: Sequence[int], special: bool = False) -> str:
        """Decode token ids to text, without the end token and, unless ``special`` is set, other special tokens."""
        content = ids[:-1] if ids and ids[-1] in self._ends else ids
        with self._lock:
            text: str = self._tokenizer.decode(list(content), skip_special_tokens=not special)
        return text

    def completion(self, n_prompt: int, generated: Generated, stop: Sequence[str], tools: bool = False) -> Completion:
        """Convert generated tokens to a completion; its text ends before the first stop string.

        With ``tools``, the text keeps special tokens, because they may mark tool calls.
        """
        return Completion(
            text=before_stop(self.to_text(generated.token_ids, special=tools), stop),
            finish_reason=generated.finish_reason,
            n_prompt_tokens=n_prompt,
            n_completion_tokens=len(generated.token_ids),
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
        )

    def _render(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tokenize": True, "return_dict": True}
        how["enable_thinking"] = self._enable_thinking
        return list(apply_template(self._tokenizer, messages, self._name, **how)["input_ids"])

    def _check_template(self) -> None:
        def render(messages: Messages, prompt: bool) -> str:
            how = {"tokenize": False, "add_generation_prompt": prompt, "enable_thinking": self._enable_thinking}
            return str(apply_template(self._tokenizer, messages, self._name, **how))

        thinks = self._enable_thinking is not False and "<think>" in str(self._tokenizer.chat_template)
        refuse_template(render, self._name, self.read_calls, thinks)
        self._shows_tools = True

    def _render_beginning(self, messages: str) -> list[int]:
        try:
            return self._render(tuple(json.loads(messages)), add_generation_prompt=False)
        except PolicyError:
            return []  # the template requires a user message at the end: share no tokens


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string.

    >>> before_stop("a b c", ("c", "b"))
    'a '
    """
    return text[: min((place for mark in stop if (place := text.find(mark)) >= 0), default=None)]


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n
