import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from leret.config.policy import LocalPolicySettings
from leret.core.errors import RetrievalError, TrainingError
from leret.core.runs import Run
from leret.extras.trl import GRPOWithTRL, RLOOWithTRL, StoredStates
from leret.policies.local.policy import LocalPolicy
from leret.rollouts.environment import Environment, training_tasks
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from leret.training.stage import estimate, train
from tests.sampling.fakes import recipe_of
from tests.training.rounds.conftest import online_run
from tests.training.training_runs import ONLINE, Stopper, changed, fail, log, weights_of

KEYS = {**ONLINE, "max_steps": 2, "per_device_train_batch_size": 8, "save_steps": 1}
GRPO = GRPOWithTRL(**KEYS)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, base):
    run = online_run(tmp_path_factory.mktemp("stored"), base)
    recipe = run.sampling()
    sample(recipe_of(data=recipe["data"], policy=recipe["policy"], prompts=1), run)
    return run


@pytest.fixture
def sampled(stored, tmp_path):
    return Run.open(shutil.copytree(stored.path.parent, tmp_path, dirs_exist_ok=True) / "run")


@pytest.mark.parametrize("recipe", [GRPO, RLOOWithTRL(**KEYS)], ids=["grpo", "rloo"])
def test_two_steps_end_with_a_policy_and_our_rewards_in_the_log(sampled, base, recipe, monkeypatch):
    score, rewards = StoredStates.__call__, []
    monkeypatch.setattr(
        StoredStates, "__call__", lambda self, *x, **named: rewards.append(score(self, *x, **named)) or rewards[-1]
    )
    assert estimate(recipe, sampled).steps == 2
    report = train(recipe, sampled)
    assert weights_of(report.path) != weights_of(base)
    assert (report.steps, report.examples) == (2, 24)
    logged = [entry["reward"] for entry in log(report)]
    assert logged == pytest.approx([sum(batch) / 8 for batch in rewards], abs=1e-6)
    names = {"entropy", "frac_reward_zero_std", "completions/unparsed", "completions/distinct", "rewards/reward/mean"}
    names |= {"completions/mean_length", "reward_percentiles/50"}
    assert names <= set(log(report)[0])
    assert train(recipe, sampled).already


def test_a_stopped_training_goes_on_to_the_same_weights(sampled):
    with pytest.raises(ZeroDivisionError):
        train(GRPO, sampled, progress=Stopper(2, fail))
    resumed = train(GRPO, sampled)
    assert (resumed.resumed_from, resumed.steps) == (1, 2)
    assert weights_of(resumed.path) == weights_of(train(changed(GRPO, name="straight"), sampled).path)


def ask(states, samples):
    turns = [[{"role": "assistant", "content": one.completion}] for one in samples]
    state = SimpleNamespace(global_step=0)
    return states(turns, [one.state_id for one in samples], trainer_state=state, log_metric=lambda name, value: None)


def test_a_batch_is_scored_as_our_sampling_scored_it_in_one_call_of_the_retriever(sampled, base):
    with Environment.open(sampled) as environment, Store(sampled.store, read_only=True) as store:
        search = Mock(wraps=environment.retriever.search)
        environment.retriever = SimpleNamespace(search=search)
        policy = LocalPolicy(LocalPolicySettings(model=str(base)))
        states = StoredStates(GRPO, environment, sampled, policy, training_tasks(environment, GRPO))
        search.reset_mock()
        groups = store.finished(sampled.manifest.policy_digest)
        samples = [one for group in groups for one in group.samples]
        assert ask(states, samples) == pytest.approx([one.reward for one in samples])
        assert len({one.state_id for one in samples}) == 24
        assert search.call_count == 1
        assert ask(states, samples[::-1]) == pytest.approx([one.reward for one in samples[::-1]])

        states.recipe = changed(GRPO, unparsed_reward=-2.0)
        assert ask(states, [samples[0], replace(samples[1], completion="")]) == [pytest.approx(samples[0].reward), -2.0]

        lenient = environment.recipe.sampling.model_copy(update={"max_error_rate": 1.0})
        environment.recipe = environment.recipe.model_copy(update={"sampling": lenient})
        search.side_effect = RetrievalError("away")
        asked = [(one.reward, found) for one, found in zip(samples, ask(states, samples), strict=True)]
        assert {found for reward, found in asked if found != pytest.approx(reward)} == {
            None
        }  # the paths' own are known
        states.close()


def test_more_completions_a_batch_than_the_states_give_are_refused(sampled):
    with pytest.raises(TrainingError, match="more states than the 24 in the run"):
        train(changed(GRPO, per_device_train_batch_size=128), sampled)
    with pytest.raises(TrainingError, match="divisible by num_generations"):
        train(changed(GRPO, per_device_train_batch_size=6, name="other"), sampled)
