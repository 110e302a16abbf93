"""TRL's trainer, as it is built here, against the losses written out."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.config.training import TrainingRecipe
from leret.training.algorithms.losses import dpo_loss, ipo_loss
from leret.training.algorithms.preference import preference_trainer
from leret.training.process import surroundings
from leret.training.tokens import Encoded

PAIRS = [
    Encoded([3, 40, 41, 42, 4], ([50, 51, 52, 53, 5], [60, 5])),
    Encoded([3, 43, 4], ([54, 5], [61, 62, 63, 5])),
    Encoded([3, 44, 45, 46, 47, 48, 4], ([55, 56, 5], [64, 65, 5])),
]


def moved(model, seed=1):
    """A copy with all weights moved."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


def logp(model, prompt, completion):
    """Sum of log-probabilities of a completion, one sequence at a time, in float64."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0].double()
    logps = torch.log_softmax(logits, dim=-1)
    return sum(logps[len(prompt) - 1 + i, token] for i, token in enumerate(completion))


def built(base, tmp_path, **keys):
    recipe = TrainingRecipe(algorithm=keys.pop("algorithm", "ipo"), init="base", batch_size=4, **keys)
    model = AutoModelForCausalLM.from_pretrained(base)
    with surroundings(tmp_path, 1):
        return preference_trainer(recipe, model, AutoTokenizer.from_pretrained(base), PAIRS, tmp_path, "cpu")


def loss_and_gradients(trainer, model):
    """TRL's loss on the three pairs at the weights of ``model``."""
    trainer.model.load_state_dict(model.state_dict())
    trainer.model.zero_grad()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), [parameter.grad.clone() for parameter in trainer.model.parameters()]


def columns(policy, reference, divide=False):
    values = []
    for model in (policy, reference):
        for side in (0, 1):
            sums = [logp(model, pair.prompt, pair.completions[side]) for pair in PAIRS]
            lengths = [len(pair.completions[side]) if divide else 1 for pair in PAIRS]
            values.append(torch.stack([total / n for total, n in zip(sums, lengths, strict=True)]))
    policy_chosen, policy_rejected, reference_chosen, reference_rejected = values
    return policy_chosen, policy_rejected, reference_chosen.detach(), reference_rejected.detach()


@pytest.mark.parametrize("reduction", ["sequence", "token"])
def test_ipo_of_trl_with_moved_weights_is_the_loss_written_out(base, tmp_path, reduction):
    reference = AutoModelForCausalLM.from_pretrained(base)
    policy = moved(reference)
    trainer = built(base, tmp_path, reduction=reduction, beta=0.05)
    expected = ipo_loss(*columns(policy, reference, divide=reduction == "token"), beta=0.05).mean()
    expected.backward()
    found, gradients = loss_and_gradients(trainer, policy)
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert abs(found - 100) > 0.1, "the weights must be off the reference, where every loss is 1 / (4 beta^2)"
    for ours, theirs in zip(policy.parameters(), gradients, strict=True):
        assert torch.allclose(ours.grad, theirs, rtol=1e-3, atol=1e-3 * float(ours.grad.abs().max()))


def test_the_two_reductions_differ(base, tmp_path):
    policy = moved(AutoModelForCausalLM.from_pretrained(base))
    sums = loss_and_gradients(built(base, tmp_path / "a", reduction="sequence"), policy)[0]
    means = loss_and_gradients(built(base, tmp_path / "b", reduction="token"), policy)[0]
    assert abs(sums - means) > 1


def test_dpo_of_trl_with_moved_weights_is_the_loss_on_sums(base, tmp_path):
    reference = AutoModelForCausalLM.from_pretrained(base)
    policy = moved(reference)
    expected = float(dpo_loss(*columns(policy, reference), beta=0.1).mean())
    found = loss_and_gradients(built(base, tmp_path, algorithm="dpo", beta=0.1), policy)[0]
    assert found == pytest.approx(expected, rel=1e-5)


def test_sft_weight_adds_the_mean_likelihood_of_the_chosen_tokens(base, tmp_path):
    policy = moved(AutoModelForCausalLM.from_pretrained(base))
    plain = loss_and_gradients(built(base, tmp_path / "a"), policy)[0]
    added = loss_and_gradients(built(base, tmp_path / "b", sft_weight=0.5), policy)[0]
    n_tokens = sum(len(pair.completions[0]) for pair in PAIRS)
    total = sum(float(logp(policy, pair.prompt, pair.completions[0])) for pair in PAIRS)
    assert added - plain == pytest.approx(-0.5 * total / n_tokens, rel=1e-3)


def test_metrics_of_trl_are_untouched_by_the_sequence_reduction(base, tmp_path):
    policy = moved(AutoModelForCausalLM.from_pretrained(base))
    logged = []
    for reduction in ("sequence", "token"):
        trainer = built(base, tmp_path / reduction, reduction=reduction)
        loss_and_gradients(trainer, policy)
        logged.append({name: values[-1] for name, values in trainer._metrics["train"].items()})
    assert logged[0] == pytest.approx(logged[1])
