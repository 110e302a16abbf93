"""Sampling many questions: ids, resumption, outages."""

import asyncio
import signal
from contextlib import nullcontext

import pytest

from leret.core.errors import PolicyError
from leret.core.types import Failure
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.sampling.rollouts.branching import SamplingPlan, StateSampler
from leret.sampling.rollouts.scheduler import Scheduler, refuse_unparsed
from leret.sampling.store.store import Store
from tests.sampling.fakes import FakePolicy, FakeRetriever, questions

FEW = Prompt("1", {"write_query": [{"question": "who", "context": [], "query": "find who"}]})


def sample(path, replay, formatter, policy=None, retriever=None, n=12, concurrency=5, max_error_rate=1.0, n_samples=2):
    """One session; returns its stats."""

    async def main():
        policy_ = policy or FakePolicy()
        front = SearchBatcher(retriever or FakeRetriever())
        runner = ProgramRunner(replay, formatter, front)
        plan = SamplingPlan((ZERO_SHOT, FEW), n_samples, 7, 1.0, 1.0, 8)
        with Store(path) as store:
            sampler = StateSampler(runner, policy_, store, plan)
            scheduler = Scheduler(runner, sampler, store, policy_.digest, seed=7, max_error_rate=max_error_rate)
            try:
                return await scheduler.run(questions(n), concurrency)
            finally:
                front.close()

    return asyncio.run(main())


def content(path):
    """Everything that a run says, in order."""
    with Store(path, read_only=True) as store:
        groups = list(store.groups())
        visits = [store.visits("fake-policy", q.id) for q in questions()]
    return groups, visits


class Stopping(FakePolicy):
    """Stops the session at its n-th request by a Ctrl-C."""

    def __init__(self, n):
        super().__init__()
        self.n = n

    async def complete(self, request):
        if len(self.requests) == self.n:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(10)
        return await super().complete(request)


@pytest.mark.parametrize("n", [1, 10, 25])
def test_a_run_that_was_stopped_equals_one_that_was_not(tmp_path, replay, formatter, n):
    whole = FakePolicy()
    sample(tmp_path / "whole", replay, formatter, whole)
    first, second = Stopping(n), FakePolicy()
    with pytest.raises(KeyboardInterrupt):
        sample(tmp_path / "parts", replay, formatter, first)
    sample(tmp_path / "parts", replay, formatter, second)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert len(second.requests) < len(whole.requests) or n == 1


def test_an_outage_is_recorded_never_scored_and_tried_again(tmp_path, replay, formatter):
    sample(tmp_path / "whole", replay, formatter)
    away = FakePolicy(fail=lambda request: len(away.requests) % 3 == 0)
    tally = sample(tmp_path / "db", replay, formatter, away)
    assert tally.failures["policy"] > 0
    assert tally.waiting > 0
    with Store(tmp_path / "db") as store:
        failed = [s for g in store.groups() for s in g.samples if s.failure]
    assert failed
    assert all(s.reward is None and s.completion is None for s in failed)
    sample(tmp_path / "db", replay, formatter)
    assert content(tmp_path / "db") == content(tmp_path / "whole")


def test_too_many_failures_stop_with_the_cause(tmp_path, replay, formatter):
    away = FakePolicy(fail=lambda request: len(away.requests) > 8)
    with pytest.raises(PolicyError, match=r"max_error_rate = 0\.1.*the server is away.*run the same command again"):
        sample(tmp_path / "db", replay, formatter, away, max_error_rate=0.1, n=60)
    sample(tmp_path / "db", replay, formatter, n=12)


def test_a_run_where_everything_failed_says_so(tmp_path, replay, formatter):
    with pytest.raises(PolicyError, match="the server is away"):
        sample(tmp_path / "db", replay, formatter, FakePolicy(fail=lambda request: True), n=3)


@pytest.mark.parametrize(
    ("n_unparsed", "n_samples", "rate", "refused"),
    [
        (4, 4, 0.5, False),
        (5, 5, 0.5, True),
        (5, 5, 1, False),
        (48, 49, 0.5, False),
        (25, 50, 0.5, False),
        (26, 50, 0.5, True),
    ],
)
def test_few_unparsed_samples_refuse_only_where_all_are(n_unparsed, n_samples, rate, refused):
    with pytest.raises(PolicyError, match="name a new run directory") if refused else nullcontext():
        refuse_unparsed([Failure("parse", "x")], n_unparsed, n_samples, rate)


def test_more_questions_only_add(tmp_path, replay, formatter):
    sample(tmp_path / "db", replay, formatter, n=5)
    policy = FakePolicy()
    sample(tmp_path / "db", replay, formatter, policy, n=12)
    sample(tmp_path / "whole", replay, formatter)
    assert content(tmp_path / "db") == content(tmp_path / "whole")


class Straggling(FakePolicy):
    """Answers one question's first hop only when all other questions have gone as far as they can."""

    def __init__(self, slow, n_others):
        super().__init__()
        self.slow = slow
        self.waiting_for = n_others
        self.second_hops = set()
        self.go = asyncio.Event()

    async def complete(self, request):
        asked = request.messages[-1]["content"]
        name = asked.split("number ")[1].split()[0]
        if self.slow in asked and "context:" not in asked:
            await asyncio.wait_for(self.go.wait(), 60)
        elif "context:" in asked:
            self.second_hops.add(name)
            if len(self.second_hops) == self.waiting_for:
                self.go.set()
        return await super().complete(request)


def test_no_question_waits_for_another_one(tmp_path, replay, formatter):
    sample(tmp_path / "whole", replay, formatter)
    with Store(tmp_path / "whole", read_only=True) as store:
        two_hops = [q.text.split()[-1] for q in questions() if len(store.visits("fake-policy", q.id)) == 2]
    slow = two_hops[0]
    # with room for two questions, all others pass the slow one by, or the policy would wait for a minute and fail
    policy = Straggling(f"number {slow}", len(two_hops) - 1)
    sample(tmp_path / "db", replay, formatter, policy, concurrency=2)
    assert content(tmp_path / "db") == content(tmp_path / "whole")


def test_a_sample_is_committed_though_nothing_comes_after_it(tmp_path, replay, formatter):
    class Late(FakePolicy):
        n_committed = 0

        async def complete(self, request):
            if len(self.requests) == 20:
                for _ in range(500):
                    await asyncio.sleep(0.01)
                    with Store(tmp_path / "db", read_only=True) as store:
                        self.n_committed = store.counts()["samples"]
                    if self.n_committed >= 2 * (20 - 2):
                        break
            return await super().complete(request)

    policy = Late()
    sample(tmp_path / "db", replay, formatter, policy, concurrency=1)
    # one question at a time and two prompts a state: all but the samples of the state that waits
    assert policy.n_committed >= 2 * (20 - 2)
