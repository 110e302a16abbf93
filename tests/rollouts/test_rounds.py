import asyncio
from types import SimpleNamespace

import pytest
from torch import bincount, lerp

from leret.config.policy import LocalPolicySettings
from leret.config.sampling import RewardSettings
from leret.core.errors import PolicyError
from leret.core.types import Failure, Sample, State
from leret.policies.base import PromptTooLongError, Request
from leret.policies.local.policy import LocalPolicy
from leret.rollouts.environment import Environment, training_tasks
from leret.rollouts.rounds import Round, RoundPolicy, RoundSampler, round_of
from leret.sampling.stage import sample
from leret.sampling.store.store import Store, stored_paths
from leret.training.rounds.grpo import GRPORecipe
from tests.sampling.fakes import recipe_of
from tests.training.training_runs import changed

RECIPE = GRPORecipe(num_generations=4, max_completion_length=6)


@pytest.fixture
def policy(base):
    made = LocalPolicy(LocalPolicySettings(model=str(base)))
    yield made
    made.close()


@pytest.fixture
def environment(begun):
    with Environment.open(begun) as environment:
        yield environment


def sampler(run, environment, policy, **keys):
    recipe = changed(RECIPE, **keys)
    return RoundSampler(recipe, environment, run, policy, stored_paths(run) if recipe.states == "stored" else None)


