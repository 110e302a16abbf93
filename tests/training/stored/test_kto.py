from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.sampling.store.store import Store
from leret.training.data import Encoded, GroupSamples, RunSamples
from leret.training.stored.kto import KTO, KTORecipe, examples
from tests.training.training_runs import logp, moved, same_gradients, trl_loss

ROWS = [
    Encoded([3, 40, 41, 42, 4], ([50, 51, 52, 53, 54, 5],), (0.5,)),
    Encoded([3, 43, 4], ([61, 62, 63, 5],), (-0.5,)),
    Encoded([3, 44, 45, 46, 47, 48, 4], ([55, 5],), (0.0,)),  # at a baseline that is a number: desirable
]


def kto_loss(policy, reference, desirable, kl, beta, weights):
    """Return KTO's losses (n,): each completion's weight minus its value (arXiv 2402.01306, eq. 7)."""
    above = torch.where(desirable, 1.0, -1.0) * (policy - reference - kl.detach())
    return torch.where(desirable, *weights) * (1 - torch.sigmoid(beta * above))


@pytest.mark.parametrize("scale", [0.05, -0.05], ids=["kl", "no-kl"])
def test_kto_of_trl_with_moved_weights_is_the_loss_written_out(base, tmp_path, scale):
    reference = AutoModelForCausalLM.from_pretrained(base)
    policy = moved(reference, scale)
    recipe = KTORecipe(beta=0.1, desirable_weight=1.5)
    found, model = trl_loss(recipe, base, tmp_path, ROWS, policy)

    def column(model, shift):
        pairs = zip(ROWS, [ROWS[(i - shift) % 3].completions[0] for i in range(3)], strict=True)
        return torch.stack([logp(model, row.prompt, ids) for row, ids in pairs])

    kl = (column(policy, 1) - column(reference, 1)).mean().clamp(min=0)
    labels = torch.tensor([True, False, True])
    expected = kto_loss(column(policy, 0), column(reference, 0).detach(), labels, kl, 0.1, (1.5, 1.0)).mean()
    expected.backward()
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    same_gradients(policy, model)


@pytest.mark.parametrize(
    ("baseline", "scores"),
    [("mean", {0.5: 24, -0.5: 24}), (0.5, {0.5: 24, 0.0: 24, -0.5: 24}), (0.75, {0.25: 24, -0.25: 24, -0.75: 24})],
)
def test_completions_are_measured_by_their_states_mean_or_by_a_reward(run, baseline, scores):
    completions = examples(KTORecipe(baseline=baseline), RunSamples(run))  # rewards 1, 0.5 and 0 at 24 states
    assert Counter(example.scores[0] for example in completions) == scores
    against = "the mean reward" if baseline == "mean" else f"a reward of {baseline}"
    assert f"above and below {against}" in KTO.describe(KTORecipe(baseline=baseline))
    assert len({example.task_id for example in completions[:8]}) > 4, "neighbours are of other states"
    assert completions == examples(KTORecipe(baseline=baseline), RunSamples(run))
    assert completions != examples(KTORecipe(baseline=baseline, seed=1), RunSamples(run))


def test_equal_rewards_are_at_their_mean_in_floating_point_too(run):
    with Store(run.store) as store:
        spread, group = list(store.groups())[:2]
    for reward in (0.1, 1 / 3):
        equal = replace(group, samples=tuple(replace(one, reward=reward) for one in group.samples))
        found = examples(KTORecipe(), GroupSamples([spread, equal]))
        assert {example.task_id for example in found} == {spread.state.task_id}
