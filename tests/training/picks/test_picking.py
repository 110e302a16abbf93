import pytest
from safetensors.torch import load_file, save_file

from leret.config.policy import PolicySettings
from leret.core.errors import PolicyError, TrainingError
from leret.policies.saved import policy_record
from leret.training.picks.pick import PickRecipe
from leret.training.picks.pqn import PQNRecipe
from leret.training.rounds.grpo import GRPORecipe
from leret.training.stage import estimate, train
from tests.training.training_runs import bits, changed, crash

SMALL = {"questions_per_round": 8, "save_steps": 2, "logging_steps": 1, "learning_rate": 2e-2, "device": "cpu"}
PICK = PickRecipe(**SMALL, num_generations=4, num_train_epochs=6, temperature=1.0)
PQN = PQNRecipe(
    **SMALL, num_train_epochs=12, num_mini_batches=2, learning_starts=2, temperature=0.1, lr_scheduler_type="constant",
    min_lr_rate=0.0,
)  # fmt: skip


def test_a_training_that_goes_on_after_a_crash_ends_in_the_same_bits(picking_run):
    recipe = changed(PQN, max_steps=12)
    crash(picking_run, recipe, 5)
    resumed = train(recipe, picking_run)
    assert resumed.resumed_from == 4
    assert bits(resumed) == bits(train(changed(recipe, name="straight"), picking_run))


def test_a_training_goes_on_from_a_trained_picker(picking_run):
    train(changed(PICK, name="first", max_steps=2), picking_run)
    again = changed(PICK, name="second", init_from="first", max_steps=1)
    assert estimate(again, picking_run).steps == 1
    assert estimate(changed(again, limit=5), picking_run).examples == 5
    assert train(again, picking_run).total_steps == 3
    settings = {**picking_run.sampling()["policy"], "model": str(picking_run.policies / "first")}
    record = policy_record(PolicySettings.model_validate(settings), picking_run.path / "saved", {}, keep=True)
    assert (picking_run.path / "saved/policies" / record["name"] / "picker.json").is_file()
    with pytest.raises(TrainingError, match="init_from: 'third'"):
        train(changed(PICK, init_from="third"), picking_run)
    changed_picker = sorted((picking_run.policies / "first").rglob("*.safetensors"))[-1]
    weights = load_file(changed_picker)
    save_file({name: weight + 1 for name, weight in weights.items()}, changed_picker)
    with pytest.raises(PolicyError, match="changed since training"):
        train(changed(again, name="third"), picking_run)


def test_what_writes_is_no_picker_and_the_other_way_round(picking_run):
    with pytest.raises(PolicyError, match="with a picker"):
        train(GRPORecipe(), picking_run)
    section = picking_run.sampling()
    picking_run.update(sampling={**section, "policy": {"kind": "local", "model": "demo"}})
    with pytest.raises(TrainingError, match="kind local"):
        train(PICK, picking_run)
