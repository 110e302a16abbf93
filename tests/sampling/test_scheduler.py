import asyncio
from contextlib import closing

from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.rollouts.actors import Role, SamplingPlan
from leret.rollouts.states import StateSampler
from leret.sampling.scheduler import Scheduler
from leret.sampling.store.store import Store
from tests.sampling.fakes import FakePolicy, FakeRetriever, questions

FEW = Prompt("1", {"write_query": [{"question": "who", "context": [], "query": "find who"}]})


async def accept(task, steps, results):
    pass


def sample(path, replay, formatter, policy=None, retriever=None, n=12, concurrency=5, max_error_rate=1.0):
    role = Role(policy or FakePolicy())
    plan = SamplingPlan((ZERO_SHOT, FEW), 2, 7, 1.0, 1.0, 8, role=lambda need: role)
    with Store(path) as store, closing(SearchBatcher(retriever or FakeRetriever())) as searches:
        runner = ProgramRunner(replay, formatter, searches)
        scheduler = Scheduler(runner, StateSampler(runner, store, plan), store, 7, max_error_rate, 1.0, accept)
        return asyncio.run(scheduler.run(questions(n), concurrency))


def content(path):
    with Store(path, read_only=True) as store:
        return list(store.groups()), [store.visits("fake-policy", q.id) for q in questions()]


def test_no_question_waits_for_another_one(tmp_path, replay, formatter):
    class Straggling(FakePolicy):
        async def complete(self, request):
            asked = request.messages[-1]["content"]
            async with asyncio.timeout(60):
                while "number 5" in asked and "context:" not in asked and len(self.requests) < n_others:
                    await asyncio.sleep(0.01)
            return await super().complete(request)

    whole = FakePolicy()
    sample(tmp_path / "whole", replay, formatter, whole)
    n_others = sum("number 5" not in request.messages[-1]["content"] for request in whole.requests)
    sample(tmp_path / "db", replay, formatter, Straggling(), concurrency=2)  # room for two questions
    assert content(tmp_path / "db") == content(tmp_path / "whole")
