from dataclasses import replace

import pytest
import torch

from leret.extras.keep_rollouts import ENGINE, KeepGRPO, same_side_of_mean
from leret.rollouts.environment import Environment, training_tasks
from leret.rollouts.rounds import RoundSampler
from leret.training.algorithms import TrainingRecipe
from leret.training.job import TrainingJob
from leret.training.model import find_initial
from tests.training.rounds.conftest import run  # noqa: F401
from tests.training.training_runs import ONLINE


def test_what_the_filter_leaves_out_is_not_learnt(run, monkeypatch):  # noqa: F811
    recipe = KeepGRPO(**ONLINE | {"num_generations": 2}, max_steps=4)
    with Environment.open(run) as environment:
        job = TrainingJob(recipe, find_initial(run, "base"), [None] * 12, None, {}, environment=environment)
        learner = ENGINE["grpo"].make_learner(job, "cpu")
        sampler = RoundSampler(recipe, environment, run, learner.policy)
        sampled = sampler.sample(training_tasks(environment, recipe)[:2], 0)
        n_groups = len(sampled.rewards) // 2
        learnt, step = [], learner.update.step

        def recorded(batch, *_):
            if batch.advantages.any():
                learnt.extend(batch.sequences)
            return step(batch)

        monkeypatch.setattr(learner.update, "step", recorded)
        for second, kept in (([1.0, 0.0], [True, False]), ([0.0, 1.0], [False, False])):
            learnt.clear()
            parts = torch.tensor([[1.0, 0.0], second]).T.repeat(n_groups, 1)
            rewards = parts.sum(1) + torch.tensor([0.5, 0.0]).repeat(n_groups)
            entry = learner.learn(replace(sampled, parts=parts, rewards=rewards), 0)
            assert learnt == [one for one, keep in zip(sampled.sequences, kept * n_groups, strict=True) if keep]
            assert ("loss" in entry, entry["reward"]) == (any(kept), pytest.approx(float(rewards.mean())))
        sampler.close()
        learner.policy.close()


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "rloo", "ppo"])
def test_a_recipe_names_the_filter_as_its_engine(algorithm):
    keys = {"algorithm": algorithm, "engine": "keep-rollouts", "keep_rollouts": "below"}
    assert TrainingRecipe.model_validate(keys).find_algorithm() is ENGINE[algorithm]


def test_a_rollout_is_kept_where_all_parts_agree():
    parts = torch.tensor([[1.0, 1.0, 5.0], [0.0, 0.0, 5.0], [1.0, 0.0, 5.0], [7.0, 8.0, 9.0]])
    groups = torch.tensor([0, 0, 0, 1])
    assert same_side_of_mean(parts, groups, "above").tolist() == [True, False, False, True]
    assert same_side_of_mean(parts, groups, "below").tolist() == [False, True, False, True]
    assert same_side_of_mean(parts, groups, "either").tolist() == [True, True, False, True]
    parts[:2, 1], parts[3, 0] = torch.nan, torch.nan  # does not apply to two of a group, to one alone
    assert same_side_of_mean(parts, groups, "above").tolist() == [True, False, True, True]

    for n, value in ((2, 0.1), (3, 0.7), (7, 12.63), (16, 1234.1)):  # a part without spread is on both sides
        parts = torch.stack([torch.full((n,), value), torch.arange(n).float()], 1)
        expected = torch.arange(n) >= (n - 1) / 2
        assert same_side_of_mean(parts, torch.zeros(n).long(), "above").equal(expected)
