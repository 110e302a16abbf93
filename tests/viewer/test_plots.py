import pytest

from leret.viewer.plots import MISMATCH, axis, curves_of


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.52, None, 0.97], [0.4, 0.6, 0.8, 1.0]),
        ([0.0, 1.0], [0.0, 0.5, 1.0]),
        ([1.1e-6, 2e-5], [0.0, 5e-6, 1e-5, 1.5e-5, 2e-5]),
        ([3.0, 3.0], [3.0, 4.0, 5.0, 6.0]),
        ([-3.5, 2.0], [-4.0, -2.0, 0.0, 2.0]),
        ([], [0.0, 0.5, 1.0]),
    ],
)
def test_an_axis_has_round_ticks_around_its_values(values, ticks):
    made = axis(values)
    assert made.ticks == ticks
    assert (made.at(ticks[0]), made.at(ticks[-1])) == (0, 100)


def test_an_axis_of_steps_is_tight_and_has_whole_ticks():
    made = axis([1, 24], tight=True)
    assert (made.low, made.high, made.ticks) == (1, 24, [10.0, 20.0])
    assert (made.at(1), made.at(12.5), made.at(24)) == (0, 50, 100)
    assert axis([0, 2], tight=True).ticks == [0.0, 1.0, 2.0]


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
    ppo = [{"step": i, "objective/scores": 0.1, "objective/kl": 0.2, "policy/entropy": 0.3} for i in (1, 2)]
    grpo, of_ppo = curves_of({"log_history": log}), curves_of({"log_history": ppo})
    titles = ["mean reward", "KL to the initial policy, nats", "entropy, nats per token"]
    assert [title for title, _ in grpo] == [*titles, "loss"]
    assert [title for title, _ in of_ppo] == titles
    assert grpo[1][1] == {"KL": [(1, 0.01), (2, 0.02), (3, 0.03)]}


def test_an_online_training_has_curves_of_parts_spread_unparsed_share_and_length():
    parts = {"rewards/rr/mean": 0.5, "rewards/final.f1/mean": 0.1, "rewards/reward/mean": 0.6}  # TRL logs the last
    more = {"frac_reward_zero_std": 0.3, "completions/unparsed": 0.01, "completions/mean_length": 20.0}
    panels = curves_of({"log_history": [{"step": i, **parts, **more} for i in (1, 2)]})
    shown = {title: list(lines) for title, lines in panels}
    assert shown == {
        "mean of each reward part": ["rr", "final.f1"],
        "share of groups without spread": ["share"],
        "share of unparsed completions": ["share"],
        "mean length of a completion, tokens": ["tokens"],
    }
    assert dict(panels)["mean of each reward part"]["final.f1"] == [(1, 0.1), (2, 0.1)]


def test_rewards_are_shown_at_five_points_of_the_training():
    def log(n):
        return [{"step": 5 * i, "reward_percentiles/0": 0.0, "reward_percentiles/100": i / n} for i in range(1, n + 1)]

    [(title, lines)] = curves_of({"log_history": [{"step": 0, "eval_recall": 0.5}, *log(9)]})
    assert title.startswith("reward by percentile")
    assert list(lines) == [f"step {step}" for step in (5, 15, 25, 35, 45)]
    assert lines["step 45"] == [(0.0, 0.0), (100.0, 1.0)]
    [(_, lines)] = curves_of({"log_history": log(2)})
    assert list(lines) == ["step 5", "step 10"]
