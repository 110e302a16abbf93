from leret.viewer.plots import MISMATCH, axis, curves_of


def test_an_axis_has_round_ticks_around_its_values():
    for values, ticks in (
        ([0.52, None, 0.97], [0.4, 0.6, 0.8, 1.0]),
        ([3.0, 3.0], [3.0, 4.0, 5.0, 6.0]),
        ([-3.5, 2.0], [-4.0, -2.0, 0.0, 2.0]),
        ([], [0.0, 0.5, 1.0]),
    ):
        made = axis(values)
        assert (made.ticks, made.at(ticks[0]), made.at(ticks[-1])) == (ticks, 0, 100)


def test_a_training_has_curves_of_sampler_and_trainer_and_of_reward_kl_and_entropy():
    entry = {f"sampling/importance_sampling_ratio/{name}": 1.0 for name in ("min", "mean", "max")}
    entry |= {f"sampling/sampling_logp_difference/{name}": 1e-6 for name in ("mean", "max")}
    panels = dict(curves_of({"log_history": [{"step": step, **entry} for step in (1, 2)]}))
    assert tuple(panels) == MISMATCH
    points = [(1, 1e-6), (2, 1e-6)]
    assert panels[MISMATCH[0]] == {"mean": points, "largest": points}
    assert list(panels[MISMATCH[1]]) == ["mean", "largest", "smallest"]

    log = [{"step": i, "reward": i / 9, "kl": i / 100, "entropy": 2.0 - i, "loss": 0.1} for i in (1, 2, 3)]
    log[1]["reward_percentiles/50"], log[2]["reward_percentiles/50"] = 0.0, 0.5
    panels = curves_of({"log_history": log})
    titles = ["mean reward", "rewards of the samples", "KL to the initial policy, nats", "entropy, nats per token"]
    assert [title for title, _ in panels] == [*titles, "loss"]
    assert panels[1][1] == {"median": [(2, 0.0), (3, 0.5)]}
    assert panels[2][1] == {"KL": [(1, 0.01), (2, 0.02), (3, 0.03)]}
