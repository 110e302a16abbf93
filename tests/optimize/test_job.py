import json

import dspy
import pytest

import leret
from leret.core.dspy_internals import EngineLM
from leret.core.errors import LeretError
from tests.optimize.fakes import TRAIN, VAL, Words, Writer, example, fake_lm, leret_of, student_of

pytestmark = pytest.mark.usefixtures("world")


def test_a_teacher_gives_prompts(trainings):
    policy = Words("words")
    teacher = student_of()
    teacher.write.demos = [dspy.Example(question="a demo", context=[], query="beta")]
    teacher.write.signature = teacher.write.signature.with_instructions("of the teacher")
    with dspy.context(adapter=leret.CompactAdapter(instructions=True)):
        leret_of().compile(student_of(lm=fake_lm(policy=policy)), trainset=TRAIN, teacher=[teacher])
    sent = [json.dumps(request.messages) for request in policy.requests]
    assert any("a demo" in text and "of the teacher" in text for text in sent)
    rows = [json.dumps(row.prompt) for row in trainings[0]["examples"]]
    assert not any("a demo" in text or "of the teacher" in text for text in rows)  # distilled into the student's prompt


def compiled():
    student = student_of()
    student._compiled = True
    return student


REFUSED = {
    "no predictor": (dspy.Module, {}, "Module has no predictor"),
    "no LM": (lambda: student_of(write=None), {}, r"these have none: \['write'\]"),
    "compiled": (compiled, {}, "should not be compiled"),
    "final without metric": (Writer, {"credit": "final", "metric": None}, "needs a metric"),
    "nothing to score by": (Writer, {"reward": None, "metric": None}, "reward"),
    "no such credit": (Writer, {"credit": "last"}, "credit='last'"),
    "distill": (Writer, {"algorithms": ["distill"]}, "distill"),
    "a picker": (Writer, {"algorithms": ["pick"]}, "trains pickers"),
    "no completion parses": (lambda: student_of(lm=fake_lm(policy=Words("words", text=" "))), {}, "pars"),
    "no LM to train": (lambda: student_of(lm=EngineLM("other", print)), {}, "leret.LM"),
    "no weights": (lambda: student_of(lm=fake_lm(finetuning_model="leret/nowhere")), {}, "no local weights"),
    "no pair": (lambda: student_of(lm=fake_lm(policy=Words("words", text="alpha"))), {}, "no training examples"),
    "valset in trainset": (Writer, {"valset": [*VAL, TRAIN[0]]}, "what follows alpha number 0"),
    "valset without metric": (Writer, {"valset": VAL, "metric": None}, "metric"),
    "valset beyond the bound": (Writer, {"valset": VAL, "max_lm_calls": 5}, "max_lm_calls=5 is reached"),
    "no example": (Writer, {"trainset": []}, "trainset is empty"),
    "other labels": (Writer, {"trainset": [*TRAIN, example(0, gold=["x"])]}, "differ only in their labels"),
}


@pytest.mark.parametrize(("make", "change", "says"), REFUSED.values(), ids=REFUSED)
def test_programs_that_cannot_be_optimized_are_refused(make, change, says, trainings):
    change = dict(change)
    data = {"trainset": change.pop("trainset", TRAIN), "valset": change.pop("valset", None)}
    with pytest.raises((LeretError, ValueError), match=says):
        leret_of(**change).compile(student_of(make) if isinstance(make, type) else make(), **data)
    assert not trainings
