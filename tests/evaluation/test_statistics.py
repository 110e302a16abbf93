"""Intervals and p-values, against scipy and by hand."""

import numpy as np
import pytest
from scipy import stats

from leret.evaluation.statistics import bootstrap_intervals, holm, sign_flip_p


@pytest.fixture
def paired():
    rng = np.random.default_rng(7)
    a = rng.choice([0.0, 0.5, 1.0], 200, p=[0.2, 0.4, 0.4])
    b = rng.choice([0.0, 0.5, 1.0], 200, p=[0.3, 0.4, 0.3])
    return a, b


def test_interval_of_a_mean_agrees_with_scipy(paired):
    a, _ = paired
    ours = bootstrap_intervals(a[:, None], 10_000, 0.95, seed=1)[0]
    theirs = stats.bootstrap((a,), np.mean, n_resamples=10_000, method="percentile", rng=2).confidence_interval
    assert ours == pytest.approx([theirs.low, theirs.high], abs=0.004)


def test_interval_of_a_paired_difference_agrees_with_scipy(paired):
    a, b = paired
    ours = bootstrap_intervals((a - b)[:, None], 10_000, 0.9, seed=1)[0]
    theirs = stats.bootstrap(
        (a, b),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=10_000,
        confidence_level=0.9,
        method="percentile",
        rng=2,
    ).confidence_interval
    assert ours == pytest.approx([theirs.low, theirs.high], abs=0.005)


def test_intervals_are_the_same_for_the_same_seed_and_do_not_depend_on_other_columns(paired):
    a, b = paired
    both = bootstrap_intervals(np.stack([a, b], axis=1), 2_000, seed=3)
    assert (bootstrap_intervals(np.stack([a, b], axis=1), 2_000, seed=3) == both).all()
    assert bootstrap_intervals(b[:, None], 2_000, seed=3)[0] == pytest.approx(both[1])


def test_questions_without_a_value_are_left_out(paired):
    a, _ = paired
    with_holes = np.concatenate([a, np.full(50, np.nan)])
    low, high = bootstrap_intervals(with_holes[:, None], 5_000)[0]
    assert low < np.mean(a) < high
    assert np.isnan(bootstrap_intervals(np.full((4, 1), np.nan), 100)).all()


def test_sign_flip_is_exact_on_few_questions():
    # differences .5 .5 0 1: of the 8 flips of the non-zero ones only +++ and --- reach |2|, so p = 2/8
    assert sign_flip_p(np.array([[0.5], [0.5], [0.0], [1.0]]))[0] == pytest.approx(0.25)


def test_sign_flip_agrees_with_scipy_exact():
    d = np.array([0.5, -0.5, 1.0, 0.25, 0.5, 0.0, 0.75, -0.25, 1.0])
    theirs = stats.permutation_test((d,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(d[:, None])[0] == pytest.approx(theirs.pvalue)


def test_sign_flip_agrees_with_scipy_sampled(paired):
    a, b = paired
    theirs = stats.permutation_test(
        (a, b), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", n_resamples=10_000, rng=5
    )
    assert sign_flip_p((a - b)[:, None], 10_000, seed=1)[0] == pytest.approx(theirs.pvalue, abs=0.01)


def test_p_is_never_zero_and_is_one_without_a_difference():
    assert sign_flip_p(np.ones((100, 1)), 999)[0] == pytest.approx(1 / 1000)
    assert sign_flip_p(np.zeros((100, 1)), 999)[0] == 1.0
    assert np.isnan(sign_flip_p(np.full((100, 1), np.nan), 99)[0])


def test_holm_by_hand_and_no_test_does_not_count():
    assert holm([0.01, float("nan"), 0.04, 0.03])[::2] == pytest.approx([0.03, 0.06])
    assert np.isnan(holm([0.01, float("nan")])[1])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
