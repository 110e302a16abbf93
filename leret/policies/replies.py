"""What an OpenAI-compatible server said, as completions or as a failure that is final or worth another try."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from leret.errors import PolicyError
from leret.policies.base import Completion

__all__ = ["RefusedError", "TryAgainError", "check_status", "completions_of", "retry_after_s"]

_RETRIED = frozenset({408, 409, 425, 429})
_LONGEST_WAIT_S = 120.0


class TryAgainError(Exception):
    """A failure that another attempt may mend.

    Args:
        reason: in a line.
        wait_s: what the server asked for; None leaves it to the back-off.
        blame: whether the server, rather than the traffic on it, is at fault.
    """

    def __init__(self, reason: str, wait_s: float | None = None, blame: bool = True) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.blame = blame


class RefusedError(PolicyError):
    """A request that the server will never take as it is."""


def check_status(status: int, headers: Mapping[str, str], body: str, url: str) -> None:
    """Pass what succeeded.

    Raises:
        TryAgainError: 429, a time-out or a server error.
        RefusedError: any other refusal, with the server's message.
    """
    if status < 300:
        return
    told = f"{url} answered {status}: {_message(body)}"
    if status in _RETRIED or status >= 500:
        raise TryAgainError(told, retry_after_s(headers), blame=status != 429)
    raise RefusedError(f"{told}; mend policy.model, policy.api_key_env or the request")


def completions_of(body: str, n: int, url: str) -> list[Completion]:
    """The choices of a chat completion, in the order of their index.

    Raises:
        TryAgainError: the body is no chat completion, or holds another number of choices.
    """
    try:
        value = json.loads(body)
        choices = sorted(value["choices"], key=lambda choice: choice.get("index", 0))
        usage = value.get("usage") or {}
        completions = [_completion(choice, usage, len(choices)) for choice in choices]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TryAgainError(f"{url} sent no chat completion ({type(error).__name__}): {_short(body)}") from error
    if len(completions) != n:
        raise TryAgainError(f"{url} sent {len(completions)} choices for n={n}")
    return completions


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a ``Retry-After`` header asks for, two minutes at most; None without a readable one.

    >>> retry_after_s({"Retry-After": "1.5"})
    1.5
    """
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (moment - datetime.now(UTC if moment.tzinfo else None)).total_seconds()
    return min(max(seconds, 0.0), _LONGEST_WAIT_S) if math.isfinite(seconds) else None


def _completion(choice: Mapping[str, Any], usage: Mapping[str, Any], n_choices: int) -> Completion:
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("message.content is no text")
    content = (choice.get("logprobs") or {}).get("content")
    logprobs = tuple(float(token["logprob"]) for token in content) if content is not None else None
    token_ids = choice.get("token_ids")
    if token_ids is not None:
        n_tokens = len(token_ids)
    elif logprobs is not None:
        n_tokens = len(logprobs)
    else:
        n_tokens = round((usage.get("completion_tokens") or 0) / n_choices)
    return Completion(
        text=text,
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        n_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        n_completion_tokens=n_tokens,
        token_ids=None if token_ids is None else tuple(int(token) for token in token_ids),
        logprobs=logprobs,
    )


def _message(body: str) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return _short(body)
    error = value.get("error", value) if isinstance(value, dict) else value
    told = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return _short(str(told if told is not None else error))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}..."
