import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from leret.config.policy import PolicySettings
from leret.core.errors import ConfigError
from leret.core.types import Candidate, Choice
from leret.policies.load import make_policy
from leret.training.picks.pick import GroupMethod, PickRecipe, exact_kl
from leret.training.picks.picking import PickBatch
from leret.training.stage import train
from tests.training import stories
from tests.training.picks.test_picking import PICK, PQN
from tests.training.training_runs import changed, log


def learnt(recipe, run):
    """Return the report of a training, and the recall before and after it."""
    report = train(changed(recipe, eval_steps=100, eval_split="train", eval_tasks=8), run)
    return report, [entry["eval_recall"] for entry in log(report) if "eval_recall" in entry]


@pytest.mark.parametrize("recipe", [PQN, changed(PICK, loss="kl")], ids=["pqn", "kl"])
def test_a_picker_learns_what_its_rewards_say(picking_run, recipe):
    report, recalls = learnt(recipe, picking_run)
    assert recalls[0] < 0.6
    assert recalls[-1] > 0.9
    assert {"README.md", "training.json", "picker.json"} <= {path.name for path in report.path.iterdir()}
    assert learnt(recipe, picking_run)[0].already
    settings = {"kind": "features", "features": f"{stories.__name__}:numbers", "model": str(report.path)}
    picker = make_policy(PolicySettings.model_validate(settings))
    choice = Choice("pick", {"question": "from b"}, [Candidate(word, f"{word} leads to x") for word in "abc"])
    assert picker.score([choice])[0].argmax() == 1
    picker.close()


def test_the_temperature_falls_with_the_rate_after_random_rounds(picking_run):
    falling = changed(PQN, lr_scheduler_type="cosine", min_lr_rate=0.1, max_steps=12)
    entries = log(train(falling, picking_run))
    rates = [entry["learning_rate"] / falling.learning_rate for entry in entries]
    assert [entry["alpha"] / falling.temperature for entry in entries] == pytest.approx(rates)
    assert entries[0]["alpha"] > entries[-1]["alpha"] > 0.1 * falling.temperature


@pytest.mark.parametrize(("recipe", "keys"), [(PQN, {"credit": "final"}), (PICK, {"groups": "question"})])
def test_a_reward_of_the_end_trains_all_picks_before_it(picking_run, recipe, keys):
    _, recalls = learnt(changed(recipe, **keys), picking_run)
    assert recalls[-1] > recalls[0] + 0.3


def test_the_kl_is_over_all_candidates_and_ignores_padding():
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.0, -torch.inf]], requires_grad=True)
    reference = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.5, -torch.inf]])
    value = exact_kl(logits, reference)
    for i, n in ((0, 3), (1, 2)):
        p, q = (Categorical(logits=table[i, :n]) for table in (logits, reference))
        assert torch.allclose(value[i], kl_divergence(p, q), atol=1e-6)
    value.sum().backward()
    assert logits.grad.isfinite().all()
    assert exact_kl(reference, reference).tolist() == [0, 0]


def test_the_gradient_of_kl_is_the_difference_of_the_shares_over_picked_candidates():
    q = [torch.tensor([0.2, 5.0, -0.1], requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)]
    choices = [Choice("pick", {}, [Candidate(word, word) for word in words]) for words in ("abc", "ab")]
    states, actions, none = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 2, 0, 1, 1]), torch.zeros(5)
    rewards = torch.tensor([1.0, 0.25, 0.0, 1.0, 0.0])  # the first candidate is worth 0.5, the third 0.25
    batch = PickBatch(choices, states, actions, rewards, states, none, none, none, None)
    method = GroupMethod(PickRecipe(loss="kl", reward_temperature=0.25), temperature=0.5)
    losses = method.losses(SimpleNamespace(q=lambda choices, twin: q), batch)["loss"]
    losses.sum().backward()
    wanted, share = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-0.6))  # softmax of (2, 1) and of (0.4, -0.2)
    kl = wanted * math.log(wanted / share) + (1 - wanted) * math.log((1 - wanted) / (1 - share))
    assert losses.tolist() == pytest.approx([kl, 0], abs=1e-6)
    slope = (share - wanted) / 0.5
    assert [*q[0].grad.tolist(), *q[1].grad.tolist()] == pytest.approx([slope, 0, -slope, 0, 0], abs=1e-6)


def test_grpo_logs_the_ratio_and_the_kl_to_the_initial_picker(picking_run):
    entries = log(train(changed(PICK, beta=1e-6, max_steps=6), picking_run))
    assert entries[0]["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert entries[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert entries[-1]["kl"] > 1e-3
    held = log(train(changed(PICK, name="held", beta=100.0, max_steps=6), picking_run))
    assert held[-1]["kl"] < 0.3 * entries[-1]["kl"]


def test_values_of_paths_refuse_credit_that_counts_later_steps_too(picking_run):
    with pytest.raises(ConfigError, match="pqn adds up step rewards itself"):
        train(changed(PQN, credit="both"), picking_run)
