"""Fusion of rankings, by hand."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leret.core.types import Passage, Ranking
from leret.retrieval.fusion import linear_fusion, reciprocal_rank_fusion


def ranking(**scores: float) -> Ranking:
    found = [Passage(name, name.upper(), "", score) for name, score in scores.items()]
    return tuple(sorted(found, key=lambda passage: -passage.score))


def shown(fused: Ranking) -> list[tuple[str, float]]:
    return [(passage.doc_id, round(passage.score, 6)) for passage in fused]


def test_reciprocal_rank_fusion_are_the_formula_by_hand() -> None:
    # a: 1/61 + 1/62, b: 1/62 + 1/61 (equal, and a is first in the first ranking), c: 1/63, d: 1/63
    fused = reciprocal_rank_fusion([ranking(a=9, b=8, c=7), ranking(b=0.9, a=0.8, d=0.1)], [1, 1])
    assert shown(fused) == [("a", 0.032522), ("b", 0.032522), ("c", 0.015873), ("d", 0.015873)]


def test_a_linear_fusion_scales_each_ranking_first() -> None:
    # first: a 1, b .5, c 0; second: c 1, a 0. .6 and .4: a .6, b .3, c .4
    fused = linear_fusion([ranking(a=30, b=20, c=10), ranking(c=0.9, a=0.1)], [0.6, 0.4])
    assert shown(fused) == [("a", 0.6), ("c", 0.4), ("b", 0.3)]


def test_two_empty_rankings_have_no_fusion() -> None:
    assert reciprocal_rank_fusion([(), ()], [1, 1]) == linear_fusion([(), ()], [1, 1]) == ()


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.permutations("abcdef"), min_size=2, max_size=2), st.integers(0, 6), st.integers(0, 6))
def test_every_document_stands_there_once_best_first(orders: list[list[str]], n: int, m: int) -> None:
    first, second = (
        ranking(**{name: float(10 - i) for i, name in enumerate(order[:cut])})
        for order, cut in zip(orders, (n, m), strict=True)
    )
    for fused in (reciprocal_rank_fusion([first, second], [1, 1]), linear_fusion([first, second], [0.5, 0.5])):
        assert {p.doc_id for p in fused} == {p.doc_id for p in (*first, *second)}
        assert len(fused) == len({p.doc_id for p in fused})
        scores = [p.score for p in fused]
        assert scores == sorted(scores, reverse=True)
