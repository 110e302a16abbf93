"""Rolling a program out, one completion a step."""

import asyncio

import pytest

from leret.programs.adapters import CompactAdapter
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.sampling.rollouts.rollout import PolicyActor, RolloutRunner
from tests.sampling.fakes import FakePolicy, FakeRetriever, questions


def roll(replay, formatter, policy, retriever=None, n=12, **settings):
    async def main():
        searches = SearchBatcher(retriever or FakeRetriever())
        actor = PolicyActor(policy, formatter, max_tokens=8, **settings)
        runner = RolloutRunner(ProgramRunner(replay, formatter, searches), actor)
        try:
            return await runner.run(questions(n), concurrency=5)
        finally:
            searches.close()

    return asyncio.run(main())


def test_every_question_ends_with_a_hop_a_step(replay, formatter):
    rollouts = roll(replay, formatter, FakePolicy())
    assert [r.question_id for r in rollouts] == [q.id for q in questions()]
    for rollout in rollouts:
        assert rollout.finished
        first, second = rollout.hops
        assert first.inputs["context"] == []
        assert second.inputs["context"] == [f"{p.title} | {p.text}" for p in first.ranking]
        assert {p.doc_id for p in first.ranking} <= {p.doc_id for p in second.ranking}
        assert rollout.prediction.doc_ids == [p.doc_id for p in rollout.ranking]
        assert second.messages[-1]["content"].startswith("question: what follows")


def test_greedy_rollouts_do_not_depend_on_the_seed_and_sampled_ones_do(replay, formatter):
    def texts(seed, temperature):
        rollouts = roll(replay, formatter, FakePolicy(), seed=seed, temperature=temperature)
        return [[hop.completion for hop in rollout.hops] for rollout in rollouts]

    assert texts(0, 0.0) == texts(1, 0.0)
    assert texts(0, 1.0) == texts(0, 1.0) != texts(1, 1.0)


def test_an_outage_is_a_failure_and_the_others_go_on(replay, formatter):
    policy = FakePolicy(fail=lambda request: "number 3" in request.messages[-1]["content"])
    failed = [r for r in roll(replay, formatter, policy) if not r.finished]
    assert [(r.question_id, r.failure.kind, r.hops) for r in failed] == [("q03", "policy", ())]
    rollouts = roll(replay, formatter, FakePolicy(), FakeRetriever(broken=["alpha"]))
    assert {r.failure.kind for r in rollouts if r.failure} == {"retrieval"}
    with pytest.raises(ZeroDivisionError):  # an unexpected error is no outage
        roll(replay, formatter, FakePolicy(fail=lambda request: ZeroDivisionError()))


def test_a_completion_that_does_not_parse_ends_the_rollout_there(replay, formatter):
    broken = [r for r in roll(replay, formatter, FakePolicy(junk=0.5)) if r.failure]
    assert {rollout.failure.kind for rollout in broken} == {"parse"}
    for *before, last in (rollout.hops for rollout in broken):
        assert last.outputs is None
        assert last.ranking == (before[-1].ranking if before else ())


def test_a_program_that_does_not_end_is_a_failure(program, monkeypatch):
    def forward(self, question):
        while True:
            self.write_query(question=question, context=[])

    monkeypatch.setattr(type(program), "forward", forward)
    [rollout] = roll(Replay(program), Formatter(program, CompactAdapter()), FakePolicy(), n=1)
    assert rollout.failure.kind == "program"
    assert "more than 64 completions" in rollout.failure.message
