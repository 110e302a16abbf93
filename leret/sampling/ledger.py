"""What sampling asked the policy for, by hop and prompt: calls, tokens, latencies, cost."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from leret.policies.base import Completion

__all__ = ["Latencies", "Ledger", "Line"]

_STEPS_A_DOUBLING = 8
_MILLION = 1e6


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
class Line:
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

    def add(self, other: Line) -> None:
        """Add another one's counts."""
        self.calls += other.calls
        self.samples += other.samples
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.failed += other.failed
        self.latencies.update(other.latencies)


class Ledger:
    """Counts by hop and prompt.

    Args:
        price_prompt: of a million prompt tokens, in any currency.
        price_completion: of a million completion tokens.
    """

    def __init__(self, price_prompt: float = 0.0, price_completion: float = 0.0) -> None:
        self._prices = price_prompt, price_completion
        self._lines: defaultdict[tuple[int, str], Line] = defaultdict(Line)

    def answered(self, step: int, prompt: str, completions: Sequence[Completion], seconds: float) -> None:
        """A call was answered; ``seconds`` holds all of its waiting and retries."""
        line = self._lines[step, prompt]
        line.calls += 1
        line.samples += len(completions)
        if completions:
            line.prompt_tokens += completions[0].n_prompt_tokens
        for completion in completions:
            line.completion_tokens += completion.n_completion_tokens
        line.latencies.add(seconds)

    def failed(self, step: int, prompt: str, n_samples: int) -> None:
        """A call failed for good."""
        line = self._lines[step, prompt]
        line.calls += 1
        line.failed += n_samples

    def add(self, other: Ledger) -> None:
        """Add all that another one counted, of a worker say."""
        for key, line in other._lines.items():
            self._lines[key].add(line)

    @property
    def total(self) -> Line:
        """All hops and prompts."""
        return _sum(self._lines.values())

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row a hop (from 1) and prompt, in their order."""
        for (step, prompt), line in sorted(
            self._lines.items(), key=lambda item: (item[0][0], len(item[0][1]), item[0])
        ):
            yield {"hop": step + 1, "prompt": prompt, **self.facts(line)}

    def facts(self, line: Line) -> dict[str, float | int]:
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

    def cost(self, line: Line) -> float:
        """At the given prices."""
        return (line.prompt_tokens * self._prices[0] + line.completion_tokens * self._prices[1]) / _MILLION


def _sum(lines: Iterable[Line]) -> Line:
    total = Line()
    for line in lines:
        total.add(line)
    return total
