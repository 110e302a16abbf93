"""What a round samples: states of the policy as it is or of the store, prices, and bits that no clock decides."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from leret.config.policy import LocalPolicySettings
from leret.config.sampling import RewardSettings
from leret.core.errors import PolicyError
from leret.core.types import Failure, Sample, State
from leret.policies.base import PromptTooLongError, Request
from leret.policies.local.policy import LocalPolicy
from leret.rewards import scoring
from leret.sampling.rollouts.environment import Environment
from leret.sampling.stage import sample
from leret.sampling.store.store import Store
from leret.training.algorithms.grpo import GRPORecipe
from leret.training.data import training_tasks
from leret.training.online.rounds import AwaitedPolicy, RoundPolicy, RoundSampler, round_of
from tests.sampling.fakes import recipe_of
from tests.training.training_runs import changed

RECIPE = GRPORecipe(num_generations=4, max_completion_length=6)


@pytest.fixture
def policy(base):
    made = LocalPolicy(LocalPolicySettings(model=str(base)))
    yield made
    made.close()


@pytest.fixture
def environment(run):
    with Environment.open(run) as opened:
        yield opened


def sampler(run, environment, policy, **keys):
    return RoundSampler(changed(RECIPE, **keys), environment, run, policy)


def test_a_round_is_every_state_of_its_programs(run, environment, policy):
    made = sampler(run, environment, policy)
    tasks = training_tasks(environment, RECIPE)
    found = made.sample(tasks[:3], 0)
    assert len(found.sequences) == len(found.rewards) == 3 * 2 * 4
    assert 6 <= found.facts["num_searches"] <= 24
    assert found.groups.tolist() == [place // 4 for place in range(24)]
    prompts = [tuple(prompt) for prompt, _ in found.sequences]
    assert all(len(set(prompts[i : i + 4])) == 1 for i in range(0, 24, 4))
    assert len(set(prompts)) == 6
    again, other = made.sample(tasks[:3], 0), made.sample(tasks[:3], 1)
    assert (again.sequences, again.rewards.tolist()) == (found.sequences, found.rewards.tolist())
    assert other.sequences != found.sequences


def test_stored_states_are_those_of_the_run(run, environment, policy):
    recipe = run.section("sampling", "")
    sample(recipe_of(data=recipe["data"], policy=recipe["policy"], prompts=1), run)
    with Store(run.store, read_only=True) as store:
        states = {group.state.id: group.state for group in store.finished()}
    tasks = training_tasks(environment, RECIPE)
    stored = sampler(run, environment, policy, states="stored").sample(tasks, 0)
    wanted = {policy.prompt_ids(state.messages) for state in states.values()}
    assert {tuple(prompt) for prompt, _ in stored.sequences} == wanted
    live = sampler(run, environment, policy).sample(tasks, 0)
    assert {tuple(prompt) for prompt, _ in live.sequences} != wanted


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
    made = SimpleNamespace(recipe=changed(RECIPE, unparsed_reward=price), _scoring=scoring("ap"))
    [(_, scored)] = RoundSampler._scored(made, [state_with(*rewards)])
    assert [value for _, value in scored] == expected


def test_a_part_that_does_not_apply_to_some_samples_is_still_told():
    made = SimpleNamespace(_scoring=scoring(RewardSettings(parts={"ap": {}, "em": {}})))
    _, samples = state_with(1.0, 0.0, None)
    given = [{"ap": 1.0, "em": 0.5}, {"ap": 0.0}, {}]
    samples = [replace(sample, components=own) for sample, own in zip(samples, given, strict=True)]
    names, parts = RoundSampler._parts(made, samples)
    assert (names, parts.nan_to_num(-1).tolist()) == (["ap", "em"], [[1.0, 0.5], [0.0, -1.0], [0.0, 0.0]])
    assert RoundSampler._facts(made, [], names, parts)["rewards/em/mean"] == 0.25


class Recording:
    """A local policy's two methods; completes late, and keeps the batches."""

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


def test_what_is_asked_at_one_time_is_one_batch_in_one_order():
    inner, searching = Recording(), []
    policy = RoundPolicy(inner, lambda: not searching)

    async def task(name, rng):
        for turn in range(3):
            searching.append(name)
            await asyncio.sleep(rng.random() * 0.002)
            searching.remove(name)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            await policy.complete(ask(f"{turn} {name}"))

    async def run():
        await asyncio.gather(*(task(name, random.Random(name)) for name in "dbca"))

    asyncio.run(run())
    assert inner.batches == [[f"{turn} {name}" for name in "abcd"] for turn in range(3)]


def test_a_batch_waits_for_the_answers_of_other_policies(environment):
    runner, inner = environment.runner(None), Recording()
    policy = RoundPolicy(inner, lambda: runner.idle)

    class Slow:
        name = digest = "slow"

        async def complete(self, request):
            await asyncio.sleep(0.01)
            return []

    async def asks_first():
        await AwaitedPolicy(Slow(), runner).complete(ask("plan"))
        await policy.complete(ask("b"))

    async def run():
        await asyncio.gather(asks_first(), policy.complete(ask("a")))

    asyncio.run(run())
    assert inner.batches == [["a", "b"]]


@pytest.mark.parametrize(("texts", "n_failed"), [(("a", "long", "b"), 1), (("a", "broken"), 2)])
def test_a_failure_is_of_its_request_or_of_the_batch(texts, n_failed):
    policy = RoundPolicy(Recording(), lambda: True)

    async def run():
        return await asyncio.gather(*(policy.complete(ask(text)) for text in texts), return_exceptions=True)

    assert sum(isinstance(one, PolicyError) for one in asyncio.run(run())) == n_failed


def test_every_pass_takes_all_tasks_in_an_order_of_its_own():
    places = [place for number in range(5) for place in round_of(10, 4, 7, number)]
    assert sorted(places[:10]) == sorted(places[10:]) == [*range(10)]
    assert places[:10] != places[10:]
    assert sorted(round_of(3, 8, 0, 0)) == [0, 1, 2]
    ends = [round_of(10, 4, seed, 2) for seed in range(9)]  # a round over the end of a pass
    assert all(len({*places}) == len(places) for places in ends)


def test_a_training_may_have_a_reward_of_its_own(run, environment, policy):
    parts = {"recall": 1.0, "steps": 0.5}
    keys = {"reward": {"parts": parts, "unparsed_reward": -2.0}}
    found = sampler(run, environment, policy, **keys).sample(
        training_tasks(environment, changed(RECIPE, **keys))[:2], 0
    )
    assert found.parts.shape == (16, 2)
    assert {"rewards/recall/mean", "rewards/steps/mean"} <= set(found.facts)
