"""What a policy was asked for and what it cost: counts, faults by kind, latencies, tokens, money."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PER_OCTAVE = 8
_FASTEST_S = 2.0**-13
_N_BUCKETS = 24 * _PER_OCTAVE
_MILLION = 1e6


@dataclass(slots=True)
class _Part:
    """The counts of one thread; only that thread writes them."""

    calls: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=lambda: [0] * _N_BUCKETS)


class UsageMeter:
    """Counts without locks: every thread has counts of its own, and `snapshot` adds them up.

    Latencies go into buckets of a ninth of their size, so a percentile is right to about 5 % and takes no more memory
    after a million calls than after one.

    Args:
        price_prompt: of a million prompt tokens, in any currency.
        price_completion: of a million completion tokens.
    """

    def __init__(self, price_prompt: float = 0.0, price_completion: float = 0.0) -> None:
        self._prices = price_prompt, price_completion
        self._gauges: list[Callable[[], Mapping[str, float]]] = []
        self._local = threading.local()
        self._parts: list[_Part] = []
        self._lock = threading.Lock()

    def answered(self, latency_s: float) -> None:
        """A request came back with an answer."""
        part = self._part()
        part.calls += 1
        part.buckets[_bucket(latency_s)] += 1

    def wrote(self, n_prompt_tokens: int, n_completion_tokens: int, n_completions: int) -> None:
        """What an answer held; a prompt counts once however many completions it got."""
        part = self._part()
        part.prompt_tokens += n_prompt_tokens
        part.completion_tokens += n_completion_tokens
        part.completions += n_completions

    def fault(self, kind: str) -> None:
        """An attempt failed."""
        faults = self._part().faults
        faults[kind] = faults.get(kind, 0) + 1

    def retried(self) -> None:
        """A request is sent again."""
        self._part().retries += 1

    def watch(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        """Read what is true now rather than counted (the concurrency limit, say) at every snapshot."""
        self._gauges.append(gauges)

    def snapshot(self) -> dict[str, float]:
        """Everything so far.

        Returns:
            ``calls`` (answered requests), ``completions``, ``prompt_tokens``, ``completion_tokens``, ``retries``,
            ``fault_KIND`` for each kind of failed attempt seen, ``latency_p50_s``, ``latency_p90_s`` and
            ``latency_p99_s`` where a call was answered, ``cost`` where a price is set, and the gauges.
        """
        with self._lock:
            parts = list(self._parts)
        told: dict[str, float] = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("calls", "completions", "prompt_tokens", "completion_tokens", "retries")
        }
        for part in parts:
            for kind, n in sorted(dict(part.faults).items()):
                told[f"fault_{kind}"] = told.get(f"fault_{kind}", 0) + n
        buckets = [sum(column) for column in zip(*(part.buckets for part in parts), strict=True)]
        if any(buckets):
            told |= {f"latency_p{percent}_s": _percentile(buckets, percent / 100) for percent in (50, 90, 99)}
        if any(self._prices):
            told["cost"] = (
                told["prompt_tokens"] * self._prices[0] + told["completion_tokens"] * self._prices[1]
            ) / _MILLION
        for gauges in self._gauges:
            told |= gauges()
        return told

    def _part(self) -> _Part:
        try:
            part: _Part = self._local.part
        except AttributeError:
            part = self._local.part = _Part()
            with self._lock:
                self._parts.append(part)
        return part


def _bucket(seconds: float) -> int:
    if seconds <= _FASTEST_S:
        return 0
    return min(_N_BUCKETS - 1, int(math.log2(seconds / _FASTEST_S) * _PER_OCTAVE))


def _percentile(buckets: list[int], share: float) -> float:
    """The middle of the bucket in which ``share`` of the calls is reached."""
    wanted, seen = share * sum(buckets), 0
    for index, n in enumerate(buckets):
        seen += n
        if n and seen >= wanted:
            return float(f"{_FASTEST_S * 2 ** ((index + 0.5) / _PER_OCTAVE):.3g}")
    raise AssertionError("a share of at most 1 is reached")


_STEPS_A_DOUBLING = 8


class Latencies:
    """Durations in buckets a twelfth apart: percentiles of any number of them in the memory of a few hundred.

    >>> seen = Latencies()
    >>> for seconds in (0.1, 0.1, 0.1, 5.0):
    ...     seen.add(seconds)
    >>> round(seen.percentile(50), 1), round(seen.percentile(100), 0)
    (0.1, 5.0)
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Take note of one."""
        self._buckets[round(math.log2(max(seconds, 1e-6)) * _STEPS_A_DOUBLING)] += 1

    def update(self, other: Latencies) -> None:
        """Take note of all of another's."""
        self._buckets.update(other._buckets)

    def percentile(self, percent: float) -> float:
        """Seconds that ``percent`` of them stayed within, to about 5 %; 0 where there is none."""
        wanted, seen = self._buckets.total() * percent / 100, 0
        for bucket, n in sorted(self._buckets.items()):
            seen += n
            if seen >= wanted:
                return float(2.0 ** (bucket / _STEPS_A_DOUBLING))
        return 0.0


