"""An LM that answers from what a policy wrote before."""

import dspy

from leret.programs.adapters import CompactAdapter
from leret.programs.search import Search
from leret.sampling.bank.lm import memory_of, remembering
from tests.sampling.fakes import FakePolicy, FakeRetriever, questions
from tests.sampling.test_bank import Scripted
from tests.sampling.test_rollout import roll


def test_a_program_repeats_the_rollout_it_remembers(program, replay, formatter):
    rollouts, _ = roll(replay, formatter, FakePolicy(), temperature=1.0)
    lm = remembering(memory_of(rollouts), lambda: None)
    fresh = replay.program.deepcopy()
    for predictor in fresh.predictors():
        del predictor.forward  # the replay's
    for _, search in fresh.named_sub_modules(type_=Search):
        search.retriever = FakeRetriever()
    with dspy.context(lm=lm, adapter=CompactAdapter()):
        for question, rollout in zip(questions(), rollouts, strict=True):
            assert fresh(question=question.text).doc_ids == [p.doc_id for p in rollout.ranking]


def test_a_prompt_that_is_not_known_is_asked_with_the_same_settings():
    seen = []

    class Noting(Scripted):
        def complete(self, request):
            seen.append((request.config.temperature, request.config.max_tokens))
            return super().complete(request)

    def other():
        return dspy.LM("scripted/lm", engine=Noting("asked"), cache=False, num_retries=0)

    lm = remembering({}, other, temperature=0.7, max_tokens=9)
    assert lm("what number 1") == ["asked"]
    assert seen == [(0.7, 9)]
