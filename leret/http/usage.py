"""What a policy was asked for and what it cost: calls, tokens, faults by kind, latencies, money."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from leret.core.runs import Run

_STEPS_A_DOUBLING = 8
"""Buckets of latencies: a percentile is right to about 5 %, and a million calls take no more memory than one."""

_EVENT_S = 30.0
_FACTS_S = 1.0


@dataclass
class Usage:
    """Counts; ``calls`` are answered or failed for good, a prompt's tokens count once a call."""

    calls: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed: int = 0
    latencies: Counter[int] = field(default_factory=Counter)

    def answered(self, latency_s: float) -> None:
        self.calls += 1
        self.latencies[round(math.log2(max(latency_s, 1e-6)) * _STEPS_A_DOUBLING)] += 1

    def percentile(self, percent: float) -> float:
        """Seconds that ``percent`` of the durations stayed within; 0 where there is none."""
        rank, seen = self.latencies.total() * percent / 100, 0
        for bucket, n in sorted(self.latencies.items()):
            seen += n
            if seen >= rank:
                return float(f"{2.0 ** (bucket / _STEPS_A_DOUBLING):.3g}")
        return 0.0

    def add(self, other: Usage) -> None:
        for name in ("calls", "completions", "prompt_tokens", "completion_tokens", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.latencies.update(other.latencies)

    def facts(self, prices: tuple[float, float]) -> dict[str, float | int]:
        """The counts; latencies where there are any, ``cost`` where a price (of a million tokens) is set."""
        facts: dict[str, float | int] = {name: value for name, value in vars(self).items() if name != "latencies"}
        if self.latencies:
            facts |= {f"latency_p{percent}_s": self.percentile(percent) for percent in (50, 90, 99)}
        if any(prices):
            facts["cost"] = round((self.prompt_tokens * prices[0] + self.completion_tokens * prices[1]) / 1e6, 6)
        return facts


class UsageMeter:
    """Counts the requests of one policy; safe from many threads. Prices are of a million tokens."""

    def __init__(self, price_prompt: float = 0.0, price_completion: float = 0.0) -> None:
        self._prices = price_prompt, price_completion
        self._usage = Usage()
        self._retries = 0
        self._faults: Counter[str] = Counter()
        self._lock = threading.Lock()

    def answered(self, latency_s: float) -> None:
        with self._lock:
            self._usage.answered(latency_s)

    def wrote(self, n_prompt_tokens: int, n_completion_tokens: int, n_completions: int) -> None:
        """Count an answer's tokens; a prompt counts once however many completions it got."""
        with self._lock:
            self._usage.prompt_tokens += n_prompt_tokens
            self._usage.completion_tokens += n_completion_tokens
            self._usage.completions += n_completions

    def fault(self, kind: str) -> None:
        with self._lock:
            self._faults[kind] += 1

    def retried(self) -> None:
        with self._lock:
            self._retries += 1

    def snapshot(self) -> dict[str, float]:
        """`Usage.facts` so far, with ``retries`` and ``fault_KIND``."""
        with self._lock:
            facts = self._usage.facts(self._prices) | {"retries": self._retries}
            facts |= {f"fault_{kind}": n for kind, n in sorted(self._faults.items())}
        return facts


class UsageByPrompt:
    """Counts the calls of a session by step and prompt; of one thread. Prices are of a million tokens."""

    def __init__(self, price_prompt: float = 0.0, price_completion: float = 0.0) -> None:
        self._prices = price_prompt, price_completion
        self._usages: defaultdict[tuple[int, str], Usage] = defaultdict(Usage)

    def answered(
        self, step: int, prompt: str, n_prompt_tokens: int, n_completion_tokens: Sequence[int], seconds: float
    ) -> None:
        """Count an answered call, with so many tokens a completion; ``seconds`` holds all waiting and retries."""
        usage = self._usages[step, prompt]
        usage.answered(seconds)
        usage.completions += len(n_completion_tokens)
        usage.prompt_tokens += n_prompt_tokens
        usage.completion_tokens += sum(n_completion_tokens)

    def failed(self, step: int, prompt: str, n_completions: int) -> None:
        """Count a call that failed for good."""
        usage = self._usages[step, prompt]
        usage.calls += 1
        usage.failed += n_completions

    @property
    def total(self) -> dict[str, float | int]:
        """`Usage.facts` over all steps and prompts."""
        total = Usage()
        for usage in self._usages.values():
            total.add(usage)
        return total.facts(self._prices)

    def rows(self) -> Iterator[dict[str, Any]]:
        """`Usage.facts` by step (LM calls before it) and prompt, in their order."""
        for step, prompt in sorted(self._usages, key=lambda key: (key[0], len(key[1]), key[1])):
            yield {"step": step, "prompt": prompt, **self._usages[step, prompt].facts(self._prices)}


class UsageEvents:
    """Writes an ``accounts`` event every half a minute and one at its end; an async context around a session."""

    def __init__(
        self, run: Run, usage: UsageByPrompt, policy: object, searches: Callable[[], Mapping[str, int]]
    ) -> None:
        self._run = run
        self._usage = usage
        self._snapshot: Callable[[], Mapping[str, float]] = getattr(getattr(policy, "meter", None), "snapshot", dict)
        self._searches = searches
        self._facts: dict[str, float | int | str] = {}
        self._facts_at = -_FACTS_S

    def account(self) -> dict[str, Any]:
        """All that was counted since the session began."""
        endpoint = {name: round(value, 6) for name, value in self._snapshot().items()}
        return {
            "seconds": round(time.monotonic() - self._began, 3),
            **self._usage.total,
            "searches": self._searches(),
            "by_step_and_prompt": list(self._usage.rows()),
            **({"endpoint": endpoint} if endpoint else {}),
        }

    def facts(self) -> dict[str, float | int | str]:
        """For the progress line, computed once a second at most."""
        now = time.monotonic()
        if now - self._facts_at >= _FACTS_S:
            total, retries = self._usage.total, int(self._snapshot().get("retries", 0))
            tokens = f"{_short(int(total['prompt_tokens']))}+{_short(int(total['completion_tokens']))}"
            self._facts_at, self._facts = now, {"calls": total["calls"], "tokens": tokens}
            self._facts |= {"p90": f"{total['latency_p90_s']:.2g} s"} if "latency_p90_s" in total else {}
            self._facts |= {"retries": retries} if retries else {}
            self._facts |= {"cost": total["cost"]} if total.get("cost") else {}
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
        with suppress(asyncio.CancelledError, Exception):  # the last event holds what it could not write
            await self._writer
        self._run.event("sample", "accounts", **self.account())


def _short(n: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.2g}{unit}" if n < 10 * size else f"{n / size:.0f}{unit}"
    return str(n)
