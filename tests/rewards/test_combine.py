from leret.config.sampling import RewardSettings
from leret.rewards import scoring
from leret.rewards.combine import weighted_sum

OWN = """
from leret.rewards.combine import GroupMixer


@GroupMixer
def ranks(group, weights):
    [name] = weights
    values = sorted(sample[name] for sample in group)
    return [weights[name] * values.index(sample[name]) for sample in group]


def least(group, weights):
    return [min(sample.values()) for sample in group]
"""


def test_the_weighted_sum_skips_missing_parts():
    group = [{"ap": 1.0}, {"ap": 2.0, "rr": 4.0}, {}]
    assert weighted_sum(group, {"ap": 1.0, "rr": 0.5}) == [1.0, 4.0, None]


def test_a_mixer_is_named_by_path_and_a_group_mixer_needs_the_group(tmp_path):
    (tmp_path / "own.py").write_text(OWN)

    def mixed(name):
        parts = {"ap": {"weight": 2.0}}
        return scoring(RewardSettings.model_validate({"parts": parts, "mixer": f"{tmp_path}/own.py:{name}"}))

    group = [{"ap": 0.7}, {"ap": 0.1}]
    for name, rewards, alone, needs_group in [("ranks", [2.0, 0.0], 0.5, True), ("least", [0.7, 0.1], 0.25, False)]:
        reward = mixed(name)
        assert (reward.mixer(group, reward.weights), reward.needs_group) == (rewards, needs_group)
        assert reward.alone({"ap": 0.25}) == alone
