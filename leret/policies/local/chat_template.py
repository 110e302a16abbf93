"""Conversion of messages to prompts by chat templates, for all stages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from leret.core.errors import PolicyError
from leret.core.types import Messages, message, text_of
from leret.policies.base import Completion, PromptTooLongError
from leret.policies.tool_calls import ToolReader, reader_of, refuse_template, split_tools

if TYPE_CHECKING:
    from leret.policies.local.decoder import Generated

_BEGINNINGS = 256  # number of prompt beginnings cached as tokens
_TURNS = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})
_DIRECTIVES = [
    *(f"%{letter}" for letter in "aAbBcdeDfFGHIjmMpSTuUVwWxXyYzZ"),
    *(f"%-{letter}" for letter in "dmHIMSjy"),
]
_CLOCK = (
    "{% macro strftime_now(format) %}{% set text = namespace(value=format) %}{% for name, value in run_date.items() %}"
    "{% set text.value = text.value.replace(name, value) %}{% endfor %}{{ text.value }}{% endmacro %}{{ '' }}"
)
"""Replaces the clock of transformers by the values in ``run_date``.

The library passes no functions to a template.
"""

_date: ContextVar[str | None] = ContextVar("leret_date", default=None)


@contextmanager
def dated(date: str | None) -> Iterator[None]:
    """Let chat templates in the block print ``date`` (YYYY-MM-DD) as today's date.

    None lets them read the clock.
    """
    token = _date.set(date)
    try:
        yield
    finally:
        _date.reset(token)


def reads_clock(tokenizer: Any) -> bool:
    """Return whether the chat template in a block of `dated` would print today's date."""
    template = tokenizer.chat_template
    return _date.get() is not None and isinstance(template, str) and "strftime_now" in template


def apply_template(
    tokenizer: Any,
    messages: Messages,
    name: str,
    *,
    enable_thinking: bool | None = None,
    **how: Any,
) -> Any:
    """Call ``tokenizer.apply_chat_template``. All prompts in leret are created by this function.

    If the template rejects system messages (Gemma 2's does), the system message is prepended to the
    user message. A prompt that ends with an assistant message is continued there. If
    ``enable_thinking`` is None, the template's default applies. ``name`` is the model's name in
    errors.
    """
    from jinja2 import TemplateError

    refusals = (TemplateError, TypeError, ValueError, KeyError)
    if enable_thinking is not None:
        how["enable_thinking"] = enable_thinking
    if how.get("add_generation_prompt") and messages[-1]["role"] == "assistant":
        how |= {"add_generation_prompt": False, "continue_final_message": True}
    if reads_clock(tokenizer):
        day = datetime.fromisoformat(str(_date.get()))
        how["run_date"] = {directive: day.strftime(directive) for directive in _DIRECTIVES}
        how["chat_template"] = _CLOCK + tokenizer.chat_template
    turns: list[Mapping[str, Any]] = list(messages)
    if "tools" in messages[0]:
        turns, how["tools"] = split_tools(messages, parsed=True)
    try:
        return tokenizer.apply_chat_template(turns, **how)
    except refusals as error:
        roles = [str(turn.get("role")) for turn in turns]
        if roles[:2] == ["system", "user"]:
            first = message("user", f"{text_of(turns[0])}\n\n{text_of(turns[1])}")
            with suppress(*refusals):
                return tokenizer.apply_chat_template([first, *turns[2:]], **how)
        raise PolicyError(
            f"{name}'s chat template rejects the roles {', '.join(roles)} ({error}); use another "
            "model"
        ) from error


