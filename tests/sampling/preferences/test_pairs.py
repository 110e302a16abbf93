"""Pairs of one state."""

import pytest

from leret.sampling.preferences.pairs import distinct, make_pairs
from tests.sampling.preferences.conftest import made

SAMPLES = [
    made(i, "0", text, reward) for i, (text, reward) in enumerate(zip("abcd", (1.0, 0.5, 0.5, 0.0), strict=True))
]
FLAT = [made(i, "0", text, 0.5) for i, text in enumerate("ab")]


@pytest.mark.parametrize(
    ("strategy", "limits", "expected"),
    [
        ("adjacent", {}, ["ab", "ac", "bd", "cd"]),
        ("best-worst", {}, ["ad"]),
        ("all", {}, ["ab", "ac", "ad", "bd", "cd"]),
        ("margin", {"margin": 0.75}, ["ad"]),
        ("margin", {"margin": 0.5}, ["ab", "ac", "ad", "bd", "cd"]),
        ("all", {"max_pairs": 1}, ["ad"]),  # the widest margins, in their order
        ("all", {"max_pairs": 3}, ["ab", "ac", "ad"]),
    ],
)
def test_strategies_by_hand(strategy, limits, expected):
    pairs = make_pairs(SAMPLES, strategy, **limits)
    assert [chosen.completion + rejected.completion for chosen, rejected in pairs] == expected
    assert make_pairs(FLAT, strategy, **limits) == []


def test_distinct_keeps_the_first_of_equal_completions_and_drops_failures():
    samples = [
        made(i, "0", text, reward) for i, (text, reward) in enumerate([("x", 0.5), ("x", 0), ("y", 0), ("z", None)])
    ]
    assert distinct(samples) == [samples[0], samples[2]]
