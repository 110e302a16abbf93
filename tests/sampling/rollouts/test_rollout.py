"""Rolling a program out, one completion a step."""

import asyncio

import dspy
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
        done = []
        rollouts = await runner.run(questions(n), on_done=done.append, concurrency=5)
        searches.close()
        return rollouts, done

    return asyncio.run(main())


def test_every_question_ends_with_a_hop_a_step(replay, formatter):
    rollouts, done = roll(replay, formatter, FakePolicy())
    assert [r.question_id for r in rollouts] == [q.id for q in questions()]
    assert len(done) == 12
    for rollout in rollouts:
        assert rollout.finished
        assert len(rollout.hops) == 2
        first, second = rollout.hops
        assert first.inputs["context"] == []
        assert second.inputs["context"] == [f"{p.title} | {p.text}" for p in first.ranking]
        assert {p.doc_id for p in first.ranking} <= {p.doc_id for p in second.ranking}
        assert rollout.prediction.doc_ids == [p.doc_id for p in rollout.ranking]
        assert second.messages[-1]["content"].startswith("question: what follows")


def test_greedy_rollouts_do_not_depend_on_the_seed_and_sampled_ones_do(replay, formatter):
    greedy = [
        [[h.completion for h in r.hops] for r in roll(replay, formatter, FakePolicy(), seed=s)[0]] for s in (0, 1)
    ]
    assert greedy[0] == greedy[1]
    sampled = [
        [[h.completion for h in r.hops] for r in roll(replay, formatter, FakePolicy(), seed=s, temperature=1.0)[0]]
        for s in (0, 0, 1)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_an_outage_is_a_failure_and_the_others_go_on(replay, formatter):
    policy = FakePolicy(fail=lambda request: "number 3" in request.messages[-1]["content"])
    rollouts, _ = roll(replay, formatter, policy)
    failed = [r for r in rollouts if not r.finished]
    assert [(r.question_id, r.failure.kind, r.hops) for r in failed] == [("q03", "policy", ())]


def test_a_retriever_away_is_a_failure_not_an_empty_ranking(replay, formatter):
    rollouts, _ = roll(replay, formatter, FakePolicy(), FakeRetriever(broken=["alpha"]))
    kinds = {r.failure.kind for r in rollouts if r.failure}
    assert kinds == {"retrieval"}


def test_a_completion_that_does_not_parse_ends_the_rollout_there(replay, formatter):
    rollouts, _ = roll(replay, formatter, FakePolicy(junk=0.5))
    broken = [r for r in rollouts if r.failure]
    assert broken
    for rollout in broken:
        assert rollout.failure.kind == "parse"
        assert rollout.hops[-1].outputs is None
        before = rollout.hops[-2].ranking if len(rollout.hops) > 1 else ()
        assert rollout.ranking == before


def test_an_unexpected_error_is_not_swallowed(replay, formatter):
    def crash(request):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        roll(replay, formatter, FakePolicy(fail=crash))


def test_program_that_does_not_end_is_a_failure():
    class Endless(dspy.Module):
        def __init__(self):
            super().__init__()
            self.ask = dspy.Predict("question -> query")

        def forward(self, question):
            while True:
                self.ask(question=question)

    program = Endless()
    rollouts, _ = roll(replay := Replay(program, CompactAdapter()), Formatter(replay), FakePolicy(), n=1)
    assert rollouts[0].failure.kind == "program"
    assert "more than 64 completions" in rollouts[0].failure.message
