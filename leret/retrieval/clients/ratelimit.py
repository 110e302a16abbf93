"""When the next request to a server may start, told between the processes of a machine by a small file.

The file holds one number, seconds since the epoch, and is locked for as long as it takes to read and write it: nobody
holds the lock while it waits, and nobody waits for the lock.
"""

from __future__ import annotations

import logging
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from leret.core.files import cache_directory as default_directory
from leret.core.types import digest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


_LOG = logging.getLogger("leret")

_NUMBER = struct.Struct("<d")
_LONGEST_S = 125.0
"""More than any server is waited for: a start further away is of a clock that was set back, or of a damaged file."""

_TAKEN_S = 0.005
"""About how long after it found the lock taken a process asks again."""


class StartFile:
    """The next permitted start; safe for many threads and processes.

    Where there are no locks, or the file cannot be written, every start is permitted.

    Args:
        path: made where it is missing, with its directory.
        clock: seconds, the same for all processes.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._usable = fcntl is not None

    def claim(self, apart_s: float) -> float:
        """Ask to start now.

        Args:
            apart_s: seconds for which no other start is permitted then, two minutes at most.

        Returns:
            0 where the request may start, and must. Otherwise, seconds after which to ask again.
        """
        if not self._usable:
            return 0.0
        try:
            with self._locked() as file:
                now = self._clock()
                wait_s = _left_s(file, now)
                if wait_s == 0:
                    os.pwrite(file, _NUMBER.pack(now + apart_s), 0)
                return wait_s
        except BlockingIOError:
            return random.uniform(0.5, 1.5) * _TAKEN_S
        except OSError as error:
            self._usable = False
            _LOG.warning(
                "the rate of requests is kept by this process alone: %s cannot be used (%s)", self._path, error
            )
            return 0.0

    def pause(self, seconds: float) -> None:
        """Permit no start for a while. Where another process has the lock at this moment, it is left at that."""
        if self._usable:
            with suppress(OSError), self._locked() as file:
                now = self._clock()
                os.pwrite(file, _NUMBER.pack(now + max(seconds, _left_s(file, now))), 0)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The open file.

        Raises:
            BlockingIOError: another has it.
            OSError: it cannot be used.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
        finally:
            os.close(file)  # and the lock is gone


def _left_s(file: int, now: float) -> float:
    """Seconds until the start that a file permits."""
    held = os.pread(file, _NUMBER.size, 0)
    left_s = _NUMBER.unpack(held)[0] - now if len(held) == _NUMBER.size else 0.0
    return left_s if 0 < left_s <= _LONGEST_S else 0.0


pass


class RateLimit:
    """Lets requests start at least ``1 / per_s`` seconds apart; safe for many threads and event loops.

    Args:
        per_s: requests a second.
        clock: seconds, never going back.
        file: that other processes keep to as well; None keeps the rate of this process.
    """

    def __init__(
        self, per_s: float, clock: Callable[[], float] = time.monotonic, file: StartFile | None = None
    ) -> None:
        self.per_s = per_s
        self._clock = clock
        self._file = file
        self._lock = threading.Lock()
        self._next = float("-inf")

    def wait_s(self) -> float:
        """Ask to start now.

        Returns:
            0 where the request may start, and must: the next one is then held back. Otherwise, seconds after which to
            ask again: a place is never held for one that sleeps, who may wake late, on top of the next one.
        """
        with self._lock:
            now = self._clock()
            if now < self._next:
                return self._next - now
            wait_s = 0.0 if self._file is None else self._file.claim(1.0 / self.per_s)
            if wait_s == 0:
                self._next = now + 1.0 / self.per_s
            return wait_s

    def pause(self, seconds: float) -> None:
        """Let nobody start for a while: the server asked for it."""
        with self._lock:
            self._next = max(self._next, self._clock() + seconds)
            if self._file is not None:
                self._file.pause(seconds)


_shared: dict[str, RateLimit] = {}
_shared_lock = threading.Lock()


def shared_limit(url: str, per_s: float, key: str | None = None) -> RateLimit:
    """The limit of a host (and of a key for it), one for all processes of the machine that share leret's cache.

    In a process the lowest rate asked for holds.
    """
    name = digest("requests", urlsplit(url).netloc.rpartition("@")[2], key)
    with _shared_lock:
        if name not in _shared:
            _shared[name] = RateLimit(per_s, file=StartFile(default_directory() / f"requests-{name}"))
        limit = _shared[name]
        limit.per_s = min(limit.per_s, per_s)
        return limit
