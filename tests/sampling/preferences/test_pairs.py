"""Pairs of one state."""

import pytest

from leret.core.types import Failure, Sample
from leret.sampling.preferences.pairs import distinct, make_pairs


def made(text, reward, name=None):
    failure = Failure("parse", "") if reward is None else None
    return Sample(name or text, "s", "q", 0, "0", 0, 0, completion=text, reward=reward, failure=failure)


SAMPLES = [made("a", 1.0), made("b", 0.5), made("c", 0.5), made("d", 0.0)]


def names(pairs):
    return [chosen.id + rejected.id for chosen, rejected in pairs]


@pytest.mark.parametrize(
    ("strategy", "margin", "expected"),
    [
        ("adjacent", 0.0, ["ab", "ac", "bd", "cd"]),
        ("best-worst", 0.0, ["ad"]),
        ("all", 0.0, ["ab", "ac", "ad", "bd", "cd"]),
        ("margin", 0.75, ["ad"]),
        ("margin", 0.5, ["ab", "ac", "ad", "bd", "cd"]),
    ],
)
def test_strategies_by_hand(strategy, margin, expected):
    assert names(make_pairs(SAMPLES, strategy, margin)) == expected


def test_the_widest_margins_are_kept_in_their_order():
    assert names(make_pairs(SAMPLES, "all", max_pairs=1)) == ["ad"]
    assert names(make_pairs(SAMPLES, "all", max_pairs=3)) == ["ab", "ac", "ad"]
    assert names(make_pairs(SAMPLES, "all", max_pairs=9)) == ["ab", "ac", "ad", "bd", "cd"]


def test_one_level_gives_no_pair():
    for strategy in ("adjacent", "best-worst", "all", "margin"):
        assert make_pairs([made("a", 0.5), made("b", 0.5)], strategy) == []


def test_distinct_keeps_the_first_of_equal_completions_and_drops_failures():
    samples = [made("x", 0.5, "1"), made("x", 0.5, "2"), made("y", 0.0, "3"), made("z", None, "4")]
    assert [s.id for s in distinct(samples)] == ["1", "3"]