def test_a_round_is_every_state_of_its_programs(begun, environment, policy):
    made = sampler(begun, environment, policy)
    tasks = training_tasks(environment, RECIPE)
    found = made.sample(tasks[:3], 0)
    assert len(found.sequences) == len(found.rewards) == len(found.predictors) == 3 * 2 * 4
    assert 6 <= found.metrics["num_searches"] <= 24
    assert found.groups.tolist() == [place // 4 for place in range(24)]
    prompts = [tuple(prompt) for prompt, _ in found.sequences]
    assert all(len(set(prompts[i : i + 4])) == 1 for i in range(0, 24, 4))
    assert len(set(prompts)) == 6
    again, other = made.sample(tasks[:3], 0), made.sample(tasks[:3], 1)
    assert (again.sequences, again.rewards.tolist()) == (found.sequences, found.rewards.tolist())
    assert other.sequences != found.sequences


def test_stored_states_are_those_of_the_run(begun, environment, policy):
    recipe = begun.sampling()
    sample(recipe_of(data=recipe["data"], policy=recipe["policy"], prompts=1), begun)
    with Store(begun.store, read_only=True) as store:
        states = {group.state.id: group.state for group in store.finished(begun.manifest.policy_digest)}
    tasks = training_tasks(environment, RECIPE)
    stored = sampler(begun, environment, policy, states="stored").sample(tasks, 0)
    wanted = {policy.prompt_ids(state.messages) for state in states.values()}
    assert {tuple(prompt) for prompt, _ in stored.sequences} == wanted
    live = sampler(begun, environment, policy).sample(tasks, 0)
    assert {tuple(prompt) for prompt, _ in live.sequences} != wanted


def test_a_question_group_is_whole_rollouts_with_the_outcome_at_every_turn(begun, environment, policy):
    tasks = training_tasks(environment, RECIPE)[:3]
    found = sampler(begun, environment, policy, groups="question").sample(tasks, 0)
    assert len(found.sequences) == 3 * 4 * 2  # tasks, rollouts, turns: no tree
    assert bincount(found.rollouts).tolist() == [2] * 12
    assert found.walks.tolist() == [place // 8 for place in range(24)]
    for rollout in range(12):
        [one, other] = found.rewards[found.rollouts == rollout].tolist()
        assert one == other
    assert len({tuple(prompt) for prompt, _ in found.sequences[:4]}) == 1, "first turns are adjacent"
    assert len(set(found.rewards.tolist())) > 2
    assert found.metrics["num_completions"] == found.metrics["num_samples"] == 24
    assert found.metrics["num_completion_tokens"] == sum(len(completion) for _, completion in found.sequences)


def test_rounds_credit_the_step_the_end_or_both_and_continuations_count_as_completions(begun, environment, policy):
    found, reward = [], RewardSettings(parts={"recall": 1.0, "steps": 0.5})
    for credit in ("step", "final", "both"):
        recipe = changed(RECIPE, credit=credit, reward=reward)
        made = sampler(begun, environment, policy, credit=credit, reward=reward)
        found.append(made.sample(training_tasks(environment, recipe)[:3], 0))
    step, final, both = found
    n = 3 * 4  # first steps; which completion goes on depends on the rewards
    assert step.sequences[:n] == final.sequences[:n] == both.sequences[:n]
    assert step.rewards[:n].tolist() != final.rewards[:n].tolist()
    mixed = lerp(step.rewards[:n], final.rewards[:n], environment.recipe.sampling.final_weight)
    assert both.rewards[:n].tolist() == pytest.approx(mixed.tolist())
    assert step.metrics["num_completions"] == step.metrics["num_samples"] == final.metrics["num_samples"] == 24
    assert 24 < final.metrics["num_completions"] <= 24 + n  # first steps run on, equal ones once


def state_with(*rewards):
    def one(i, reward):
        failure = {None: Failure("parse", ""), "away": Failure("policy", "")}.get(reward)
        value = None if failure else reward
        return Sample(str(i), "s", "q", 0, "0", i, i, "text", reward=value, failure=failure)

    return State("s", "q", 0, "write", {}, ()), [one(i, reward) for i, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("price", "rewards", "expected"),
    [
        (None, (0.5, None, 1.0), [0.5, 0.0, 1.0]),
        (None, (0.5, None, -3.5), [0.5, -3.5, -3.5]),
        (-1.0, (5.0, None, -3.5), [5.0, -1.0, -3.5]),
        (None, (0.5, "away", 1.0), [0.5, 1.0]),
    ],
)
def test_what_does_not_parse_has_a_price_and_an_outage_has_none(price, rewards, expected):
    made = SimpleNamespace(_unparsed_reward=price)
    [(_, scored)] = RoundSampler.scored(made, [state_with(*rewards)])
    assert [sample.reward for sample in scored] == expected


class Recording:
    name = digest = "recording"

    def __init__(self):
        self.batches = []

    def prompt_ids(self, messages):
        if "long" in messages[0]["content"]:
            raise PromptTooLongError("too long")
        return (1,)

    def complete_many(self, requests):
        if any(request.messages[0]["content"] == "broken" for request in requests):
            raise PolicyError("away")
        self.batches.append([request.messages[0]["content"] for request in requests])
        return [list(request.seeds) for request in requests]


def ask(text):
    return Request(({"role": "user", "content": text},), (len(text),), 1.0, 4)


def test_requests_of_all_open_walks_are_one_ordered_batch():
    inner, round_ = Recording(), Round()
    policy = RoundPolicy(round_, inner)

    async def continuation(name):
        await asyncio.sleep(0.005)
        await policy.complete(ask(name))

    async def branching():
        tasks = [asyncio.create_task(continuation(name)) for name in ("y", "x")]
        await round_.walks.wait(tasks)
        await asyncio.sleep(0.005)
        await policy.complete(ask("after"))

    async def single():
        await policy.complete(ask("a"))
        await policy.complete(ask("b"))

    async def run():
        tasks = [asyncio.create_task(one) for one in (single(), branching())]
        await round_.walks.wait(tasks)

    asyncio.run(run())
    assert inner.batches == [["a", "x", "y"], ["after", "b"]]


@pytest.mark.parametrize(("texts", "n_failed"), [(("a", "long", "b"), 1), (("a", "broken"), 2)])
def test_a_failure_is_of_its_request_or_of_the_batch(texts, n_failed):
    async def run():
        round_ = Round()
        policy = RoundPolicy(round_, Recording())
        tasks = [asyncio.create_task(policy.complete(ask(text))) for text in texts]
        await round_.walks.wait(tasks)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert sum(isinstance(answer, PolicyError) for answer in asyncio.run(run())) == n_failed


def test_every_pass_takes_all_tasks_in_an_order_of_its_own():
    places = [place for number in range(5) for place in round_of(10, 4, 7, number)]
    assert sorted(places[:10]) == sorted(places[10:]) == [*range(10)]
    assert places[:10] != places[10:]
    assert sorted(round_of(3, 8, 0, 0)) == [0, 1, 2]
    ends = [round_of(10, 4, seed, 2) for seed in range(9)]  # a round over the end of a pass
    assert all(len({*places}) == len(places) for places in ends)
