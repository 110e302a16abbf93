"""Answers of HTTP servers: read within a bound, and told apart into successes, passing failures and rejections.

::

    HttpError
    |-- RetryableError   another attempt may succeed: overload, outage, an answer that makes no sense
    `-- RejectedError    the server will never take this request
"""

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
"""What reading an answer of an unexpected shape raises."""

MAX_BYTES = 64 * 2**20
"""Of an answer, decompressed: 64 completions of 8,000 tokens with their log-probabilities have room."""

_MAX_RETRY_AFTER_S = 120.0
_RETRIED = frozenset({408, 409, 425, 429})
_KINDS = {429: "rate_limit", 503: "overloaded", 408: "timeout", 504: "timeout"}


class HttpError(LeretError):
    """A request without a usable answer; the clients of a server turn it into the error of their boundary."""

    kind: str = "rejected"


class RetryableError(HttpError):
    """A failure that another attempt may mend, ``wait_s`` later if the server asked for that (Retry-After).

    Its kind is ``rate_limit``, ``overloaded``, ``server``, ``timeout``, ``connection``, ``malformed`` (an answer that
    makes no sense) or ``incomplete`` (an answer that the server itself calls unfinished).
    """

    exit_code = 1

    def __init__(self, reason: str, kind: str = "server", wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.wait_s = wait_s


class RejectedError(HttpError):
    """A request that the server will never take as it is; ``status`` is 0 where no server was asked."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """A complete answer; ``url`` has no query, which may hold a key."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @cached_property
    def json(self) -> Any:
        """The parsed body; RetryableError where it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise self.malformed(f"no JSON ({error})") from error

    def malformed(self, what: str) -> RetryableError:
        """The failure of an answer of status 200 that makes no sense: ``what`` was sent instead."""
        return RetryableError(f"{self.url} sent {what}: {one_line(self.body)}", "malformed")

    def check(self, advice: Mapping[bool, str], also_retried: frozenset[int] = frozenset()) -> None:
        """Pass a success; RetryableError for 429, a time-out or a server error, RejectedError for any other refusal.

        ``advice`` is what to correct after a rejection, True: of the credentials.
        """
        if 200 <= self.status < 300:
            return
        reason = f"{self.url} answered {self.status}: {error_text(self.body)}"
        if self.status >= 500 or self.status in _RETRIED or self.status in also_retried:
            raise RetryableError(reason, _KINDS.get(self.status, "server"), retry_after_s(self.headers))
        raise RejectedError(f"{reason}; {advice[self.status in {401, 403}]}", self.status)


class ApiKey:
    """A server's key, or ``Basic ...``, or None: sent in one header, printed and pickled never."""

    __slots__ = ("_value",)

    def __init__(self, value: str | None = None) -> None:
        self._value = value

    @classmethod
    def from_env(cls, variable: str | None, setting: str) -> ApiKey:
        """The key in the environment variable that the recipe's ``setting`` names; ConfigError where it is no key."""
        if variable is None:
            return cls()
        value = os.environ.get(variable, "").strip()
        if not value:
            raise ConfigError(f"{setting}: the environment variable {variable} is not set; export the key in it")
        if not value.isascii() or not value.isprintable():
            raise ConfigError(
                f"{setting}: the environment variable {variable} holds line breaks or other characters that no header "
                "can carry; export the key alone in it"
            )
        return cls(value)

    def __repr__(self) -> str:
        return "ApiKey()" if self._value is None else "ApiKey([key])"

    def __reduce__(self) -> str:
        raise TypeError("a key is not pickled; read it from the environment where it is needed")

    def reveal(self) -> str | None:
        """The key itself, for a client library that sends it."""
        return self._value

    def headers(self) -> dict[str, str]:
        """The header that carries it."""
        if self._value is None:
            return {}
        return {"Authorization": self._value if self._value.startswith("Basic ") else f"Bearer {self._value}"}

    def redact(self, message: str) -> str:
        """A message without the key that a server sent back, nor the part of it after which `one_line` cut.

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
    """The body of an answer, decompressed piece by piece as it is read; RejectedError beyond `MAX_BYTES`."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > MAX_BYTES:
            raise RejectedError(f"{url} sent more than {MAX_BYTES} bytes; ask for less at once", 200).failed()
    return bytes(body)


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
            seconds = (moment - datetime.now(UTC if moment.tzinfo else None)).total_seconds()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


def error_text(body: str | bytes) -> str:
    """What the body of a failure says, in a line."""
    try:
        value = json.loads(body)
        if isinstance(value, dict) and isinstance(value.get("error"), dict):
            value = value["error"]
        texts = [value.get(key) for key in ("message", "error", "detail")] if isinstance(value, dict) else []
        return one_line(next((text for text in texts if isinstance(text, str)), str(value)))
    except MALFORMED:
        return one_line(body)


def one_line(text: str | bytes) -> str:
    """One line of 300 characters at most."""
    if isinstance(text, bytes):
        text = text[:2000].decode(errors="replace")
    line = " ".join(text[:2000].split())
    return line if len(line) <= 300 else f"{line[:300]}..."