def end_token(tokenizer: Any, stops: Sequence[int]) -> int:
    """Return the end token's id: the token in ``stops`` with which the chat template ends a turn.

    Raises:
        PolicyError: the template renders turns that the sampler cannot produce, so a policy cannot
            be trained with it.
    """
    end_ids = list(stops)
    if not end_ids and tokenizer.eos_token_id is not None:
        end_ids = [tokenizer.eos_token_id]
    prompt = tokenizer.apply_chat_template(
        list(_TURNS[:1]), tokenize=True, add_generation_prompt=True
    )["input_ids"]
    whole = tokenizer.apply_chat_template(list(_TURNS), tokenize=True)["input_ids"]
    turn = whole[n_common(prompt, whole) :]
    length = next((i for i, token in enumerate(turn) if token in end_ids), None)
    answer = [token for token in turn[:length] if token != tokenizer.unk_token_id]
    written = tokenizer.decode(answer)
    # Empty thinking tags of a hybrid model are plain text. The sampler's text omits special tokens.
    if length is None or written != tokenizer.decode(answer, skip_special_tokens=True):
        stop_tokens = ", ".join(tokenizer.convert_ids_to_tokens(end_ids))
        raise PolicyError(
            f"the chat template of {tokenizer.name_or_path} renders a turn as {written!r}, "
            f"but a turn must end with a stop token ({stop_tokens}) and contain no other special "
            "token; fix chat_template.jinja, or eos_token_id in generation_config.json"
        )
    return int(turn[length])


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids."""

    token_ids: tuple[int, ...]
    # number of tokens before the last message: demonstrations, which many states share
    n_shared: int
    room: int  # maximum number of completion tokens that fit after the prompt


class PromptEncoder:
    """Encodes messages with one tokenizer.

    ``n_positions`` is the model's maximum length (None means no limit).
    """

    def __init__(
        self,
        tokenizer: Any,
        n_positions: int | None,
        name: str,
        enable_thinking: bool | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.n_positions = n_positions
        self._name = name
        self._enable_thinking = enable_thinking
        self._ends: frozenset[int] = frozenset()
        self._shows_tools = False  # whether the template passed the check for native tool calls
        # A call changes the padding settings of a fast tokenizer, which is not thread-safe.
        self._lock = threading.RLock()
        self._beginning = lru_cache(_BEGINNINGS)(self._render_beginning)

    @cached_property
    def read_calls(self) -> ToolReader:
        """Reader of the tool calls in completions."""
        return reader_of(self._tokenizer)

    def set_ends(self, ids: Sequence[int]) -> list[int]:
        """Set and return the end tokens: ``ids`` and the tokenizer's.

        Raise `PolicyError` if there are none.
        """
        ends = list(ids)
        if self._tokenizer.eos_token_id is not None:
            ends.append(self._tokenizer.eos_token_id)
        self._ends = frozenset(ends)
        if not ends:
            raise PolicyError(
                f"{self._name} has no end token; set eos_token_id in its generation_config.json"
            )
        return sorted(self._ends)

    def encode(self, messages: Messages, n_completion: int = 1) -> EncodedPrompt:
        """Return the prompt for the next assistant message.

        Raise `PromptTooLongError` if a completion of ``n_completion`` tokens does not fit.
        """
        with self._lock:
            if not self._shows_tools and messages[0].get("tools"):
                self._check_template()
            ids = self._render(messages)
            before = messages[:-2] if messages[-1]["role"] == "assistant" else messages[:-1]
            n_shared = n_common(ids, self._beginning(json.dumps(before))) if before else 0
        if self.n_positions is not None and len(ids) + n_completion > self.n_positions:
            raise PromptTooLongError(
                f"a prompt of {len(ids)} tokens does not fit {self._name}, whose limit is "
                f"{self.n_positions} tokens; send fewer or shorter passages and demos "
                "(adapter.items, adapter.words_per_item, sampling.prompts)"
            )
        room = 2**31 if self.n_positions is None else self.n_positions - len(ids)
        return EncodedPrompt(tuple(ids), n_shared, room)

    def to_text(self, ids: Sequence[int], special: bool = False) -> str:
        """Decode token ids to text, without the end token.

        Other special tokens are left out unless ``special`` is set.
        """
        content = ids[:-1] if ids and ids[-1] in self._ends else ids
        with self._lock:
            text: str = self._tokenizer.decode(list(content), skip_special_tokens=not special)
        return text

    def fault_of(self, ids: Sequence[int], text: str, size: int) -> str | None:
        """Return what is wrong with the token ids of a completion.

        None if they are ids of its text.

        ``size`` is the number of tokens in the vocabulary.
        """
        if not all(0 <= token < size for token in ids):
            return f"token ids from {min(ids)} to {max(ids)}, but the vocabulary has {size} tokens"
        if any(token in self._ends for token in ids[:-1]):
            return f"token ids that go on after an end token for the completion {text[:80]!r}"
        plain = self.to_text(ids)
        if plain == text:
            return None
        whole = self.to_text(ids, special=True)
        if letters(text) in {letters(plain), letters(whole)}:
            return None
        _, calls = self.read_calls(text, ())
        if calls and calls == self.read_calls(whole, ())[1]:
            return None  # a server's tool parser rewrites the text of tool calls
        return f"token ids of {plain[:80]!r} for the completion {text[:80]!r}"

    def completion(
        self, n_prompt: int, generated: Generated, stop: Sequence[str], tools: bool = False
    ) -> Completion:
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
        rendered = apply_template(
            self._tokenizer,
            messages,
            self._name,
            enable_thinking=self._enable_thinking,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
        )
        return list(rendered["input_ids"])

    def _check_template(self) -> None:
        def render(messages: Messages, prompt: bool) -> str:
            text = apply_template(
                self._tokenizer,
                messages,
                self._name,
                enable_thinking=self._enable_thinking,
                add_generation_prompt=prompt,
                tokenize=False,
            )
            return str(text)

        has_tag = "<think>" in str(self._tokenizer.chat_template)
        thinks = self._enable_thinking is not False and has_tag
        refuse_template(render, self._name, self.read_calls, thinks)
        self._shows_tools = True

    def _render_beginning(self, messages: str) -> list[int]:
        try:
            return self._render(tuple(json.loads(messages)), add_generation_prompt=False)
        except PolicyError:
            return []  # the template requires a user message at the end: share no tokens


def letters(text: str) -> str:
    """Return the text without whitespace and broken characters; servers differ in these."""
    return "".join(text.split()).replace("\ufffd", "")


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string.

    >>> before_stop("a b c", ("c", "b"))
    'a '
    """
    starts = [text.find(mark) for mark in stop if mark in text]
    return text[: min(starts, default=None)]


def n_common(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two texts or token sequences."""
    n = 0
    for item, second_item in zip(first, second, strict=False):
        if item != second_item:
            break
        n += 1
    return n
