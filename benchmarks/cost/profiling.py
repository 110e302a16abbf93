"""Profile the main thread's CPU-seconds by leret's tasks. BM25 runs in that thread."""

from __future__ import annotations

import signal
import time
from collections import Counter
from types import FrameType
from typing import Any

_EVERY_S = 0.001

PLACES = (
    # The innermost leret frame on the stack decides: the first path fragment that matches its file.
    ("leret/policies/", "HTTP: request, reply, JSON (aiohttp below it)"),
    ("leret/http/", "HTTP: request, reply, JSON (aiohttp below it)"),
    ("leret/programs/replay", "replaying the program"),
    ("leret/programs/needs", "replaying the program"),
    ("leret/programs/search", "replaying the program"),
    ("pipelines/multihop", "replaying the program"),
    ("leret/programs/", "messages and parsing (DSPy's adapter below it)"),
    ("leret/sampling/store", "store: rows and SQLite"),
    ("leret/rewards/", "rewards"),
    ("leret/retrieval/batching", "search: batches"),
    ("leret/retrieval/", "search: BM25"),
    ("leret/", "samples, ids, next state, bookkeeping"),
)
_LOOP = "asyncio's loop and tasks"


class Shares:
    """Counts CPU-seconds by place."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._last = 0.0
        self._before: Any = None

    def begin(self) -> None:
        """Start profiling; call it from the main thread."""
        self._last = time.thread_time()
        self._before = signal.signal(signal.SIGPROF, self._tick)
        signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)

    def end(self) -> None:
        """Stop."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._before)

    def table(self) -> str:
        """Return a Markdown table, largest share first."""
        total = self.seconds.total()
        rows = [f"| {place} | {seconds / total:.1%} |" for place, seconds in self.seconds.most_common()]
        return "\n".join(["| where | share |", "|---|---|", *rows])

    def _tick(self, number: int, frame: FrameType | None) -> None:
        """Handle a tick. The timer counts all threads' CPU time, so weight the tick by the main thread's CPU time."""
        now = time.thread_time()
        self.seconds[_place(frame)] += now - self._last
        self._last = now


def _place(frame: FrameType | None) -> str:
    wire = False
    while frame is not None and frame.f_code.co_name != "_run_once":
        path = frame.f_code.co_filename
        wire = wire or "aiohttp" in path
        for fragment, place in PLACES:
            if fragment in path:
                return place
        frame = frame.f_back
    return PLACES[0][1] if wire else _LOOP
