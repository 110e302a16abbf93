import pytest

from leret.viewer.plots import MISMATCH, axis, curves_of


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.52, None, 0.97], [0.4, 0.6, 0.8, 1.0]),
        ([3.0, 3.0], [3.0, 4.0, 5.0, 6.0]),
        ([-3.5, 2.0], [-4.0, -2.0, 0.0, 2.0]),
        ([], [0.0, 0.5, 1.0]),
    ],
)
def test_an_axis_has_round_ticks_around_its_values(values, ticks):
    made = axis(values)
    assert made.ticks == ticks
    assert (made.at(ticks[0]), made.at(ticks[-1])) == (0, 100)


def test_sampler_and_trainer_have_two_panels():
    names = ("logp_difference/mean", "logp_difference/max")
    ratios = [f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")]
    log = []
    for step, values in enumerate(((1e-6, 8e-6), (3e-6, 2e-5)), 1):
        row = {f"sampling/sampling_{name}": value for name, value in zip(names, values, strict=True)}
        log.append({"step": step, **row, **dict.fromkeys(ratios, 1.0)})
    panels = dict(curves_of({"log_history": log}))
    assert tuple(panels) == MISMATCH
    assert panels[MISMATCH[0]] == {"mean": [(1, 1e-6), (2, 3e-6)], "largest": [(1, 8e-6), (2, 2e-5)]}
    assert list(panels[MISMATCH[1]]) == ["mean", "largest", "smallest"]


def test_an_online_training_has_curves_of_reward_kl_and_entropy():
    log = [{"step": i, "reward": i / 9, "kl": i / 100, "entropy": 2.0 - i, "loss": 0.1} for i in (1, 2, 3)]
    log[1]["reward_percentiles/50"], log[2]["reward_percentiles/50"] = 0.0, 0.5
    panels = curves_of({"log_history": log})
    titles = ["mean reward", "rewards of the samples", "KL to the initial policy, nats", "entropy, nats per token"]
    assert [title for title, _ in panels] == [*titles, "loss"]
    assert panels[1][1] == {"median": [(2, 0.0), (3, 0.5)]}
    assert panels[2][1] == {"KL": [(1, 0.01), (2, 0.02), (3, 0.03)]}
