"""Figures for Prometheus: all of their digits."""

from __future__ import annotations

from leret.retrieval.server.metrics import Counter, Gauge, Histogram


def test_counts_are_whole_numbers_and_floats_keep_their_digits() -> None:
    counter = Counter("answered", "")
    assert list(counter.lines()) == ["answered 0"]
    counter.add(1_234_567)
    counter.add()
    assert list(counter.lines()) == ["answered 1234568"]
    assert list(Gauge("began", "", lambda: 1760000000.123456).lines()) == ["began 1760000000.123456"]


def test_a_histogram_adds_up_exactly() -> None:
    sizes = Histogram("size", "", (1, 2.5))
    for value in (1, 2, 1_234_567):
        sizes.observe(value)
    assert list(sizes.lines()) == [
        'size_bucket{le="1"} 1',
        'size_bucket{le="2.5"} 2',
        'size_bucket{le="+Inf"} 3',
        "size_sum 1234570",
        "size_count 3",
    ]
