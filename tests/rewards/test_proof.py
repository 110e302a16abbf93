import pytest

from leret.config.sampling import RewardSettings
from leret.rewards import REWARDS, answers, scoring
from leret.rewards.proof import UNPROVEN, prove


@pytest.mark.parametrize("name", [name for name in REWARDS if name not in UNPROVEN])
def test_rewards_are_at_their_maximum_on_the_gold_outcome(name):
    proof = prove(name, scoring(name))
    assert proof.faults == ()
    assert proof.gold == {"deepretrieval": 5, "steps": 0}.get(name, 1)


def test_similarity_is_at_its_maximum_on_the_gold_outcome(monkeypatch):
    monkeypatch.setattr(answers, "_embeddings", lambda model, texts: [[float("hills" in t), 0.5, 0.0] for t in texts])
    spec = RewardSettings(parts={"similarity": {"model": "m"}})
    assert prove("similarity", scoring(spec)).faults == ()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda outcome: 1.0, "does not get less"),
        (lambda outcome: -float(bool(outcome.outputs)), "completion that does not parse"),
        (lambda outcome: float(outcome.n_steps), "six LM calls gets 6"),
        (lambda outcome: None, "the gold outcome gets no value"),
    ],
)
def test_reward_with_another_preference_is_found(function, says):
    faults = prove("own", scoring(function)).faults
    assert any(says in fault for fault in faults)
