"""What the clients of LM servers and of search servers both know of answers."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""What reading an answer of an unexpected shape raises."""

_MAX_BYTES = 64 * 2**20
"""Of an answer, decompressed: 64 completions of 8,000 tokens with their log-probabilities have room."""

_LONGEST_WAIT_S = 120.0


class TooLargeError(ValueError):
    """An answer beyond the bound."""


async def body_of(chunks: AsyncIterable[bytes]) -> bytes:
    """The body of an answer, decompressed piece by piece as it is read.

    Raises:
        TooLargeError: it is longer than 64 MiB.
    """
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > _MAX_BYTES:
            raise TooLargeError(f"more than {_MAX_BYTES} bytes")
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
    return min(max(seconds, 0.0), _LONGEST_WAIT_S) if math.isfinite(seconds) else None


def message_of(body: str | bytes) -> str:
    """What an answer says of a failure, in a line."""
    try:
        value = json.loads(body)
        if isinstance(value, dict) and isinstance(value.get("error"), dict):
            value = value["error"]
        said = [value.get(key) for key in ("message", "error", "detail")] if isinstance(value, dict) else []
        return short(next((text for text in said if isinstance(text, str)), str(value)))
    except MALFORMED:
        return short(body)


def short(text: str | bytes) -> str:
    """One line of 300 characters at most."""
    if isinstance(text, bytes):
        text = text[:2000].decode(errors="replace")
    line = " ".join(text[:2000].split())
    return line if len(line) <= 300 else f"{line[:300]}..."


def hide(text: str, secret: str) -> str:
    """A message without a secret that a server sent back, nor the part of it after which `short` cut.

    >>> hide("key s3cret: no; key s3cr...", "s3cret")
    'key [key]: no; key [key]...'
    """
    text = text.replace(secret, "[key]")
    for n in range(len(secret) - 1, 2, -1):
        text = text.replace(f"{secret[:n]}...", "[key]...")
    return text
