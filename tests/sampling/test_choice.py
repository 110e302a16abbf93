"""The sample that goes on to the next step."""

from collections import Counter

from scipy.stats import chisquare

from leret.core.types import Failure, Sample
from leret.sampling.rollouts.selection import choose_next, is_solved, levels


def made(name, reward, recall=0.5):
    failure = Failure("parse", "") if reward is None else None
    components = {} if reward is None else {"recall": recall}
    return Sample(name, "s", "q", 0, "0", 0, 0, completion=name, reward=reward, components=components, failure=failure)


def test_levels_go_from_high_to_low_and_pass_over_failures():
    samples = [made("a", 0.5), made("b", 1.0), made("c", None), made("d", 0.5)]
    assert [(reward, [s.id for s in members]) for reward, members in levels(samples)] == [
        (1.0, ["b"]),
        (0.5, ["a", "d"]),
    ]


def test_a_rounding_error_is_no_level_of_its_own():
    assert len(levels([made("a", 0.1 + 0.2), made("b", 0.3)])) == 1


def test_solved_is_a_perfect_reward_with_everything_found():
    assert is_solved(made("a", 1.0, recall=1.0))
    assert not is_solved(made("a", 1.0, recall=0.5)), "reciprocal rank 1 says nothing of the other documents"
    assert not is_solved(made("a", 0.99, recall=1.0))
    assert not is_solved(made("a", None))


def test_solved_samples_do_not_go_on():
    chosen = {choose_next([made("done", 1.0, 1.0), made("open", 0.0)], 0, f"s{i}").id for i in range(20)}
    assert chosen == {"open"}
    assert choose_next([made("done", 1.0, 1.0)], 0, "s") is None
    assert choose_next([made("broken", None)], 0, "s") is None
    assert choose_next([], 0, "s") is None


def test_a_state_where_nothing_was_found_goes_on_all_the_same():
    assert choose_next([made("a", 0.0)], 0, "s").id == "a"


def test_the_draw_is_repeatable_and_each_states_own():
    samples = [made(name, reward) for name, reward in (("a", 0.5), ("b", 0.25), ("c", 0.5))]
    draws = [choose_next(samples, 3, f"s{i}").id for i in range(50)]
    assert draws == [choose_next(samples, 3, f"s{i}").id for i in range(50)]
    assert len(set(draws)) == 3
    assert draws != [choose_next(samples, 4, f"s{i}").id for i in range(50)]


def test_a_level_is_drawn_by_its_reward_with_a_bonus_for_the_highest_then_a_member():
    # levels .5 (a, c) and .25 (b) and 0 (d): weights .5 + .5, .25, 0 -> 1/1.25 = .8, .2, 0; a and c share their .8
    samples = [made("a", 0.5), made("b", 0.25), made("c", 0.5), made("d", 0.0)]
    n = 4000
    counts = Counter(choose_next(samples, 0, f"s{i}").id for i in range(n))
    assert counts["d"] == 0
    assert chisquare([counts["a"], counts["b"], counts["c"]], [0.4 * n, 0.2 * n, 0.4 * n]).pvalue > 0.001
