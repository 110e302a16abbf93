import pytest

from leret.training.watch import RULES, alarms, best_step, first_alarms


def log_of(key, *values, **beside):
    return [{"step": step, key: value, **beside} for step, value in enumerate(values, 1)]


PROVOKED = {
    "reward": log_of("reward", 0.31, 0.33, 0.23, 0.18, 0.18, 0.17),
    "entropy": log_of("entropy", 1.0, 1.0, 1.0, 0.15, 0.15, 0.1, reward=0.5),
    "zero_spread": log_of("frac_reward_zero_std", 0.5, 0.95, 0.95, 1.0),
    "duplicates": log_of("completions/distinct", 0.7, 0.15, 0.13, 0.13),
    "unparsed": log_of("completions/unparsed", 0.0, 0.5, 0.5, 0.5),
    "length, longer": log_of("completions/mean_length", 6.0, 6.0, 6.0, 15.0, 15.0, 16.0),
    "length_ratio, longer": log_of("completions/length_ratio", 1.0, 1.1, 2.1, 2.5, 3.0),
    "distinct_1": log_of("completions/distinct_1", 0.3, 0.3, 0.3, 0.09, 0.09, 0.05),
    "pick/kl of a picker in joint training": log_of("pick/kl", 0.0, 0.1, 3.0, 3.0, 3.0, kl=0.1),
    "kl": log_of("kl", 0.0, 0.1, 3.0, 3.0, 3.0),
    "ratio": log_of("val/ratio", 1.0, 1.0, 5.0, 5.0, 5.0),
    "ratio, clipped": log_of("clip_ratio/region_mean", 0.0, 0.1, 0.5, 0.5, 0.5),
    "overfitting": log_of("eval_recall", 0.5, 0.6, reward=0.3)
    + [{"step": step, "eval_recall": 0.52, "reward": 0.6} for step in (3, 4)],
    "validation": log_of("eval_recall", 0.5, 0.5, 0.3, 0.3),
}


@pytest.mark.parametrize("case", PROVOKED)
def test_each_alarm_is_raised_once_its_limit_holds_in_a_row(case):
    log = PROVOKED[case]
    name = case.split(" ")[0].rstrip(",")
    [alarm] = alarms(log)
    assert (alarm.name, alarm.step) == (name, len(log))
    assert ";" in alarm.message  # what is wrong; what to try
    assert not alarms(log[:-1]), "one or two values are not enough"
    assert first_alarms([*log, *log]) == [alarm]


@pytest.mark.parametrize(
    ("figure", "high", "low", "says"),
    [("mean", 0.03, 3e-5, "importance_clip"), ("outliers", 0.01, 0.004, "1.0% of the tokens")],
)
def test_a_sampler_that_differs_is_told_in_the_first_round(figure, high, low, says):
    key = f"sampling/sampling_logp_difference/{figure}"
    [alarm] = alarms(log_of(key, high))
    assert (alarm.name, alarm.step) == ("sampler", 1)
    assert says in alarm.message
    assert alarms(log_of(key, low)) == []


def test_every_rule_is_provoked():
    provoked = {case.split(" ")[0].rstrip(",") for case in PROVOKED if not case.startswith("pick/")} | {"sampler"}
    assert {rule.name for rule in RULES} | {"overfitting", "validation"} == provoked


HEALTHY = {  # of the demo's best online training, and of an imitation
    "online": {
        **{"entropy": (0.59, 0.5, 0.4, 0.3, 0.24, 0.24), "frac_reward_zero_std": (0.45, 0.5, 0.6, 0.7, 0.8, 0.82)},
        **{"reward": (0.5, 0.6, 0.6, 0.7, 0.7, 0.7), "kl": (0.0, 0.2, 0.4, 0.6, 0.7, 0.8)},
        **{"completions/mean_length": (6.0, 6.1, 6.4, 6.8, 7.0, 7.2), "val/ratio": (1.0, 1.1, 0.9, 1.0, 1.0, 1.1)},
        "eval_recall": (0.64, 0.7, 0.67, 0.75, 0.8, 0.79),
    },
    "rewards of mean 0": {"reward": (6e-9, 5e-9, 5e-9, 2e-9, 1e-9, 1e-9)},
    "nothing to log": {"reward": (None, None, None, None, None, 0.5), "kl": (None,) * 6},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_training_raises_no_alarm(case):
    columns = HEALTHY[case]
    log = [{"step": i + 1, **{name: values[i] for name, values in columns.items()}} for i in range(6)]
    assert first_alarms(log) == []
    assert alarms([]) == []


def test_the_best_step_is_the_earliest_of_equal_ones_and_not_the_start():
    log = [{"step": step, "eval_recall": value} for step, value in ((0, 0.9), (5, 0.4), (10, 0.6), (15, 0.6))]
    assert best_step([*log, {"step": 15, "loss": 1.0}]) == 10
    assert best_step(log, "ap") is None
