import asyncio
from contextlib import closing

import pytest

from leret.programs.adapters import CompactAdapter
from leret.programs.prompts import ZERO_SHOT
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.rewards import scoring
from leret.rollouts.actors import Role, SamplingPlan
from leret.rollouts.questions import sample_question
from leret.rollouts.states import StateSampler
from leret.rollouts.walk import begin, walk
from tests.rollouts.test_credit import Answering, Recorded, is_alpha, step_of
from tests.sampling.fakes import FakeRetriever, questions


def rollouts(policy, unparsed_reward=None, reward=is_alpha, sampled=("plan", "write", "answer"), n=6):
    """Return a question's turns by rollout, each as (predictor, sample)."""
    turns = {}

    async def run(searches):
        runner = ProgramRunner.over(Answering(), CompactAdapter(), searches)
        plan = SamplingPlan(
            (ZERO_SHOT,), n, 7, 1.0, 1.0, 8, role=lambda need: Role(policy, need.predictor in sampled, "final"),
            final=scoring(reward, "final"),
        )  # fmt: skip
        sampler = StateSampler(runner, None, plan)

        async def visit(point):
            for state, samples in await sample_question(runner, sampler, plan, point, unparsed_reward):
                for sample in samples:
                    turns.setdefault(sample.index, []).append((state.predictor, sample))

        assert (await walk(begin(runner, questions(1)[0]), visit)).error is None

    with closing(SearchBatcher(FakeRetriever())) as searches:
        asyncio.run(run(searches))
    return {index: sorted(rollout, key=lambda turn: turn[1].step) for index, rollout in turns.items()}


def test_every_turn_of_a_trained_predictor_has_the_outcome_of_its_own_end():
    policy = Recorded()
    turns = rollouts(policy, n=8)
    assert policy.asked == {"plan": 8, "write": 8, "answer": 8}, "no continuation, no shared turn"
    assert {tuple(name for name, _ in rollout) for rollout in turns.values()} == {("plan", "write", "answer")}
    for rollout in turns.values():
        [reward] = {sample.reward for _, sample in rollout}
        assert reward == float("alpha" in rollout[-1][1].completion)
        assert {sample.components["final"] for _, sample in rollout} == {reward}
    assert {rollout[0][1].reward for rollout in turns.values()} == {0.0, 1.0}
    assert len({sample.seed for rollout in turns.values() for _, sample in rollout}) == 24
    alone = rollouts(Recorded(), sampled=("write",))
    assert {tuple(name for name, _ in rollout) for rollout in alone.values()} == {("write",)}


@pytest.mark.parametrize(("price", "expected"), [(None, 0.0), (-2.0, -2.0)])
def test_a_rollout_that_does_not_parse_has_a_price_and_one_failure(price, expected):
    mute = Recorded(mute=lambda request: step_of(request) == "answer" and request.seeds[0] % 2)
    done = [[sample for _, sample in rollout] for rollout in rollouts(mute, price, reward=lambda outcome: 0.5).values()]
    silent = [rollout for rollout in done if rollout[-1].is_unparsed]
    assert 0 < len(silent) < len(done)
    for rollout in done:
        assert {sample.reward for sample in rollout} == {expected if rollout in silent else 0.5}
        assert not any(sample.failure for sample in rollout[:-1])


def test_a_rollout_that_an_outage_ends_has_no_reward_and_the_others_keep_theirs():
    away = Recorded(fail=lambda request: step_of(request) == "answer" and request.seeds[0] % 2)
    done = [[sample for _, sample in rollout] for rollout in rollouts(away).values()]
    lost = [rollout for rollout in done if rollout[-1].failure]
    assert 0 < len(lost) < len(done)
    for rollout in lost:
        assert [sample.failure and sample.failure.kind for sample in rollout] == [None, None, "policy"]
        assert {sample.reward for sample in rollout} == {None}
    assert all(sample.reward is not None for rollout in done if rollout not in lost for sample in rollout)
