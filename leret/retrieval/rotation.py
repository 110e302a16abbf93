"""Which of several equal search servers gets the next request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from leret.errors import ConfigError

__all__ = ["LONGEST_PAUSE_S", "Rotation", "Server"]

LONGEST_PAUSE_S = 5.0


@dataclass
class Server:
    """One base URL and how it has been doing."""

    url: str
    n_in_flight: int = 0
    n_failures: int = 0
    resting_until: float = 0.0


class Rotation:
    """The least busy server is next; one that fails rests, longer each time, while others take its requests.

    Args:
        urls: base URLs.

    Raises:
        ConfigError: a URL is none.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Server(_checked(url)) for url in urls]

    def take(self) -> Server:
        """The least busy server that does not rest; where all rest, the one that is back first."""
        now = time.monotonic()
        awake = [server for server in self.all if server.resting_until <= now]
        if awake:
            chosen = min(awake, key=lambda server: server.n_in_flight)
        else:
            chosen = min(self.all, key=lambda server: server.resting_until)
        chosen.n_in_flight += 1
        return chosen

    def give_back(self, server: Server, ok: bool) -> None:
        """A request to it has ended; did the server do well?"""
        server.n_in_flight -= 1
        server.n_failures = 0 if ok else server.n_failures + 1
        pause_s = min(LONGEST_PAUSE_S, 0.5 * 2.0 ** min(server.n_failures, 10))
        server.resting_until = 0.0 if ok else time.monotonic() + pause_s


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or any(char.isspace() for char in url):
        raise ConfigError(f"{url!r} is no URL of a retriever; write it as in http://127.0.0.1:8893")
    return url.rstrip("/")
