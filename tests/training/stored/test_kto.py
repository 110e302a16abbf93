from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.core.types import Failure
from leret.sampling.store.store import SamplingParams, Store
from leret.training.data import Encoded, GroupSamples, RunSamples
from leret.training.stored.kto import KTO, KTORecipe, examples, kto_rows
from tests.training.training_runs import POLICY, logp, moved, same_gradients, trl_loss

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


def test_a_mismatched_completion_is_the_one_before_and_no_longer_than_the_longest_row():
    rows = kto_rows([Encoded([1, 2, 3], ([4],), (1.0,)), Encoded([1], ([5, 6, 7],), (-1.0,))])
    assert rows["mismatched_tokens"] == [[5], [4]]
    assert rows["label"] == [True, False]


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


def test_a_completion_at_the_mean_of_its_states_rewards_is_left_out(run):
    def trained(*rewards):
        samples = (replace(group.samples[0], id=f"{i}", completion=f"{i}", reward=r) for i, r in enumerate(rewards))
        memory = GroupSamples([spread, replace(group, samples=tuple(samples))])
        return [example.completions[0] for example in examples(KTORecipe(), memory) if example.task_id == task]

    with Store(run.store) as store:
        spread, group = list(store.groups())[:2]
    task = group.state.task_id
    for equal in (0.1, 1 / 3):
        assert not trained(*[equal] * 3)
    assert {*trained(0.1, 0.2, -0.3, 0.0)} == {"0", "1", "2"}  # their mean is 1.4e-17 in floating point


def test_what_does_not_parse_is_undesirable_where_it_has_a_price(run):
    with Store(run.store) as store:
        group = next(store.groups())
        bad = replace(group.samples[0], id="bad", index=9, completion="no", reward=None, failure=Failure("parse", "x"))
        store.put_samples([bad], SamplingParams("base", POLICY, "p", 1.0, 1.0, 16))
    texts = {example.completions[0] for example in examples(KTORecipe(), RunSamples(run))}
    assert "no" not in texts
    section = run.manifest.sampling
    parts = {"reward": {"parts": {"ap": {"reward": "ap"}}, "unparsed_reward": -3.5}}
    run.update(sampling={**section, "sampling": parts})
    found = {example.completions[0]: example.scores[0] for example in examples(KTORecipe(), RunSamples(run))}
    assert found["no"] == pytest.approx(-3.5 - (1.0 + 0.5 + 0.0 - 3.5) / 4)
