"""Usage of a policy: calls, tokens, latencies, cost, and failed attempts by kind."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from leret.core.runs import Run

# Histogram buckets per doubling of latency. Memory is constant, and percentiles are accurate to
# about 5%.
_STEPS_A_DOUBLING = 8

_EVENT_S = 30.0
_FACTS_S = 1.0

_COUNTS = ("calls", "completions", "prompt_tokens", "completion_tokens", "failed")


@dataclass
class Usage:
    """Thread-safe counts of a session. ``calls`` includes calls that failed after all retries.

    Prompt tokens count once per call. Latencies include waiting and retries. Prices are per million
    tokens.
    """

    price_prompt: float = 0.0
    price_completion: float = 0.0
    calls: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed: int = 0
    latencies: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def answered(
        self,
        seconds: float,
        n_prompt_tokens: int = 0,
        n_completion_tokens: int = 0,
        n_completions: int = 0,
    ) -> None:
        """Count an answered call; ``n_completion_tokens`` is the sum over its completions."""
        with self.lock:
            self.calls += 1
            self.prompt_tokens += n_prompt_tokens
            self.completion_tokens += n_completion_tokens
            self.completions += n_completions
            self.latencies[round(math.log2(max(seconds, 1e-6)) * _STEPS_A_DOUBLING)] += 1

    def lost(self, n_completions: int) -> None:
        """Count a call that failed after all retries."""
        with self.lock:
            self.calls += 1
            self.failed += n_completions

    def percentile(self, percent: float) -> float:
        """Return a percentile of the calls' latencies in seconds; 0 if there are no calls."""
        rank = self.latencies.total() * percent / 100
        seen = 0
        for bucket, n in sorted(self.latencies.items()):
            seen += n
            if seen >= rank:
                latency_s = 2.0 ** (bucket / _STEPS_A_DOUBLING)
                return float(f"{latency_s:.3g}")
        return 0.0

    def facts(self) -> dict[str, float | int]:
        """Return the counts, latency percentiles (if there are calls) and ``cost`` (if priced)."""
        with self.lock:
            counts: dict[str, float | int] = {name: getattr(self, name) for name in _COUNTS}
            if self.latencies:
                for percent in (50, 90, 99):
                    counts[f"latency_p{percent}_s"] = self.percentile(percent)
        if self.price_prompt or self.price_completion:
            cost = counts["prompt_tokens"] * self.price_prompt
            cost += counts["completion_tokens"] * self.price_completion
            counts["cost"] = round(cost / 1e6, 6)
        return counts


class FaultMeter:
    """Thread-safe counts of a served policy: ``retries``, and ``fault_KIND`` by kind of error."""

    def __init__(self) -> None:
        self._counts = Counter(retries=0)
        self._lock = threading.Lock()

    def count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class UsageEvents:
    """Async context manager that writes an ``accounts`` event every 30 seconds and at the end."""

    def __init__(
        self,
        run: Run,
        usage: Usage,
        policy: object,
        searches: Callable[[], Mapping[str, int]],
    ) -> None:
        self._run = run
        self._usage = usage
        meter = getattr(policy, "meter", None)
        self._snapshot: Callable[[], dict[str, int]] = getattr(meter, "snapshot", dict)
        self._searches = searches
        self._facts: dict[str, float | int | str] = {}
        self._facts_at = -_FACTS_S

    def account(self) -> dict[str, Any]:
        endpoint = self._snapshot()
        return {
            "seconds": round(time.monotonic() - self._began, 3),
            **self._usage.facts(),
            "searches": self._searches(),
            **({"endpoint": endpoint} if endpoint else {}),
        }

    def facts(self) -> dict[str, float | int | str]:
        """Return the metrics for the progress line, computed at most once per second."""
        now = time.monotonic()
        if now - self._facts_at >= _FACTS_S:
            total = self._usage.facts()
            retries = self._snapshot().get("retries", 0)
            self._facts_at = now
            self._facts = {"calls": total["calls"]}
            self._facts["tokens"] = f"{total['prompt_tokens']:,}+{total['completion_tokens']:,}"
            if "latency_p90_s" in total:
                self._facts["p90"] = f"{total['latency_p90_s']:.2g} s"
            if retries:
                self._facts["retries"] = retries
            if total.get("cost"):
                self._facts["cost"] = total["cost"]
        return self._facts

    async def __aenter__(self) -> Self:
        async def write_events() -> None:
            while True:
                await asyncio.sleep(_EVENT_S)
                self._run.event("sample", "accounts", **self.account())

        self._began = time.monotonic()
        self._writer = asyncio.create_task(write_events())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.cancel()
        with suppress(asyncio.CancelledError, Exception):  # the event below has the same counts
            await self._writer
        self._run.event("sample", "accounts", **self.account())
