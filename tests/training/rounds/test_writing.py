import math
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from leret.core.errors import TrainingError
from leret.rollouts.environment import Environment, training_tasks
from leret.rollouts.rounds import RoundSampler
from leret.training.algorithms import ALGORITHMS
from leret.training.job import TrainingJob
from leret.training.model import find_initial
from leret.training.rounds.grpo import GRPORecipe
from leret.training.rounds.rloo import RLOORecipe
from leret.training.rounds.update import RolloutBatch
from tests.training.training_runs import ONLINE


def learner_of(run, environment, recipe):
    job = TrainingJob(recipe, find_initial(run, "base"), [None] * 12, None, {}, environment=environment)
    return ALGORITHMS[recipe.algorithm].make_learner(job, "cpu")


@pytest.mark.parametrize(("kind", "weight"), [(GRPORecipe, math.exp(0.1)), (RLOORecipe, 1.5)])
def test_steps_have_a_reference_and_advantages_weighted_by_the_ratio_to_the_sampler(run, monkeypatch, kind, weight):
    recipe = kind(**ONLINE, temperature=1.0, beta=0.25, importance_clip=1.5)
    with Environment.open(run) as environment:
        learner = learner_of(run, environment, recipe)
        with closing(RoundSampler(recipe, environment, run, learner.policy)) as sampler:
            sampled = sampler.sample(training_tasks(environment, recipe)[:2], 0)
        sampled = replace(sampled, rewards=torch.arange(len(sampled.rewards)).float())
        steps = []
        monkeypatch.setattr(learner.update, "step", lambda *given: steps.append(given) or {})
        agreeing = learner.learn(sampled, 0)
        shifted = [[value - 0.1 for value in row] for row in sampled.logps]
        entry = learner.learn(replace(sampled, logps=shifted), 0)
        learner.policy.close()
    assert agreeing["sampling/sampling_logp_difference/max"] < 1e-4
    assert entry["sampling/sampling_logp_difference/mean"] == pytest.approx(0.1, abs=1e-4)
    plain, weighted = (batch.advantages for batch, *_ in steps)
    for batch, beta, _ in steps:  # the penalty of rloo is in its rewards
        assert (batch.reference is not None, beta) == (True, 0.25 if kind is GRPORecipe else 0.0)
    # grpo weights tokens; rloo weights completions, and the product of five ratios or more is above the clip.
    whole = steps[0][0].mask.sum(1) >= 5
    assert bool(whole.any())
    assert torch.allclose(weighted[whole], plain[whole] * weight, atol=1e-3)


def test_importance_weights_need_the_distribution_that_was_sampled(run):
    with Environment.open(run) as environment:
        with pytest.raises(TrainingError, match=r"temperature 0\.7, top_p 1: importance_clip"):
            learner_of(run, environment, GRPORecipe(**ONLINE | {"temperature": 0.7}, importance_clip=2.0))
        learner = learner_of(run, environment, GRPORecipe(**ONLINE | {"temperature": 1.0}, importance_clip=2.0))
        batch = RolloutBatch.of([([3, 4], [5, 6])], torch.tensor([0]))
        with pytest.raises(TrainingError, match="importance_clip: the server sends no log-probabilities"):
            learner._weighted(batch)
        learner.policy.close()
