import asyncio
from contextlib import closing

import pytest

from leret.core.types import LMCall, Task
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.actors import Decoding, PolicyActor
from leret.rollouts.walk import RolloutRunner
from tests.programs.conftest import Shelf, complete
from tests.programs.zoo import Agent, Tutorial, TwoPredictors
from tests.sampling.fakes import FakePolicy, FakeRetriever, questions


def roll_by(actor, replay, formatter, tasks, retriever=None):
    with closing(SearchBatcher(retriever or FakeRetriever())) as searches:
        runner = RolloutRunner(ProgramRunner(replay, formatter, searches), actor)
        return asyncio.run(runner.run(tasks, concurrency=5))


def roll(replay, formatter, policy, retriever=None, **settings):
    return roll_by(PolicyActor(policy, formatter, Decoding(8, **settings)), replay, formatter, questions(), retriever)


def test_a_failure_ends_its_rollout_there_and_the_others_go_on(replay, formatter):
    policy = FakePolicy(fail=lambda request: "number 3" in request.messages[-1]["content"])
    failed = [r for r in roll(replay, formatter, policy) if r.failure]
    assert [(r.task_id, r.failure.kind, r.steps, r.hops) for r in failed] == [("q03", "policy", (), ())]
    rollouts = roll(replay, formatter, FakePolicy(), FakeRetriever(broken=["alpha"]))
    assert {(r.failure.kind, len(r.steps) - len(r.hops)) for r in rollouts if r.failure} == {("retrieval", 1)}
    broken = [r for r in roll(replay, formatter, FakePolicy(junk=0.5)) if r.failure]
    assert {(r.failure.kind, r.steps[-1].outputs, len(r.steps) - len(r.hops)) for r in broken} == {("parse", None, 1)}
    with pytest.raises(ZeroDivisionError):  # an unexpected error is no outage
        roll(replay, formatter, FakePolicy(fail=lambda request: ZeroDivisionError()))


class AtOnce(TwoPredictors):
    def forward(self, question):
        query = self.write(question=question, context=[]).query
        return self.answer(question=question, context=self.search([query, f"{query} again"]).passages)


class OneByOne(TwoPredictors):
    def forward(self, question):
        found = self.search(question)
        query = self.write(question=question, context=found.passages).query
        for text in (query, f"{query} again"):
            found = self.search(text, found)
        return self.answer(question=question, context=found.passages)


class Completing:
    def __init__(self, formatter):
        self.formatter = formatter

    async def act(self, task, need, step, index):
        text = complete(need)
        return LMCall(need.predictor, need.inputs, (), text, None), self.formatter.step(need, text)


@pytest.mark.parametrize(
    ("kind", "n_steps", "before"),
    [
        (TwoPredictors, 3, [1, 2]),  # the answer is a step, and no hop
        (Tutorial, 4, [1, 3]),
        (Agent, 4, [1, 2, 3]),
        (AtOnce, 2, [1]),  # a list of queries is one search
        (OneByOne, 2, [0, 1, 1]),
    ],
)
def test_a_hop_is_a_search_whatever_number_of_steps_is_between(kind, n_steps, before):
    replay = Replay(kind())
    formatter, task = Formatter(replay), Task.question("q", "who is it?")
    (rollout,) = roll_by(Completing(formatter), replay, formatter, [task], Shelf())
    assert (rollout.failure, len(rollout.steps), [hop.n_steps for hop in rollout.hops]) == (None, n_steps, before)
    assert [len(hop.queries) for hop in rollout.hops] == [2 if kind is AtOnce else 1] * len(before)
    sizes = [len(hop.ranking) for hop in rollout.hops]
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(rollout.ranking)
