"""Reciprocal rank fusion by hand."""

from __future__ import annotations

import pytest

from leret.retrieval.fusion import fused, fused_ids
from leret.types import Passage


def test_by_hand() -> None:
    # b: 1/62 + 1/61, a: 1/61, c: 1/62
    assert fused_ids([["a", "b"], ["b", "c"]]) == [
        ("b", pytest.approx(1 / 62 + 1 / 61)),
        ("a", pytest.approx(1 / 61)),
        ("c", pytest.approx(1 / 62)),
    ]


def test_equal_scores_keep_the_order_of_arrival_and_a_repeated_id_counts_once() -> None:
    assert [i for i, _ in fused_ids([["x"], ["y"]])] == ["x", "y"]
    assert fused_ids([["x", "x", "y"]]) == [("x", 1 / 61), ("y", 1 / 62)]
    assert fused_ids([[], []]) == []


def test_passages_keep_their_text() -> None:
    a, b = Passage("a", "A", "one", 9.0), Passage("b", "B", "two", 0.1)
    assert fused([(a,), (b, a)], 1) == (Passage("a", "A", "one", 1 / 61 + 1 / 62),)
