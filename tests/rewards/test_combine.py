import math

import pytest

from leret.config.sampling import RewardSettings
from leret.core.classes import source_digest
from leret.core.errors import ConfigError
from leret.core.types import Outcome, Passage, Task
from leret.rewards import faults, scoring

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


def outcome(n_found=0, n_gold=20, **values):
    gold = tuple(f"d{i}" for i in range(n_gold))
    return Outcome(Task("q", {}, gold), ranking=tuple(Passage(d, "", "", 0.0) for d in gold[:n_found]), **values)


def spec(parts, **values):
    return RewardSettings.model_validate({"parts": parts, **values})


@pytest.mark.parametrize(
    ("n_found", "worth"),
    [(20, 5), (14, 5), (13, 4), (10, 4), (9, 3), (8, 3), (7, 1), (6, 1), (5, 0.5), (2, 0.5), (1, 0.1), (0, -3.5)],
)
def test_deepretrieval_rewards_recall_in_tiers(n_found, worth):
    assert scoring("deepretrieval")(outcome(n_found)) == worth
    assert scoring("deepretrieval@1")(outcome(20)) == 0.1
    assert scoring("deepretrieval")(outcome(0, 0)) is None


@pytest.mark.parametrize(
    ("text", "think", "worth"),
    [
        ("x", False, 1),
        ("<think>so\n\nmany\n</think>\nx", True, 1),
        ("<think>so</think>", True, 0),
        ("<think>a</think><think>b</think> x", True, 0),
        ("x <think>so</think>", True, 0),
    ],
)
def test_format_requires_fields_and_one_thought(text, think, worth):
    one = spec({"format": {"think": think}})
    assert scoring(one)(outcome(text=text, outputs={"query": "x"})) == worth
    assert scoring(one)(outcome(text=text)) == 0  # nothing was parsed


def test_parts_stay_apart_and_missing_ones_are_left_out():
    found = scoring(spec({"recall": 2, "steps": 0.5, "f1": 9}))
    values = found.values(outcome(10, n_steps=3))
    assert values == {"recall": 0.5, "steps": -2}
    assert found.mixer([values, {}], found.weights) == [0.0, None]
    assert scoring(spec({"recall": 2, "steps": 0.5}))(outcome(10, n_steps=3)) == 0


def test_parts_have_short_forms_and_settings():
    assert spec({"recall": {"weight": 2, "gain": None, "factor": False}}) == spec({"recall": 2})  # removed keys
    with pytest.raises(ConfigError, match="unexpected keyword argument 'gain'"):
        scoring(spec({"recall": {"gain": 0}}))
    assert spec(["recall@5", "format"]).parts == spec({"recall@5": 1.0, "format": {"weight": 1}}).parts
    assert scoring(spec({"near": {"function": "length", "s": 2, "weight": 3}}))(
        Outcome(Task("q", {}, answers=("a b",)), prediction="a b c")
    ) == pytest.approx(3 * math.exp(-1))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (spec({"recal": 1}), ["parts.recal: unknown measure 'recal'"]),
        (spec({"ap": {"s": 1}}), ["ap: got an unexpected keyword argument 's'; available settings: k"]),
        (spec({"ap": 1, "similarity": 1}), ["missing a required argument: 'model'"]),
        (spec({"ap": 1}, mixer="mean"), ["mixer: unknown mixer 'mean'; available: weights, uniform"]),
        (spec({"x": 1, "y": 1}), ["parts.x", "parts.y"]),
    ],
)
def test_all_faults_of_a_reward_are_listed(value, says):
    found = faults(value, "sampling.reward")
    assert [text in fault for text, fault in zip(says, found, strict=True)] == [True] * len(says)
    with pytest.raises(ConfigError, match=r"sampling\.reward"):
        scoring(value, "sampling.reward")


def test_users_function_is_a_reward_and_follows_its_file(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def titles(outcome, least=1):\n    return float(len(outcome.ranking) >= least)\n")
    name = f"{own}:titles"
    assert scoring(name)(outcome(1)) == 1
    assert list(scoring(name).parts) == ["own.py:titles"]
    assert scoring(spec({name: {"least": 2}}))(outcome(1)) == 0
    own.write_text("def titles(outcome):\n    return 7\n")
    assert scoring(name)(outcome(1)) == 7
    assert scoring("tests.rewards.own_reward:found")(outcome(3)) == 3
    assert source_digest("tests.rewards.own_reward:found") is not None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:f", r"nowhere\.py cannot be loaded: no such file; fix it, or name the function as FILE\.py:NAME"),
        ("exits.py:f", r"cannot be loaded: SystemExit: 3 \(exits\.py:1\)"),
        ("no.such.module:f", "no.such.module cannot be loaded: ModuleNotFoundError"),
        ("tests.rewards.own_reward:other", "has no function 'other'; available: found"),
    ],
)
def test_missing_function_is_refused(name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match=f"reward: .*{says}"):
        scoring(name, "reward")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('gold')", r"KeyError: 'gold' \(.*mine\.py:2\)"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(.*mine\.py:2\)"),
        ("return 10**400", "OverflowError"),
        ("return print", "TypeError"),
    ],
)
def test_error_of_a_users_reward_names_line_and_question(tmp_path, body, says):
    (tmp_path / "mine.py").write_text(f"def score(outcome):\n    {body}\n")
    with pytest.raises(ConfigError, match=f"score failed for question q: {says}.*fix the function"):
        scoring(f"{tmp_path}/mine.py:score")(outcome())
    for value in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"own is .* for question q; return a number of magnitude"):
            scoring(lambda outcome, value=value: value, "own").values(outcome())


def test_a_mixer_is_named_by_path_and_a_group_mixer_needs_the_group(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    group = [{"ap": 0.7}, {"ap": 0.1}]
    for name, rewards, alone, needs_group in [("ranks", [2.0, 0.0], 0.5, True), ("least", [0.7, 0.1], 0.25, False)]:
        reward = scoring(spec({"ap": 2.0}, mixer=f"{tmp_path}/own.py:{name}"))
        assert (reward.mixer(group, reward.weights), reward.needs_group) == (rewards, needs_group)
        assert reward.alone({"ap": 0.25}) == alone
