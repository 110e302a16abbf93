import math
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from leret.core.errors import TrainingError
from leret.training.data import Encoded, RunSamples
from leret.training.stored.kto import KTORecipe
from leret.training.stored.preference import DPORecipe, IPORecipe, examples, pair_loss
from tests.training.training_runs import logp, moved, same_gradients, trainer_of, trl_loss

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
    return lambda recipe: trl_loss(recipe.model_copy(update={"init_from": "base"}), base, tmp_path, PAIRS, policy)


def columns(policy, reference, divide=False):
    """Log-probabilities of chosen and rejected under the policy, then under the reference; by token or in all."""

    def column(model, side):
        completions = [(pair.prompt, pair.completions[side]) for pair in PAIRS]
        return torch.stack([logp(model, *pair) / (len(pair[1]) if divide else 1) for pair in completions])

    return *(column(policy, side) for side in (0, 1)), *(column(reference, side).detach() for side in (0, 1))


def loss_of(kind, columns, beta):
    chosen, rejected, ref_chosen, ref_rejected = columns
    return pair_loss(kind, (chosen - ref_chosen) - (rejected - ref_rejected), beta)


@pytest.mark.parametrize(
    ("recipe", "start"),
    [(IPORecipe(beta=0.05), 100), (IPORecipe(beta=0.05, reduction="token"), 100), (DPORecipe(beta=0.1), math.log(2))],
)
def test_a_loss_of_trl_with_moved_weights_is_the_loss_written_out(policy, reference, trl, recipe, start):
    divide = getattr(recipe, "reduction", "sequence") == "token"
    expected = loss_of(recipe.algorithm, columns(policy, reference, divide), recipe.beta).mean()
    expected.backward()
    found, model = trl(recipe)
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    assert abs(found - start) > 1e-3 * start, "the weights must be off the reference"
    same_gradients(policy, model)


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


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_text("not parquet"), "cannot be read"),
        (lambda path: pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), path),
         "has no column chosen, rejected, question_id"),
    ],
)  # fmt: skip
def test_preferences_that_cannot_be_read_are_named(run, damage, says):
    assert len(examples(IPORecipe(), RunSamples(run))) == 48
    damage(run.preferences / "train.parquet")
    with pytest.raises(TrainingError, match=f"{says}.*leret rescore"):
        examples(IPORecipe(), RunSamples(run))


def test_references_are_computed_for_the_rows_that_training_visits(base, tmp_path, monkeypatch):
    many = [replace(PAIRS[i % 3], scores=(1.0 - i % 2, i / 40)) for i in range(40)]
    keys = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "logging_steps": 1}
    recipe = KTORecipe(**keys, max_steps=3)

    def trained(name):
        model = AutoModelForCausalLM.from_pretrained(base)
        trainer = trainer_of(recipe, model, base, tmp_path / name, many, 3)
        before = [*trainer.train_dataset]
        trainer.train()
        return before, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    rows, losses = trained("visited")
    monkeypatch.setattr("leret.training.stored.trainer.visited_rows", lambda _, n_rows: range(n_rows))
    all_rows, expected = trained("all")
    assert (len(rows), len(all_rows), len(losses)) == (12, 40, 3)
    assert losses == pytest.approx(expected, rel=1e-6)
