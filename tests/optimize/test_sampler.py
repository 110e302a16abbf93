import pytest

from leret.core.dspy_internals import EngineLM, text_response
from leret.core.errors import LeretError, PolicyError
from tests.optimize.fakes import TRAIN, VAL, Answering, Words, fake_lm, leret_of, student_of

pytestmark = pytest.mark.usefixtures("world")


def test_without_metric_and_valset_the_last_result_is_returned_and_what_was_left_out_noted(trainings, heard):
    best = leret_of(metric=None).compile(student_of(Answering), trainset=[*TRAIN, TRAIN[0]])
    assert best.write.lm.model == f"leret/{trainings[-1]['directory']}"
    assert best.candidate_programs[0]["score"] is None
    for note in ("1 duplicate examples", "answer is not sampled", "no valset"):
        assert any(note in line for line in heard())


def test_prompts_are_bootstrapped_once_and_distilled_beside_another_lm(tmp_path, trainings):
    first, second = Words("words"), Words("words")
    other = EngineLM("other", lambda request: text_response(request, "fixed"))
    for policy in (first, second):
        student = student_of(Answering, fake_lm(policy=policy), answer=other)
        best = leret_of(tmp_path, prompts=3).compile(student, trainset=TRAIN)
    assert best.answer.lm is other
    assert best.write.lm.model == f"leret/{trainings[-1]['directory']}"
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


def test_max_lm_calls_is_a_hard_bound(trainings, heard):
    policy = Words("words")
    best = leret_of(max_lm_calls=90).compile(student_of(lm=fake_lm(policy=policy)), trainset=TRAIN, valset=VAL)
    calls = sum(entry.get("lm_calls", 0) for entry in best.trial_logs)
    assert sum(len(request.seeds) for request in policy.requests) <= calls <= 90
    assert any("max_lm_calls=90 is reached" in line for line in heard())
    assert len(best.candidate_programs) == 3  # what was kept for the valset was enough
