from types import SimpleNamespace

import pytest

from leret.core.errors import RunError, TrainingError
from leret.core.progress import Progress
from leret.training.driver import Driver, StepLoop
from leret.training.job import Interrupt
from leret.training.model import find_initial
from leret.training.rounds.grpo import GRPORecipe, GSPORecipe
from leret.training.rounds.ppo import PPORecipe
from leret.training.rounds.rloo import RLOORecipe
from leret.training.stage import estimate, train
from leret.training.watch import Monitor
from tests.sampling.fakes import events_of
from tests.tiny import tiny_policy
from tests.training.training_runs import ONLINE, bits, changed, crash, log, record, weights_of

SMALL = {**ONLINE, "questions_per_round": 2, "per_device_train_batch_size": 16, "save_steps": 2}
GRPO, RLOO, PPO = GRPORecipe(**SMALL), RLOORecipe(**SMALL), PPORecipe(**SMALL, num_mini_batches=2)
GSPO = GSPORecipe(**SMALL, num_mini_batches=2)


@pytest.mark.parametrize("recipe", [GRPO, GSPO, RLOO, PPO], ids=["grpo", "gspo", "rloo", "ppo"])
def test_a_run_becomes_a_policy_that_is_not_trained_again(run, base, recipe):
    assert estimate(recipe, run).steps == recipe.n_steps(12)
    report = train(recipe, run)
    assert weights_of(report.path) != weights_of(base)
    entries = log(report)
    assert [entry["step"] for entry in entries] == [*range(1, 7)]
    names = {"reward", "frac_reward_zero_std", "entropy", "completions/mean_length", "learning_rate", "grad_norm"}
    names |= {"completions/unparsed", "reward_percentiles/0", "reward_percentiles/100"}
    names |= {RLOO: {"kl", "val/ratio"}, PPO: {"kl", "loss/value_avg"}}.get(recipe, set())
    assert names <= set.union(*map(set, entries))
    assert report.examples == 6 * 2 * 2 * 4  # rounds, questions, steps of the program, completions
    assert train(recipe, run).already
    with pytest.raises(RunError, match="learning_rate"):
        train(changed(recipe, learning_rate=0.5), run)


@pytest.mark.parametrize(
    "recipe", [*(pytest.param(one, marks=pytest.mark.slow) for one in (GRPO, RLOO)), PPO], ids=["grpo", "rloo", "ppo"]
)
def test_a_training_that_goes_on_after_a_crash_ends_in_the_same_bits(run, recipe):
    crash(run, recipe, 5)
    resumed = train(recipe, run)
    assert resumed.resumed_from == 4
    straight = train(changed(recipe, name="straight"), run)
    assert bits(resumed) == bits(straight)


@pytest.mark.parametrize(("beta", "near"), [(10.0, True), (0.0, False)])
def test_the_penalty_keeps_the_policy_near_the_initial_one(run, beta, near):
    given = changed(GRPO, beta=beta or 1e-12, max_steps=10, learning_rate=2e-4)
    last = log(train(given, run))[-1]["kl"]
    assert (last < 0.01) is near


def test_ppo_trains_a_base_model_without_a_chat_template(run, tmp_path):
    recipe = run.sampling()
    policy = recipe["policy"] | {"model": str(tiny_policy(tmp_path / "gpt2", "gpt2")), "template": "plain"}
    run.update(sampling={**recipe, "policy": policy})
    report = train(changed(PPO, max_steps=8, learning_rate=1e-7, reward="deepretrieval"), run)  # of one round
    [entry] = log(report)
    assert {"loss/value_avg", "kl"} <= set(entry)
    assert entry["val/ratio"] == pytest.approx(1.0, abs=1e-3)  # it computes as what has sampled
    assert -3.5 <= entry["reward"] <= 5
    assert find_initial(run, "ppo").template == "plain"


def test_an_alarm_stops_a_training_with_a_checkpoint(run):
    same = changed(GRPO, temperature=1e-3, on_alarm="stop", max_steps=8)  # all completions of a state are one
    with pytest.raises(TrainingError, match=r"stopped at an alarm.*the groups have the same reward"):
        train(same, run)
    assert estimate(same, run).resumes_at == 3
    assert "alarm" in [event["event"] for event in events_of(run)]


@pytest.mark.parametrize(("every", "logged"), [(3, [1, 3, 5, 10, 15, 20, 22]), (5, [1, 5, 10, 15, 20, 22])])
def test_every_entry_of_the_log_is_seen_once_beside_validations(tmp_path, every, logged):
    tracker = SimpleNamespace(rows=[], log=lambda values, step: tracker.rows.extend((step, name) for name in values))
    loop, monitor = StepLoop(tmp_path, 5, 100, 22), Monitor("grpo", trackers=[tracker])
    validate = lambda: {"eval_recall": 0.5, "eval_unparsed": 0.0}  # noqa: E731  best at first: that step is saved and logged
    loop.add_callback(Driver(loop.log, monitor, "train", Progress(), Interrupt(), validate, every))
    loop.begin()
    while not loop.is_over:
        loop.end_step({"reward": 0.5 if loop.state.global_step < 5 else 0.1})
    rounds = [step for step, name in tracker.rows if name == "train/reward"]
    validated = [step for step, name in tracker.rows if name == "eval/recall"]
    assert rounds == logged
    assert validated == [0, *range(every, 22, every), 22]
    assert [entry["step"] for entry in loop.state.log_history if "reward" in entry] == logged
    assert "reward" in monitor._raised


def test_the_best_policy_of_the_validations_is_kept(run, monkeypatch):
    figures, seen = {0: 0.1, 2: 0.2, 4: 0.9, 6: 0.4}, {}

    def run_model(self, model, tokenizer, step):
        seen[step] = {name: weight.numpy().tobytes() for name, weight in model.state_dict().items()}
        return {"eval_recall": figures[step], "eval_unparsed": 0.0}

    monkeypatch.setattr("leret.training.validation.Validation.run_model", run_model)
    report = train(changed(GRPO, eval_steps=2, eval_tasks=2, eval_split="train", max_steps=6, save_steps=1), run)
    result = record(report)
    assert (result["best_step"], len(result["validation"]), [*seen]) == (4, 2, [0, 2, 4, 6])
    assert weights_of(report.path).items() <= seen[4].items()
    assert seen[4] != seen[6]


def test_rounds_and_optimizer_steps_are_counted_apart(run):
    recipe = changed(GRPO, num_mini_batches=2, max_steps=4, eval_steps=1, eval_split="train", eval_tasks=2)
    report = train(recipe, run)
    assert (report.rounds, report.steps) == (2, 4)
    assert report.best_step in {2, 4}  # optimizer steps, while the log counts rounds
    card = (report.path / "README.md").read_text()
    assert "4 optimizer steps" in card
    assert "in 2 rounds" in card
    assert f"from round {report.best_step // 2}" in card
