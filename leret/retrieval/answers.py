"""What a search server said: an answer, a failure worth another try, or a refusal."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from leret.errors import RetrievalError
from leret.http import message_of, retry_after_s, short

__all__ = ["Answer", "BadAnswerError", "Call", "RefusedError", "TryAgainError", "check", "encoded", "parsed"]

_RETRIED = frozenset({408, 425, 429})


@dataclass(frozen=True)
class Call:
    """A request, apart from the server that it goes to.

    Attributes:
        params: of the URL; encoded here, with half a surrogate pair as a question mark.
        form: sent URL-encoded in the body.
        json: sent as JSON in the body, `encoded`.
        n_queries: that it asks.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] | None = None
    json: Any = None
    n_queries: int = 1

    def body(self) -> tuple[bytes | None, str | None]:
        """What is sent after the headers, and its Content-Type."""
        if self.form is not None:
            return urlencode(self.form, errors="replace").encode(), "application/x-www-form-urlencoded"
        return (None, None) if self.json is None else (encoded(self.json), "application/json")


@dataclass(frozen=True)
class Answer:
    """A complete answer of status 200 to 299."""

    url: str
    text: str
    call: Call


class TryAgainError(Exception):
    """A failure that another attempt may mend.

    Args:
        reason: in a line.
        wait_s: what the server asked for; None leaves it to the back-off.
        busy: the server is well, and has too much to do.
    """

    def __init__(self, reason: str, wait_s: float | None = None, busy: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.busy = busy


class BadAnswerError(TryAgainError):
    """An answer of status 200 that makes no sense; a few attempts tell a hiccup from a wrong URL."""


class RefusedError(RetrievalError):
    """A request that the server will never take as it is.

    Args:
        reason: in a line.
        status: of HTTP.

    Attributes:
        at: when it was refused, by the monotonic clock.
    """

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status
        self.at = time.monotonic()


def check(status: int, headers: Mapping[str, str], text: str, url: str) -> None:
    """Pass what succeeded.

    Raises:
        TryAgainError: 429, a time-out or a server error.
        RefusedError: any other refusal, with the server's message.
    """
    if 200 <= status < 300:
        return
    told = f"{url} answered {status}: {message_of(text)}"
    if status in _RETRIED or status >= 500:
        wait_s = retry_after_s(headers)
        raise TryAgainError(told, wait_s, busy=status == 429 or (status == 503 and wait_s is not None))
    raise RefusedError(f"{told}; look at the URL, the token and the settings of the retriever", status)


def encoded(value: Any) -> bytes:
    r"""JSON in UTF-8; half a surrogate pair, which UTF-8 cannot hold, is escaped.

    >>> encoded(["é", "\ud800"]) == b'["\xc3\xa9", "\\ud800"]'
    True
    """
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def parsed(answer: Answer) -> Any:
    """The JSON of an answer.

    Raises:
        BadAnswerError: it is none.
    """
    try:
        return json.loads(answer.text)
    except (ValueError, RecursionError) as error:
        raise BadAnswerError(f"{answer.url} sent no JSON ({error}): {short(answer.text)}") from error
