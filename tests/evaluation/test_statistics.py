import numpy as np
import pytest
from scipy import stats

from leret.evaluation.statistics import (
    Resampling,
    bootstrap_intervals,
    compare_corpus,
    corpus_interval,
    sign_flip_p,
    with_holm,
)
from leret.rewards.corpus import CorpusMeasure, ratio

RNG = np.random.default_rng(7)
SCORES, OTHERS = (RNG.choice([0.0, 0.5, 1.0], 200, p=p) for p in ([0.2, 0.4, 0.4], [0.3, 0.4, 0.3]))
FEW = np.array([0.5, -0.5, 1.0, 0.25, 0.5, 0.0, 0.75, -0.25, 1.0])


@pytest.mark.parametrize(("values", "level"), [(SCORES, 0.95), (SCORES - OTHERS, 0.9)], ids=["mean", "difference"])
def test_intervals_agree_with_scipy(values, level):
    ours = bootstrap_intervals(values[:, None], 10_000, level, seed=1)[0]
    options = {"n_resamples": 10_000, "confidence_level": level, "method": "percentile", "rng": 1}  # the same resamples
    assert ours == pytest.approx(stats.bootstrap((values,), np.mean, **options).confidence_interval, abs=1e-12)


def test_questions_without_a_value_are_left_out():
    low, high = bootstrap_intervals(np.append(SCORES, [np.nan] * 50)[:, None], 5_000)[0]
    assert low < SCORES.mean() < high
    nothing = np.full((100, 1), np.nan)
    assert np.isnan([*bootstrap_intervals(nothing, 100)[0], *sign_flip_p(nothing, 99)]).all()


def test_all_sign_flips_of_few_questions_agree_with_scipy():
    theirs = stats.permutation_test((FEW,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(FEW[:, None], 10_000)[0] == pytest.approx(theirs.pvalue, abs=1e-9)


def test_sampled_sign_flips_equal_scipy_on_the_same_resamples():
    values = SCORES - OTHERS
    flips = np.random.default_rng(1).integers(0, 2, size=(10_000, len(values)), dtype=np.int8) * 2 - 1
    options = {"n_resamples": 10_000, "alternative": "greater"}
    theirs = stats.monte_carlo_test(values, lambda size: flips * values, lambda x, axis: abs(x.sum(axis)), **options)
    assert sign_flip_p(values[:, None], 10_000, seed=1)[0] == pytest.approx(theirs.pvalue, abs=1e-12)


def test_p_is_never_zero_and_is_one_without_a_difference():
    assert sign_flip_p(np.ones((100, 1)), 999)[0] == pytest.approx(1 / 1000)
    assert sign_flip_p(np.zeros((100, 1)), 999)[0] == 1.0


def test_holm_by_hand_each_measure_alone_and_no_test_does_not_count():
    found = [("ap", 0.01), ("ap", None), ("recall", 0.9), ("ap", 0.04), ("recall", 0.8), ("ap", 0.03)]
    adjusted = with_holm({"measure": measure, "p": p} for measure, p in found)
    assert [row["p_holm"] for row in adjusted] == [0.03, None, 1.0, 0.06, 1.0, 0.06]


@pytest.mark.parametrize("n", [9, 40])
def test_a_measure_of_all_answers_is_tested_as_a_mean_is(n):
    """A mean is the ratio of a sum of values to a count, so both ways give the same figures."""
    measure = CorpusMeasure(None, ratio)
    one, other = SCORES[:n].copy(), OTHERS[:n].copy()
    one[3] = np.nan  # a question that one system has not answered
    rows = [np.stack([x, np.where(np.isnan(x), np.nan, 1.0)], axis=1) for x in (one, other)]
    recipe = Resampling(resamples=2000, seed=3)
    difference = np.delete(one - other, 3)[:, None]
    found = compare_corpus(*rows, measure, recipe)
    assert (found["n"], found["difference"]) == (n - 1, pytest.approx(difference.mean(), abs=1e-6))
    assert found["ci"] == pytest.approx(bootstrap_intervals(difference, 2000, seed=3)[0], abs=1e-6)
    assert found["p"] == pytest.approx(sign_flip_p(difference, 2000, seed=3)[0], abs=1e-6)
    [expected] = bootstrap_intervals(np.delete(one, 3)[:, None], 2000, seed=3)
    assert corpus_interval(np.delete(rows[0], 3, axis=0), measure, recipe) == pytest.approx(expected, abs=1e-6)


def test_a_measure_that_cannot_be_resampled_has_a_difference_alone():
    measure = CorpusMeasure(None, ratio, resampled=False)
    one, other = np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]])
    assert corpus_interval(one, measure, Resampling()) == [None, None]
    facts = {"n": 1, "difference": 0.25, "ci": [None, None], "p": None}
    assert compare_corpus(one, other, measure, Resampling()) == facts
    assert compare_corpus(one * np.nan, other, measure, Resampling()) == facts | {"n": 0, "difference": None}
