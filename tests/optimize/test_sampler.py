import dspy
import pytest

from leret.core.dspy_internals import EngineLM, messages_of, text_response
from leret.core.errors import LeretError, PolicyError
from tests.optimize.fakes import TRAIN, VAL, Answering, Words, Writer, fake_lm, leret_of, student_of
from tests.sampling.fakes import WORDS

pytestmark = pytest.mark.usefixtures("world")


def test_a_predictor_with_another_lm_is_answered_by_it_and_stays(trainings):
    asked = []

    def answer(request):
        asked.append(messages_of(request))
        return text_response(request, "a fixed answer")

    other = EngineLM("other", answer)
    best = leret_of().compile(student_of(Answering, answer=other), trainset=TRAIN, valset=VAL)
    assert best.answer.lm is other
    assert best.write.lm.model == f"leret/{trainings[0]['directory']}"
    assert asked
    assert not any("context:" in row.prompt[-1]["content"] for row in trainings[0]["examples"])  # the writer's alone


def test_a_predictor_without_search_and_metric_is_skipped_with_a_note(trainings, heard):
    leret_of(metric=None).compile(student_of(Answering), trainset=TRAIN)
    assert any("answer is not sampled" in line for line in heard())


class Blind(Writer):
    def forward(self, question):
        query = self.write(question=question, context=[]).query
        return dspy.Prediction(found=[word for word in WORDS if word in query])


def test_a_reward_that_no_search_earns_is_noted(trainings, heard):
    leret_of(reward="ap").compile(student_of(Blind), trainset=TRAIN)
    assert any("the reward is not used, only the metric" in line for line in heard())


@pytest.mark.parametrize("frozen", [False, True])
def test_prompts_are_bootstrapped_once_and_distilled(frozen, tmp_path, trainings):
    first, second = Words("words"), Words("words")
    for policy in (first, second):
        others = {"answer": EngineLM("other", lambda request: text_response(request, "fixed"))} if frozen else {}
        student = student_of(Answering if frozen else Writer, fake_lm(policy=policy), **others)
        leret_of(tmp_path, prompts=3).compile(student, trainset=TRAIN)
    demos = [request for request in first.requests if len(request.messages) > 1 and request.temperature]
    assert demos
    assert not second.requests
    assert {len(row.prompt) for row in trainings[0]["examples"]} == {1}


def test_after_a_crash_compile_goes_on(tmp_path, trainings):
    def away(request):
        return PolicyError("away") if len(broken.requests) > 24 else False

    broken, whole, again = Words("words"), Words("words"), Words("words")
    broken.fail = away
    with pytest.raises(LeretError):
        leret_of(tmp_path).compile(student_of(lm=fake_lm(policy=broken)), trainset=TRAIN)
    leret_of(tmp_path).compile(student_of(lm=fake_lm(policy=again)), trainset=TRAIN)
    leret_of(tmp_path / "whole").compile(student_of(lm=fake_lm(policy=whole)), trainset=TRAIN)
    assert len(again.requests) < len(whole.requests)
    assert trainings[0]["examples"] == trainings[2]["examples"]


@pytest.mark.parametrize("bound", [80, 90])
def test_max_lm_calls_is_a_hard_bound(bound, trainings, heard):
    policy = Words("words")
    best = leret_of(max_lm_calls=bound).compile(student_of(lm=fake_lm(policy=policy)), trainset=TRAIN, valset=VAL)
    calls = sum(entry.get("lm_calls", 0) for entry in best.trial_logs)
    assert sum(len(request.seeds) for request in policy.requests) <= calls <= bound
    assert any(f"max_lm_calls={bound} is reached" in line for line in heard())
    assert len(best.candidate_programs) == 3  # what was kept for the valset was enough
