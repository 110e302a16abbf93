import math

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.core.errors import TrainingError
from leret.training.algorithms.preference import DPORecipe, IPORecipe, collate_pairs, examples, pair_loss
from leret.training.data import Encoded, RunSamples
from tests.training.training_runs import logp, moved, trainer_of

PAIRS = [
    Encoded([3, 40, 41, 42, 4], ([50, 51, 52, 53, 5], [60, 5]), (1.0, 0.0)),
    Encoded([3, 43, 4], ([54, 5], [61, 62, 63, 5]), (4.5, -3.5)),
    Encoded([3, 44, 45, 46, 47, 48, 4], ([55, 56, 5], [64, 65, 5]), (0.5, 0.25)),
]


@pytest.fixture
def reference(base):
    return AutoModelForCausalLM.from_pretrained(base)


@pytest.fixture
def policy(reference):
    return moved(reference)


@pytest.fixture
def trl(base, policy, tmp_path):
    """Loss and gradients that TRL's trainer has on the three pairs at the weights of ``policy``."""

    def loss_and_gradients(recipe):
        recipe = recipe.model_copy(update={"init_from": "base", "per_device_train_batch_size": 4})
        trainer = trainer_of(recipe, AutoModelForCausalLM.from_pretrained(base), base, tmp_path, PAIRS)
        trainer.model.load_state_dict(policy.state_dict())
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        return float(loss.detach()), [parameter.grad.clone() for parameter in trainer.model.parameters()]

    return loss_and_gradients


def columns(policy, reference, divide=False):
    """Log-probabilities of chosen and rejected under the policy, then under the reference; by token or in all."""

    def column(model, side):
        lengths = [len(pair.completions[side]) if divide else 1 for pair in PAIRS]
        sums = [logp(model, pair.prompt, pair.completions[side]) for pair in PAIRS]
        return torch.stack([total / n for total, n in zip(sums, lengths, strict=True)])

    return *(column(policy, side) for side in (0, 1)), *(column(reference, side).detach() for side in (0, 1))


def loss_of(kind, columns, beta):
    chosen, rejected, ref_chosen, ref_rejected = columns
    return pair_loss(kind, (chosen - ref_chosen) - (rejected - ref_rejected), beta)


@pytest.mark.parametrize(
    ("recipe", "start"),
    [(IPORecipe(beta=0.05), 100), (IPORecipe(beta=0.05, reduction="token"), 100), (DPORecipe(beta=0.1), math.log(2))],
    ids=["ipo", "ipo by token", "dpo"],
)
def test_a_loss_of_trl_with_moved_weights_is_the_loss_written_out(policy, reference, trl, recipe, start):
    divide = getattr(recipe, "reduction", "sequence") == "token"
    expected = loss_of(recipe.algorithm, columns(policy, reference, divide), recipe.beta).mean()
    expected.backward()
    found, gradients = trl(recipe)
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    assert abs(found - start) > 1e-3 * start, "the weights must be off the reference"
    for ours, theirs in zip(policy.parameters(), gradients, strict=True):
        assert torch.allclose(ours.grad, theirs, rtol=1e-3, atol=1e-3 * float(ours.grad.abs().max()))


def test_a_mixture_is_the_weighted_sum_of_its_losses(policy, reference, trl):
    n_tokens = sum(len(pair.completions[0]) for pair in PAIRS)
    likelihood = sum(float(logp(policy, pair.prompt, pair.completions[0])) for pair in PAIRS) / n_tokens
    sums = columns(policy, reference)
    expected = 0.5 * loss_of("ipo", sums, 0.1).mean() + 2 * loss_of("dpo", sums, 0.1).mean() - 0.3 * likelihood
    found, _ = trl(IPORecipe(beta=0.1, losses={"ipo": 0.5, "dpo": 2.0, "sft": 0.3}))
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("recipe", "loss"), [(IPORecipe, "ipo"), (DPORecipe, "dpo")])
def test_a_reward_margin_widens_what_a_pair_is_held_to(policy, reference, trl, recipe, loss):
    chosen, rejected, ref_chosen, ref_rejected = columns(policy, reference)
    wider = ref_chosen + 3.0 * torch.tensor([pair.scores[0] - pair.scores[1] for pair in PAIRS])
    expected = loss_of(loss, (chosen, rejected, wider, ref_rejected), 0.05).mean()
    assert trl(recipe(beta=0.05, reward_margin=3.0))[0] == pytest.approx(float(expected.detach()), rel=1e-5)


def test_ipo_and_dpo_of_two_pairs_by_hand():
    # pair 1: h = (-3 + 5) - (-4 + 2) = 2 + 2 = 4; pair 2: h = (-1 + 1) - (-9 + 6) = 0 + 3 = 3
    columns = [torch.tensor(x, dtype=torch.float64) for x in ([-3.0, -1], [-4.0, -9], [-5.0, -1], [-2.0, -6])]
    assert loss_of("ipo", columns, 0.05).tolist() == pytest.approx([(4 - 10) ** 2, (3 - 10) ** 2], abs=1e-12)
    expected = [math.log(1 + math.exp(-0.4)), math.log(1 + math.exp(-0.3))]
    assert loss_of("dpo", columns, 0.1).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
def test_the_mask_of_the_sequence_reduction_sums_to_one(packed, sequence):
    rows = [
        {"prompt_tokens": [1, 2], "chosen_tokens": [3, 4, 5], "rejected_tokens": [6]},
        {"prompt_tokens": [7], "chosen_tokens": [8], "rejected_tokens": [9, 9]},
    ]
    mask = collate_pairs(rows, 0, sequence=sequence, packed=packed)["completion_mask"]
    lengths = [3, 1, 1, 2]
    assert mask[:, 1:].sum(dim=1).tolist() == lengths
    assert mask.sum(dim=1).tolist() == ([1] * 4 if sequence else lengths)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_text("not parquet"), "cannot be read"),
        (lambda path: pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), path),
         "has no column chosen, rejected, question_id"),
    ],
    ids=["missing", "text", "columns"],
)  # fmt: skip
def test_preferences_that_cannot_be_read_are_named(run, damage, says):
    assert len(examples(IPORecipe(), RunSamples(run))) == 48
    damage(run.preferences / "train.parquet")
    with pytest.raises(TrainingError, match=f"{says}.*leret pairs"):
        examples(IPORecipe(), RunSamples(run))
