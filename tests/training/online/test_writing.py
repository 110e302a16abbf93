from dataclasses import replace

import pytest
import torch

from leret.rollouts.environment import Environment, training_tasks
from leret.rollouts.rounds import RoundSampler
from leret.training.algorithms import ALGORITHMS
from leret.training.algorithms.grpo import GRPORecipe
from leret.training.job import TrainingJob
from leret.training.model import find_initial
from tests.training.training_runs import ONLINE


@pytest.mark.parametrize(("second", "kept"), [([1.0, 0.0], [True, False]), ([0.0, 1.0], [False, False])])
def test_what_the_filter_leaves_out_is_not_learnt(run, monkeypatch, second, kept):
    recipe = GRPORecipe(**ONLINE | {"num_generations": 2}, max_steps=4, keep_rollouts="above")
    with Environment.open(run) as environment:
        job = TrainingJob(recipe, find_initial(run, "base"), [None] * 12, None, {}, environment=environment)
        learner = ALGORITHMS["grpo"].learner(job, "cpu")
        sampler = RoundSampler(recipe, environment, run, learner.policy)
        sampled = sampler.sample(training_tasks(environment, recipe)[:2], 0)
        n_groups = len(sampled.rewards) // 2
        parts = torch.tensor([[1.0, 0.0], second]).T.repeat(n_groups, 1)
        sampled = replace(sampled, parts=parts, rewards=parts.sum(1) + torch.tensor([0.5, 0.0]).repeat(n_groups))
        learnt, step = [], learner.update.step
        monkeypatch.setattr(learner.update, "step", lambda batch, *_: learnt.extend(batch.sequences) or step(batch))
        entry = learner.learn(sampled, 0)
        assert learnt == [one for one, keep in zip(sampled.sequences, kept * n_groups, strict=True) if keep]
        assert ("loss" in entry, entry["reward"]) == (any(kept), pytest.approx(float(sampled.rewards.mean())))
        sampler.close()
        learner.policy.close()
