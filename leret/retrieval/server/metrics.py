"""Counters of a server in Prometheus's text format, version 0.0.4."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


class Counter:
    """Only grows; one value for each set of labels."""

    kind = "counter"

    def __init__(self, name: str, description: str) -> None:
        self.name, self.description = name, description
        self._values: dict[Labels, float] = defaultdict(int)

    def add(self, n: float = 1, **labels: str) -> None:
        """Count."""
        self._values[tuple(labels.items())] += n

    def lines(self) -> Iterator[str]:
        """Samples, one a line."""
        for labels, value in self._values.items() or [((), 0)]:
            yield f"{self.name}{_labels(labels)} {value!r}"


class Gauge:
    """A value that is looked up when it is asked for."""

    kind = "gauge"

    def __init__(self, name: str, description: str, value: Callable[[], float], **labels: str) -> None:
        self.name, self.description = name, description
        self._value, self._given = value, tuple(labels.items())

    def lines(self) -> Iterator[str]:
        """The sample."""
        yield f"{self.name}{_labels(self._given)} {self._value()!r}"


class Histogram:
    """How values are spread.

    Args:
        bounds: upper bounds of the buckets, rising; one without a bound is added.
    """

    kind = "histogram"

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        self.name, self.description = name, description
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum: float = 0

    def observe(self, value: float) -> None:
        """Take note of a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        """Buckets, each with all below it; sum and count."""
        n = 0
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            n += count
            shown = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f"{self.name}_bucket{_labels((('le', shown),))} {n}"
        yield f"{self.name}_sum {self._sum!r}"
        yield f"{self.name}_count {n}"


def exposition(metrics: Sequence[Counter | Gauge | Histogram]) -> str:
    """All metrics as text."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.description}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
