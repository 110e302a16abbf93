"""Answers of HTTP servers, of bounded size: successes, temporary failures, and rejections."""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any

from leret.core.errors import ConfigError, LeretError

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""Exceptions from reading an answer of unexpected shape."""

MAX_BYTES = 64 * 2**20
"""Largest decompressed answer: room for 64 completions of 8,000 tokens with log-probabilities."""

_MAX_RETRY_AFTER_S = 120.0
_RETRIED = frozenset({408, 409, 424, 425, 429})  # 424: TGI failed to generate
_KINDS = {429: "rate_limit", 503: "overloaded", 408: "timeout", 504: "timeout"}


class HttpError(LeretError):
    """A request without a usable answer; clients turn it into the error of their boundary."""

    kind: str = "rejected"


class RetryableError(HttpError):
    """A failure that may pass, after ``wait_s`` if the server names a time (Retry-After).

    Its kind is rate_limit, overloaded, server, timeout, connection, malformed, or incomplete (the server says so).
    """

    exit_code = 1

    def __init__(self, reason: str, kind: str = "server", wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.wait_s = wait_s


class RejectedError(HttpError):
    """A request that the server will never accept; ``status`` is 0 if no server was asked."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """A complete answer; ``url`` is without its query, which may hold a key."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @cached_property
    def json(self) -> Any:
        """The parsed body; RetryableError if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise self.malformed(f"no JSON ({error})") from error

    def malformed(self, fault: str) -> RetryableError:
        """Build the error of an answer with status 200 and an unusable body."""
        return RetryableError(f"{self.url} sent {fault}: {one_line(self.body)}", "malformed")

    def check(self, advice: Mapping[bool, str]) -> None:
        """Raise RetryableError for 429, a timeout or a server error, and RejectedError for any other refusal.

        ``advice`` says what to correct after a rejection, under True after one of the credentials.
        """
        if 200 <= self.status < 300:
            return
        reason = f"{self.url} answered {self.status}: {error_text(self.body)}"
        if self.status >= 500 or self.status in _RETRIED:
            raise RetryableError(reason, _KINDS.get(self.status, "server"), retry_after_s(self.headers))
        raise RejectedError(f"{reason}; {advice[self.status in {401, 403}]}", self.status)


class ApiKey:
    """A server's key, ``Basic ...``, or None: sent in one header, never printed or pickled."""

    __slots__ = ("_value",)

    def __init__(self, value: str | None = None) -> None:
        self._value = value

    @classmethod
    def from_env(cls, variable: str | None, setting: str) -> ApiKey:
        """Read the key from the environment variable that the recipe's ``setting`` names; ConfigError if unusable."""
        if variable is None:
            return cls()
        value = os.environ.get(variable, "").strip()
        if not value:
            raise ConfigError(f"{setting}: the environment variable {variable} is not set; export the key")
        if not value.isascii() or not value.isprintable():
            fault = (
                f"the environment variable {variable} holds line breaks or other characters that headers cannot carry"
            )
            raise ConfigError(f"{setting}: {fault}; export only the key")
        return cls(value)

    def __repr__(self) -> str:
        return "ApiKey()" if self._value is None else "ApiKey([key])"

    def __reduce__(self) -> str:
        raise TypeError("a key cannot be pickled; read it from the environment")

    def reveal(self) -> str | None:
        return self._value

    def headers(self) -> dict[str, str]:
        if self._value is None:
            return {}
        return {"Authorization": self._value if self._value.startswith("Basic ") else f"Bearer {self._value}"}

    def redact(self, message: str) -> str:
        """Remove the key from a message, even a part of it before the cut of `one_line`.

        >>> ApiKey("s3cret").redact("key s3cret: no; key s3cr...")
        'key [key]: no; key [key]...'
        """
        if self._value is None:
            return message
        secret = self._value.removeprefix("Basic ")
        message = message.replace(secret, "[key]")
        for n in range(len(secret) - 1, 2, -1):
            message = message.replace(f"{secret[:n]}...", "[key]...")
        return message


async def read_body(chunks: AsyncIterable[bytes], url: str) -> bytes:
    """Read the decompressed body of an answer; RejectedError beyond `MAX_BYTES`."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > MAX_BYTES:
            raise RejectedError(f"{url} sent more than {MAX_BYTES} bytes; request less at once", 200).failed()
    return bytes(body)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a ``Retry-After`` header, two minutes at most; None without a valid one.

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
            seconds = (moment - datetime.now(UTC if moment.tzinfo else None)).total_seconds()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


def error_text(body: str | bytes) -> str:
    """Return the error message in the body of a failure as one line."""
    try:
        value = json.loads(body)
        if isinstance(value, dict) and isinstance(value.get("error"), dict):
            value = value["error"]
        texts = [value.get(key) for key in ("message", "error", "detail")] if isinstance(value, dict) else []
        return one_line(next((text for text in texts if isinstance(text, str)), str(value)))
    except MALFORMED:
        return one_line(body)


def one_line(text: str | bytes) -> str:
    """Return text as one line of at most 300 characters."""
    if isinstance(text, bytes):
        text = text[:2000].decode(errors="replace")
    line = " ".join(text[:2000].split())
    return line if len(line) <= 300 else f"{line[:300]}..."
