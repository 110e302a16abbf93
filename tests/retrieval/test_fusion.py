from leret.core.types import Passage
from leret.retrieval.fusion import linear_fusion, reciprocal_rank_fusion


def ranking(**scores):
    return tuple(Passage(name, name.upper(), "", score) for name, score in scores.items())


def shown(fused):
    return [(passage.doc_id, round(passage.score, 6)) for passage in fused]


def test_reciprocal_rank_fusion_is_the_formula():
    # a: 1/61 + 1/62, b: 1/62 + 1/61 (equal, and a is first in the first ranking), c: 1/63, d: 1/63
    pair = [ranking(a=9, b=8, c=7), ranking(b=0.9, a=0.8, d=0.1)]
    fused = reciprocal_rank_fusion(pair, [1, 1])
    assert shown(fused) == [("a", 0.032522), ("b", 0.032522), ("c", 0.015873), ("d", 0.015873)]
    # a: 1/4 + 2/5, b: 1/5 + 2/4, c: 1/6, d: 2/6
    fused = reciprocal_rank_fusion(pair, [1, 2], constant=3)
    assert shown(fused) == [("b", 0.7), ("a", 0.65), ("d", 0.333333), ("c", 0.166667)]
    assert reciprocal_rank_fusion([(), ()], [1, 1]) == ()


def test_linear_fusion_scales_each_ranking_first():
    # first: a 1, b .5, c 0; second: c 1, a 0. .6 and .4: a .6, b .3, c .4
    fused = linear_fusion([ranking(a=30, b=20, c=10), ranking(c=0.9, a=0.1)], [0.6, 0.4])
    assert shown(fused) == [("a", 0.6), ("c", 0.4), ("b", 0.3)]
    # all scores of the first are equal, and count as 1
    assert shown(linear_fusion([ranking(a=7, b=7), ()], [0.6, 0.4])) == [("a", 0.6), ("b", 0.6)]
    assert linear_fusion([(), ()], [1, 1]) == ()
