"""What an OpenAI-compatible server said, as completions or as a failure that is final or worth another try."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import accumulate
from typing import Any

from leret.errors import PolicyError
from leret.policies.base import Completion

__all__ = ["RefusedError", "TryAgainError", "check_status", "completions_of", "retry_after_s", "shared"]

_RETRIED = frozenset({408, 409, 425, 429})
_LONGEST_WAIT_S = 120.0


class TryAgainError(Exception):
    """A failure that another attempt may mend.

    Args:
        reason: in a line.
        kind: ``rate_limit``, ``overloaded``, ``server``, ``timeout``, ``connection`` or ``garbled`` (an answer that
            makes no sense).
        wait_s: what the server asked for; None leaves it to the back-off.
    """

    def __init__(self, reason: str, kind: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.wait_s = wait_s

    @property
    def blame(self) -> bool:
        """Whether the server, rather than the traffic on it or one answer, is at fault."""
        return self.kind not in {"rate_limit", "garbled"}


class RefusedError(PolicyError):
    """A request that the server will never take as it is.

    Args:
        reason: and the mend.
        status: of HTTP; 0 where no server was asked.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


def check_status(
    status: int, headers: Mapping[str, str], body: str, url: str, retried: frozenset[int] = frozenset()
) -> None:
    """Pass what succeeded.

    Args:
        status: of HTTP.
        headers: whose names may be in any case.
        body: for the message; without keys.
        url: likewise.
        retried: further codes that are worth another attempt.

    Raises:
        TryAgainError: 429, a time-out or a server error.
        RefusedError: any other refusal, with the server's message.
    """
    if 200 <= status < 300:
        return
    told = f"{url} answered {status}: {_message(body)}"
    if status in _RETRIED or status >= 500 or status in retried:
        kind = {429: "rate_limit", 503: "overloaded", 408: "timeout", 504: "timeout"}.get(status, "server")
        raise TryAgainError(told, kind, retry_after_s(headers))
    raise RefusedError(f"{told}; mend policy.model, policy.api_key_env or the request", status)


def completions_of(body: str | bytes, n: int | None, url: str) -> list[Completion]:
    """The choices of a chat completion, in the order of their index.

    Where a server counts the tokens of all choices together, each choice gets its share by the length of its text,
    and the shares add up to what was counted.

    Args:
        body: of the answer.
        n: choices that were asked for; None takes as many as there are, one at least.
        url: for messages.

    Raises:
        TryAgainError: the body is no chat completion, or holds another number of choices.
    """
    try:
        value = json.loads(body)
        choices = value["choices"]
        if len(choices) != n and (n is not None or not choices):
            raise TryAgainError(f"{url} sent {len(choices)} choices for n={n or 2}", "garbled")
        if len(choices) > 1:
            choices = sorted(choices, key=lambda choice: choice.get("index", 0))
        usage = value.get("usage") or {}
        n_prompt, n_written = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        return _completions(choices, n_prompt, n_written)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TryAgainError(
            f"{url} sent no chat completion ({type(error).__name__}): {_short(body)}", "garbled"
        ) from error


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


def _completions(choices: Sequence[Mapping[str, Any]], n_prompt: int, n_written: int) -> list[Completion]:
    if len(choices) == 1:
        return [_completion(choices[0], n_prompt, n_written)]
    texts = [choice["message"]["content"] for choice in choices]
    tokens = [_tokens(choice) for choice in choices]
    counts = [None if ids is None and logprobs is None else len(ids or logprobs or ()) for ids, logprobs in tokens]
    if None in counts:
        left = max(0, n_written - sum(count for count in counts if count is not None))
        shares = iter(shared([len(text) for text, count in zip(texts, counts, strict=True) if count is None], left))
        counts = [next(shares) if count is None else count for count in counts]
    return [_completion(choice, n_prompt, count or 0) for choice, count in zip(choices, counts, strict=True)]


def _completion(choice: Mapping[str, Any], n_prompt: int, n_written: int) -> Completion:
    """A choice.

    Args:
        choice: of the answer.
        n_prompt: prompt tokens.
        n_written: completion tokens, where the server does not give them one by one.
    """
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("message.content is no text")
    ids, logprobs = _tokens(choice)
    known = ids if ids is not None else logprobs
    return Completion(
        text,
        "length" if choice.get("finish_reason") == "length" else "stop",
        n_prompt,
        n_written if known is None else len(known),
        ids,
        logprobs,
    )


def _tokens(choice: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """Token ids and log-probabilities, in OpenAI's form, vLLM's or Together's."""
    told, given = choice.get("logprobs"), choice.get("token_ids")
    if told is None and given is None:
        return None, None
    told = told or {}
    values, ids = told.get("token_logprobs"), told.get("token_ids")
    if values is None and told.get("content") is not None:
        values = [token["logprob"] for token in told["content"]]
    if given is not None:
        ids = given
    logprobs = None if values is None else tuple(float(value) for value in values)
    token_ids = None if ids is None else tuple(int(token) for token in ids)
    return token_ids, logprobs


def shared(lengths: Sequence[int], total: int) -> list[int]:
    """``total`` split by length, in whole numbers that add up to it.

    >>> shared([1, 1, 2], 10)
    [2, 3, 5]
    """
    weights = lengths if any(lengths) else [1] * len(lengths)
    ends = [total * end // sum(weights) for end in accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _message(body: str) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return _short(body)
    error = value.get("error", value) if isinstance(value, dict) else value
    told = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return _short(str(told if told is not None else error))


def _short(text: str | bytes) -> str:
    if isinstance(text, bytes):
        text = text[:2000].decode(errors="replace")
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}..."
