"""Messages as text: what the model's chat template makes of them, in sampling, training and evaluation alike."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.core.errors import PolicyError
from leret.core.types import Messages, message, text_of
from leret.policies.base import Completion, PromptTooLongError
from leret.policies.checkpoints import load_tokenizer

if TYPE_CHECKING:
    from leret.policies.local.decoder import Generated


def apply_template(
    tokenizer: Any, messages: Messages, name: str, *, enable_thinking: bool | None = None, **how: Any
) -> Any:
    """``tokenizer.apply_chat_template``; the one place where messages become a prompt.

    A template that refuses a system message (Gemma 2's) gets its text at the head of the user's turn, as in LeReT.

    ``enable_thinking`` None leaves it to the template; `PolicyError` where it refuses the messages of ``name``.
    """
    from jinja2 import TemplateError

    refusals = (TemplateError, TypeError, ValueError, KeyError)
    if enable_thinking is not None:
        how["enable_thinking"] = enable_thinking
    try:
        return tokenizer.apply_chat_template(list(messages), **how)
    except refusals as error:
        if [one.get("role") for one in messages[:2]] == ["system", "user"]:
            first = message("user", f"{text_of(messages[0])}\n\n{text_of(messages[1])}")
            with suppress(*refusals):
                return tokenizer.apply_chat_template([first, *messages[2:]], **how)
        roles = ", ".join(str(one.get("role")) for one in messages)
        raise PolicyError(f"the chat template of {name} refuses messages of roles {roles} ({error})") from error


class ChatTemplate:
    """A tokenizer's chat template, for servers that take a text and tokenize it with special tokens added."""

    def __init__(self, tokenizer: Any, name: str, enable_thinking: bool | None = None) -> None:
        self.template = str(tokenizer.chat_template)
        self._tokenizer = tokenizer
        self._name = name
        self._enable_thinking = enable_thinking
        self._lock = threading.Lock()
        self._dropped: str | None = None

    def inputs(self, messages: Messages) -> str:
        """The prompt as a text that becomes the trainer's tokens under a tokenizer that adds special tokens of its own.

        Where both the template and the tokenizer set a token for the beginning, the text lacks it. That is found out on
        the first prompt.
        """
        text = str(self._apply(messages, tokenize=False))
        if self._dropped is None:
            self._dropped = self._repeated_beginning(messages, text)
        return text.removeprefix(self._dropped)

    def n_tokens(self, inputs: str) -> int:
        """Prompt tokens of what `inputs` gave."""
        return len(self._encode(inputs))

    def _repeated_beginning(self, messages: Messages, text: str) -> str:
        wanted = list(self._apply(messages, tokenize=True)["input_ids"])
        for beginning in ("", str(self._tokenizer.bos_token or "")):
            if self._encode(text.removeprefix(beginning)) == wanted:
                return beginning
        raise PolicyError(
            f"the tokenizer of {self._name} adds special tokens to a prompt that its chat template has already written "
            "out, so a server would see other tokens than the trainer; mend its tokenizer_config.json, or serve the "
            "model by its OpenAI route (policy.kind: openai)"
        )

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def _apply(self, messages: Messages, tokenize: bool) -> Any:
        how = {"add_generation_prompt": True, "tokenize": tokenize, "return_dict": tokenize}
        with self._lock:
            return apply_template(self._tokenizer, messages, self._name, enable_thinking=self._enable_thinking, **how)


def load_template(name: str, enable_thinking: bool | None = None) -> ChatTemplate:
    """The chat template of a directory with a tokenizer, or of a model of the hub; `PolicyError` without one."""
    if not Path(name).is_dir() and name.count("/") != 1:
        raise PolicyError(
            f"policy.tokenizer: there is no directory {name}; kind tgi applies the chat template on this side: name "
            "the model's directory, or owner/name of the Hugging Face hub"
        )
    return ChatTemplate(load_tokenizer(Path(name)), name, enable_thinking)


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
    """Encodes for one tokenizer; ``n_positions``: the model's longest sequence, None where it has no limit."""

    def __init__(self, tokenizer: Any, n_positions: int | None, name: str, enable_thinking: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._n_positions = n_positions
        self._name = name
        self._enable_thinking = enable_thinking
        self._ends: frozenset[int] = frozenset()
        # A fast tokenizer refuses to be changed and read at the same time, and padding settings are changed by a call.
        self._lock = threading.RLock()
        self._beginning = lru_cache(_BEGINNINGS)(self._render_beginning)

    def set_ends(self, ids: int | Sequence[int] | None) -> list[int]:
        """Take the end tokens of the generation configuration, the tokenizer's own included; `PolicyError` for none."""
        given = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        own = self._tokenizer.eos_token_id
        self._ends = frozenset([*given, *([] if own is None else [own])])
        if not self._ends:
            raise PolicyError(f"{self._name} has no end token; set eos_token_id in its generation_config.json")
        return sorted(self._ends)

    def encode(self, messages: Messages) -> EncodedPrompt:
        """The prompt that asks for the next assistant message; `PromptTooLongError` where it takes all positions."""
        with self._lock:
            ids = self._render(messages, add_generation_prompt=True)
            before = tuple(tuple(message.items()) for message in messages[:-1])
            n_shared = n_common(ids, self._beginning(before)) if before else 0
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

    def _render_beginning(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> list[int]:
        try:
            return self._render(tuple(map(dict, messages)), add_generation_prompt=False)
        except PolicyError:
            return []  # some templates insist on a last user message; then nothing is shared


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts begin with alike."""
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n
