"""The sample that goes on to the next step."""

from collections import Counter

import pytest
from scipy.stats import chisquare

from leret.core.types import Failure, Sample, Task
from leret.sampling.rollouts.selection import reward_levels, select_next

TASK = Task.question("q", "?", gold=("d1", "d2"))


def made(name, reward, doc_ids=("x", "d1")):
    failure = Failure("parse", "") if reward is None else None
    return Sample(name, "s", "q", 0, "0", 0, 0, completion=name, doc_ids=doc_ids, reward=reward, failure=failure)


def select(samples, seed, state_id):
    return select_next(samples, TASK, seed, state_id)


def test_levels_go_from_high_to_low_and_pass_over_failures():
    samples = [made("a", 0.5), made("b", 1.0), made("c", None), made("d", 0.5)]
    assert [(reward, [s.id for s in members]) for reward, members in reward_levels(samples)] == [
        (1.0, ["b"]),
        (0.5, ["a", "d"]),
    ]


def test_a_rounding_error_is_no_level_of_its_own():
    assert len(reward_levels([made("a", 0.1 + 0.2), made("b", 0.3)])) == 1


@pytest.mark.parametrize("reward", [1.0, -3.5, 7.0])
def test_solved_samples_do_not_go_on_whatever_their_reward(reward):
    done, waiting = made("done", reward, ("d2", "d1")), made("open", 0.0)
    assert {select([done, waiting], 0, f"s{i}").id for i in range(20)} == {"open"}
    assert select([done], 0, "s") is None
    assert select([made("broken", None)], 0, "s") is None
    assert select([], 0, "s") is None


def test_rewards_are_any_real_numbers():
    assert select([made("a", -3.5)], 0, "s").id == "a"
    samples = [made("a", -3.5), made("b", -1.0), made("c", 40.0)]
    counts = Counter(select(samples, 0, f"s{i}").id for i in range(2000))
    assert counts["a"] == 0, "the lowest level weighs nothing"
    assert 0.02 < counts["b"] / 2000 < 0.09, "2.5 of 46.5"


def test_a_state_where_nothing_was_found_goes_on_all_the_same():
    assert select([made("a", 0.0)], 0, "s").id == "a"


def test_the_draw_is_repeatable_and_each_states_own():
    samples = [made(name, reward) for name, reward in (("a", 0.5), ("b", 0.25), ("c", 0.5))]
    draws = [select(samples, 3, f"s{i}").id for i in range(50)]
    assert draws == [select(samples, 3, f"s{i}").id for i in range(50)]
    assert len(set(draws)) == 3
    assert draws != [select(samples, 4, f"s{i}").id for i in range(50)]


def test_a_level_is_drawn_by_its_reward_with_a_bonus_for_the_highest_then_a_member():
    # levels .5 (a, c) and .25 (b) and 0 (d): weights .5 + .5, .25, 0 -> 1/1.25 = .8, .2, 0; a and c share their .8
    samples = [made("a", 0.5), made("b", 0.25), made("c", 0.5), made("d", 0.0)]
    n = 4000
    counts = Counter(select(samples, 0, f"s{i}").id for i in range(n))
    assert counts["d"] == 0
    assert chisquare([counts["a"], counts["b"], counts["c"]], [0.4 * n, 0.2 * n, 0.4 * n]).pvalue > 0.001
