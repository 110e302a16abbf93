"""What an OpenAI-compatible server said, as completions or as a failure that is final or worth another try."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from leret.core.errors import PolicyError
from leret.http.messages import MALFORMED, message_of, retry_after_s, short
from leret.policies.base import Completion

LONGEST_TOKEN = 128
"""Characters: runs of spaces, in the vocabularies of OpenAI. A text of more for each token is no completion."""

_RETRIED = frozenset({408, 409, 425, 429})
_FINISHED = frozenset({"stop", "length", "eos", "eos_token", "stop_sequence", None})
"""Ends of a completion, as OpenAI, Together and TGI name them; some servers name none."""

_TOO_LONG = re.compile(r"(?i)context.(length|size|window)|maximum model length|`inputs` (must have less|tokens \+)")
"""What vLLM, SGLang, llama.cpp, OpenAI, TGI and Together say of a prompt that does not fit."""

_ROUNDING = 1e-3
"""How far above 0 a log-probability of half precision may be."""


class TryAgainError(Exception):
    """A failure that another attempt may mend.

    Args:
        reason: in a line.
        kind: ``rate_limit``, ``overloaded``, ``server``, ``timeout``, ``connection``, ``garbled`` (an answer that
            makes no sense) or ``incomplete`` (a completion that the server itself calls none).
        wait_s: what the server asked for; None leaves it to the back-off.
    """

    def __init__(self, reason: str, kind: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.wait_s = wait_s

    @property
    def blame(self) -> bool:
        """Whether the server, rather than the traffic on it or one answer, is at fault."""
        return self.kind not in {"rate_limit", "garbled", "incomplete"}


class RefusedError(PolicyError):
    """A request that the server will never take as it is.

    Args:
        reason: and the mend.
        status: of HTTP; 0 where no server was asked.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class PromptTooLongError(RefusedError):
    """A prompt that leaves the model no position to answer in."""


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
        PromptTooLongError: the prompt does not fit the model.
        RefusedError: any other refusal, with the server's message.
    """
    if 200 <= status < 300:
        return
    told = f"{url} answered {status}: {message_of(body)}"
    if status in _RETRIED or status >= 500 or status in retried:
        kind = {429: "rate_limit", 503: "overloaded", 408: "timeout", 504: "timeout"}.get(status, "server")
        raise TryAgainError(told, kind, retry_after_s(headers))
    if status in {400, 413, 422} and _TOO_LONG.search(told):
        raise PromptTooLongError(f"{told}; send fewer or shorter passages and demos", status)
    mend = "policy.api_key_env" if status in {401, 403} else "policy.model, policy.urls or the request"
    raise RefusedError(f"{told}; mend {mend}", status)


def completions_of(body: str | bytes, n: int | None, max_tokens: int, url: str) -> list[Completion]:
    """The choices of a chat completion, in the order of their index.

    Where a server counts the tokens of all choices together, each choice gets its share by the length of its text,
    and the shares add up to what was counted.

    Args:
        body: of the answer.
        n: choices that were asked for; None counts those that came, one at least, and does not read them.
        max_tokens: that were asked for.
        url: for messages.

    Raises:
        TryAgainError: the body is no chat completion, reports a failure, or holds another number of choices.
    """
    try:
        value = json.loads(body)
        if value.get("error"):
            raise TryAgainError(f"{url} answered 200 with an error: {message_of(body)}", "server")
        choices = value["choices"]
        if len(choices) != n and (n is not None or not choices):
            raise TryAgainError(f"{url} sent {len(choices)} choices for n={n or 2}", "garbled")
        if n is None:
            return [Completion("", "length", 0, 0)] * len(choices)
        if n > 1:
            choices = sorted(choices, key=lambda choice: choice.get("index", 0))
            if len({choice.get("index", place) for place, choice in enumerate(choices)}) < n:
                raise ValueError("two choices have one index")
        usage = value.get("usage") or {}
        n_prompt, n_written = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        if min(n_prompt, n_written) < 0:
            raise ValueError("a number of tokens is below 0")
        for choice in choices:
            _check_end(choice, max_tokens, url)
        return _completions(choices, n_prompt, n_written)
    except MALFORMED as error:
        raise TryAgainError(
            f"{url} sent no chat completion ({short(repr(error))}): {short(body)}", "garbled"
        ) from error


def _check_end(choice: Mapping[str, Any], max_tokens: int, url: str) -> None:
    """Pass a choice that is a completion, whatever its text."""
    message, reason = choice["message"], choice.get("finish_reason")
    text, error = message.get("content"), choice.get("error")
    if error or reason not in _FINISHED:
        told = f"error {short(str(error))}" if error else f"finish_reason {short(str(reason))}"
        raise TryAgainError(f"{url} sent a completion with {told}", "incomplete")
    if not text and (message.get("reasoning_content") or message.get("reasoning")):
        raise TryAgainError(
            f"{url} sent reasoning and no content (finish_reason {reason}); raise policy.max_tokens, or turn the "
            "model's reasoning or the server's parser of it off",
            "incomplete",
        )
    if not isinstance(text, str):
        raise TypeError("message.content is no text")
    if len(text) > LONGEST_TOKEN * max_tokens:
        raise ValueError(f"{len(text)} characters for max_tokens={max_tokens}")


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
    ids, logprobs = _tokens(choice)
    known = ids if ids is not None else logprobs
    return Completion(
        choice["message"]["content"],
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
    logprobs = None if values is None else logprobs_of(values)
    token_ids = None if ids is None else tuple(int(token) for token in ids)
    return token_ids, logprobs


def logprobs_of(values: Sequence[Any]) -> tuple[float, ...]:
    """Log-probabilities; ValueError where one cannot be such."""
    if not all(float(value) <= _ROUNDING for value in values):
        raise ValueError("a log-probability is above 0, or no number")
    return tuple(float(value) for value in values)


def shared(lengths: Sequence[int], total: int) -> list[int]:
    """``total`` split by length, in whole numbers that add up to it.

    >>> shared([1, 1, 2], 10)
    [2, 3, 5]
    """
    weights = lengths if any(lengths) else [1] * len(lengths)
    ends = [total * end // sum(weights) for end in accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
