import numpy as np
import pytest

from leret.config.sampling import MIXER_SHELF
from leret.rewards.combine import GroupMixer, find_mixer

MIXERS = {name: find_mixer(name) for name in MIXER_SHELF if name != "factors"}

RNG = np.random.default_rng(0)
MATRICES = [RNG.normal(size=(int(RNG.integers(2, 17)), int(RNG.integers(1, 6)))) for _ in range(6)]
NAN = np.nan


def mixed(name, rows, scale=None):
    matrix = np.array(rows, dtype=float)
    weights = dict(enumerate(np.ones(matrix.shape[1]) if scale is None else scale))
    group = [{i: value for i, value in enumerate(row) if not np.isnan(value)} for row in matrix]
    return np.array(MIXERS[name](group, weights), dtype=float)


def std(matrix):
    deviations = np.sqrt(((matrix - matrix.mean(0)) ** 2).sum(0) / len(matrix))
    return (matrix * deviations).sum(1) / deviations.sum()


def pca(matrix):
    centred = matrix - matrix.mean(0)
    axis = np.linalg.svd(centred)[2][0]
    return matrix @ (axis * np.sign(np.cov(centred @ axis, centred.mean(1))[0, 1]))


def l2(matrix):
    return np.sqrt((matrix.clip(min=0) ** 2).sum(1)) - np.sqrt((matrix.clip(max=0) ** 2).sum(1))


WRITTEN_OUT = {
    "uniform": lambda matrix: matrix.sum(1) / matrix.shape[1],
    "std": std,
    "pca": pca,
    "l2": l2,
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_equals_numpy_with_and_without_weights(name):
    for matrix in MATRICES:
        for scale in (np.ones(matrix.shape[1]), RNG.uniform(0.1, 3, size=matrix.shape[1])):
            if name == "normalize_then_sum":
                expected = (matrix - matrix.mean(0)) / matrix.std(0) @ scale
            else:
                expected = WRITTEN_OUT[name](matrix * scale)
            np.testing.assert_allclose(mixed(name, matrix, scale), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("uniform", 1.5), ("std", 1.5), ("pca", 4.5**0.5), ("l2", 5**0.5), ("normalize_then_sum", 0)],
)
def test_samples_without_spread_have_equal_rewards(name, expected):
    np.testing.assert_allclose(mixed(name, [[1, 2]] * 3), [expected] * 3)
    np.testing.assert_allclose(mixed(name, [[1, 2]]), [expected])  # nor has one sample alone


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", MIXERS)
def test_sample_or_part_without_values_is_left_out(name):
    np.testing.assert_allclose(mixed(name, [[1, NAN, 2], [4, NAN, 1]]), mixed(name, [[1, 2], [4, 1]]))
    rewards = mixed(name, [[1, 2], [NAN, NAN], [2, 4]])
    assert np.isnan(rewards).tolist() == [False, True, False]
    assert np.isnan(mixed(name, [[NAN, NAN]])).all()
    if isinstance(MIXERS[name], GroupMixer):  # the mean of the group stands for a missing part
        np.testing.assert_allclose(mixed(name, [[1, NAN], [2, 4], [5, 2]]), mixed(name, [[1, 3], [2, 4], [5, 2]]))


def test_parts_of_weight_0_multiply_the_weighted_sum_of_the_others():
    values = {"recall": 0.5, "steps": -2.0, "length": 0.25, "format": 1.0}
    group = [values, {"recall": 0.5}, {"length": 0.5}]
    weights = {"recall": 2.0, "steps": 1.0, "length": 0.0, "format": 0.0}
    assert find_mixer("factors")(group, weights) == [-0.25, 1.0, None]  # (2 * .5 - 2) * .25
