import pytest

from leret.core.errors import RunError
from leret.training.rounds.grpo import GRPORecipe, GSPORecipe
from leret.training.rounds.ppo import PPORecipe
from leret.training.rounds.rloo import RLOORecipe
from leret.training.stage import estimate, train
from tests.training.training_runs import ONLINE, bits, changed, crash, log, record, weights_of

SMALL = {**ONLINE, "questions_per_round": 2, "per_device_train_batch_size": 16, "save_steps": 2}
GRPO, RLOO, PPO = GRPORecipe(**SMALL), RLOORecipe(**SMALL), PPORecipe(**SMALL, num_mini_batches=2)
GSPO = GSPORecipe(**SMALL, num_mini_batches=2)


@pytest.mark.parametrize("recipe", [GSPO, RLOO], ids=["gspo", "rloo"])
def test_a_run_becomes_a_policy_that_is_not_trained_again(run, base, recipe):
    recipe = changed(recipe, limit=6)
    assert estimate(recipe, run).steps == recipe.n_steps(6)
    report = train(recipe, run)
    assert weights_of(report.path) != weights_of(base)
    entries = log(report)
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    names = {"reward", "frac_reward_zero_std", "entropy", "completions/mean_length", "learning_rate", "grad_norm"}
    names |= {"completions/unparsed", "reward_percentiles/0", "reward_percentiles/100"}
    names |= {"kl", "val/ratio"} if recipe.algorithm == "rloo" else set()
    assert names <= set.union(*map(set, entries))
    assert report.examples == 3 * 2 * 2 * 4  # rounds, questions, steps of the program, completions
    assert train(recipe, run).already
    with pytest.raises(RunError, match="learning_rate"):
        train(changed(recipe, learning_rate=0.5), run)


@pytest.mark.parametrize(
    "recipe", [*(pytest.param(one, marks=pytest.mark.slow) for one in (GRPO, RLOO)), PPO], ids=["grpo", "rloo", "ppo"]
)
def test_a_training_that_goes_on_after_a_crash_ends_in_the_same_bits(run, recipe):
    recipe = changed(recipe, limit=6)
    crash(run, recipe, 3)
    resumed = train(recipe, run)
    assert resumed.resumed_from == 2
    assert bits(resumed) == bits(train(changed(recipe, name="straight"), run))
    if recipe.algorithm == "ppo":
        assert {"kl", "loss/value_avg"} <= log(resumed)[-1].keys()


def test_the_best_policy_of_the_validations_is_kept(run, monkeypatch):
    figures, seen = {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.4}, {}  # by round, of two optimizer steps

    def run_model(self, model, tokenizer, step):
        seen[step] = {name: weight.numpy().tobytes() for name, weight in model.state_dict().items()}
        return {"eval_recall": figures[step], "eval_unparsed": 0.0}

    monkeypatch.setattr("leret.training.validation.Validation.run_model", run_model)
    keys = {"max_steps": 6, "num_mini_batches": 2, "eval_steps": 1, "eval_tasks": 2, "eval_split": "train"}
    report = train(changed(GRPO, **keys, save_steps=1), run)
    assert (report.rounds, report.steps, report.best_step) == (3, 6, 4)
    assert (len(record(report)["validation"]), [*seen]) == (2, [0, 1, 2, 3])
    card = (report.path / "README.md").read_text()
    for words in ("6 optimizer steps", "in 3 rounds", "from round 2"):
        assert words in card
    assert weights_of(report.path).items() <= seen[2].items()
    assert seen[2] != seen[3]