@dataclass
class Usage:
    """One hop and prompt.

    Attributes:
        calls: of the policy, each for all samples that the prompt still needed at a state.
        prompt_tokens: of the prompts, one a call.
        failed: samples that no completion came for.
    """

    calls: int = 0
    samples: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed: int = 0
    latencies: Latencies = field(default_factory=Latencies)

    def add(self, other: Usage) -> None:
        """Add another one's counts."""
        self.calls += other.calls
        self.samples += other.samples
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.failed += other.failed
        self.latencies.update(other.latencies)


class UsageByPrompt:
    """Counts by hop and prompt.

    Args:
        price_prompt: of a million prompt tokens, in any currency.
        price_completion: of a million completion tokens.
    """

    def __init__(self, price_prompt: float = 0.0, price_completion: float = 0.0) -> None:
        self._prices = price_prompt, price_completion
        self._lines: defaultdict[tuple[int, str], Usage] = defaultdict(Usage)

    def answered(
        self, step: int, prompt: str, n_prompt_tokens: int, n_completion_tokens: Sequence[int], seconds: float
    ) -> None:
        """A call was answered, with so many tokens a completion; ``seconds`` holds all waiting and retries."""
        line = self._lines[step, prompt]
        line.calls += 1
        line.samples += len(n_completion_tokens)
        line.prompt_tokens += n_prompt_tokens
        line.completion_tokens += sum(n_completion_tokens)
        line.latencies.add(seconds)

    def failed(self, step: int, prompt: str, n_samples: int) -> None:
        """A call failed for good."""
        line = self._lines[step, prompt]
        line.calls += 1
        line.failed += n_samples

    def add(self, other: UsageByPrompt) -> None:
        """Add all that another one counted, of a worker say."""
        for key, line in other._lines.items():
            self._lines[key].add(line)

    @property
    def total(self) -> Usage:
        """All hops and prompts."""
        return _sum(self._lines.values())

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row a hop (from 1) and prompt, in their order."""
        for (step, prompt), line in sorted(
            self._lines.items(), key=lambda item: (item[0][0], len(item[0][1]), item[0])
        ):
            yield {"hop": step + 1, "prompt": prompt, **self.facts(line)}

    def facts(self, line: Usage) -> dict[str, float | int]:
        """A line's counts; ``cost`` where prices are given."""
        facts: dict[str, float | int] = {
            "calls": line.calls,
            "samples": line.samples,
            "prompt_tokens": line.prompt_tokens,
            "completion_tokens": line.completion_tokens,
            "failed": line.failed,
            **{f"latency_p{percent}_s": round(line.latencies.percentile(percent), 4) for percent in (50, 90, 99)},
        }
        if any(self._prices):
            facts["cost"] = round(self.cost(line), 6)
        return facts

    def cost(self, line: Usage) -> float:
        """At the given prices."""
        return (line.prompt_tokens * self._prices[0] + line.completion_tokens * self._prices[1]) / _MILLION


def _sum(lines: Iterable[Usage]) -> Usage:
    total = Usage()
    for line in lines:
        total.add(line)
    return total
