"""The sample that goes on to the next step."""

from collections import Counter

import pytest
from scipy.stats import chisquare

from leret.core.types import Task
from leret.sampling.rollouts.selection import reward_levels, select_next
from tests.sampling.fakes import made

TASK = Task.question("q", "?", gold=("d1", "d2"))
TWO_LEVELS = {"a": 0.5, "b": 0.25, "c": 0.5}


def samples_of(doc_ids=("x", "d1"), **rewards):
    return [made(name, reward, doc_ids=doc_ids) for name, reward in rewards.items()]


def drawn(samples, n=1, seed=0):
    """What goes on at each of ``n`` states."""
    chosen = [select_next(samples, TASK, seed, f"s{i}") for i in range(n)]
    return [sample and sample.id for sample in chosen]


def test_levels_go_from_high_to_low_and_pass_over_failures():
    levels = reward_levels(samples_of(a=0.5, b=1.0, c=None, d=0.5, e=0.1 + 0.2, f=0.3))  # a rounding error is no level
    names = {reward: "".join(sample.id for sample in members) for reward, members in levels}
    assert list(names.items()) == [(1.0, "b"), (0.5, "ad"), (0.3, "ef")]


@pytest.mark.parametrize("reward", [1.0, -3.5, 7.0])
def test_solved_samples_do_not_go_on_whatever_their_reward(reward):
    done = samples_of(("d2", "d1"), done=reward)
    assert set(drawn([*done, *samples_of(open=0.0)], 20)) == {"open"}
    assert [drawn(samples) for samples in (done, samples_of(broken=None), [])] == [[None]] * 3


def test_rewards_are_any_real_numbers():
    assert drawn(samples_of(a=-3.5)) == drawn(samples_of(a=0.0)) == ["a"]
    counts = Counter(drawn(samples_of(a=-3.5, b=-1.0, c=40.0), 2000))
    assert counts["a"] == 0, "the lowest level weighs nothing"
    assert 0.02 < counts["b"] / 2000 < 0.09, "2.5 of 46.5"


def test_the_draw_is_repeatable_and_each_states_own():
    draws = drawn(samples_of(**TWO_LEVELS), 50, seed=3)
    assert draws == drawn(samples_of(**TWO_LEVELS), 50, seed=3) != drawn(samples_of(**TWO_LEVELS), 50, seed=4)
    assert set(draws) == set("abc")


def test_a_level_is_drawn_by_its_reward_with_a_bonus_for_the_highest_then_a_member():
    # levels .5 (a, c) and .25 (b) and 0 (d): weights .5 + .5, .25, 0 -> 1/1.25 = .8, .2, 0; a and c share their .8
    n = 4000
    counts = Counter(drawn(samples_of(**TWO_LEVELS, d=0.0), n))
    assert counts["d"] == 0
    assert chisquare([counts["a"], counts["b"], counts["c"]], [0.4 * n, 0.2 * n, 0.4 * n]).pvalue > 0.001
