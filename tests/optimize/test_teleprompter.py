import asyncio
from pathlib import Path

import dspy
import pytest
from dspy.utils.callback import BaseCallback

import leret
from leret.core.errors import LeretError
from tests.optimize.fakes import TRAIN, VAL, Writer, fake_lm, leret_of, recall, student_of
from tests.programs.test_pick import Placed

pytestmark = pytest.mark.usefixtures("world")


class Choosing(Writer):
    def __init__(self):
        super().__init__()
        self.pick = leret.Pick()

    def forward(self, question):
        made = super().forward(question)
        one = self.pick(made.found, question=question)
        return dspy.Prediction(found=[one.text])


def test_picks_are_answered_by_their_actors_and_not_trained(tmp_path, trainings):
    student, actor = student_of(Choosing), Placed(0)
    with pytest.raises(LeretError, match=r"the Pick pick has no actor.*pick\.actor = POLICY"):
        leret_of(tmp_path / "none").compile(student, trainset=TRAIN)
    student.pick.actor = actor
    best = leret_of(tmp_path / "run").compile(student, trainset=TRAIN, valset=VAL)
    assert actor.requests
    assert {request.temperature for request in actor.requests} == {0.0}
    prompts = [example.prompt for one in trainings for example in one["examples"]]
    assert prompts
    assert not any("candidates" in message["content"] for prompt in prompts for message in prompt)
    assert best.pick.actor is actor


def test_a_copy_of_the_student_gets_the_trained_lm(tmp_path, trainings):
    lm = fake_lm()
    student = student_of(lm=lm)
    best = leret_of(tmp_path).compile(student, trainset=TRAIN, valset=VAL)
    assert best is not student
    assert (student.write.lm is lm, lm.model) == (True, "leret/words")
    assert best._compiled is not getattr(student, "_compiled", False)
    assert best.run_dir == str(tmp_path)
    assert best.write.lm.model == f"leret/{trainings[0]['directory']}"
    assert best.write.lm.finetuning_model is None  # a next training starts from the new weights
    assert [one["algorithm"] for one in trainings] == ["sft", "ipo"]
    assert [one["start"] for one in trainings] == ["leret/demo", best.write.lm.model]
    assert [one["stage"] for one in best.candidate_programs] == ["sft", "ipo", "student"]  # the first of equals
    scores = [one["score"] for one in best.candidate_programs]
    assert scores[0] == scores[1] == 100.0 > scores[2]
    assert {"student", "sample", "sft", "ipo", "result"} <= {entry["stage"] for entry in best.trial_logs}
    best.write.lm = best.write.lm.copy(temperature=0.0)  # it samples, until its user says otherwise
    assert len(set(best(question=TRAIN[0].question).found) & set(TRAIN[0].gold)) == 2


def test_the_student_is_returned_where_nothing_was_better(trainings, heard):
    optimizer = leret_of(metric=lambda example, prediction, trace=None: 0.5)
    best = optimizer.compile(student_of(), trainset=TRAIN, valset=VAL)
    assert best.write.lm.model == "leret/words"
    assert best._compiled
    assert any("returning the student (50 on valset): no training improved it" in line for line in heard())


def test_in_a_notebook_dspys_callbacks_hear_compile_and_each_evaluation_and_no_replay(trainings):
    heard = []

    class Watch(BaseCallback):
        def on_compile_start(self, call_id, instance, inputs):
            heard.append(type(instance).__name__)

        def on_evaluate_start(self, call_id, instance, inputs):
            heard.append(inputs["callback_metadata"]["stage"])

        def on_adapter_parse_start(self, call_id, instance, inputs):
            heard.append("parse")

    async def cell():
        with dspy.context(callbacks=[Watch()]):
            return leret_of().compile(student_of(), trainset=TRAIN, valset=VAL)

    assert asyncio.run(cell())._compiled
    assert [name for name in heard if name != "parse"] == ["LeReT", "student", "sft", "ipo"]
    assert heard.count("parse") == 3 * 2 * len(VAL)  # of the evaluations alone


def test_one_optimizer_may_be_two_steps(tmp_path, trainings):
    keys = {"num_candidate_programs": 1, "max_bootstrapped_demos": 1, "max_labeled_demos": 0, "num_threads": 1}
    optimizers = {"p": dspy.BootstrapFewShotWithRandomSearch(metric=recall, **keys), "w": leret_of(tmp_path)}
    with dspy.context(lm=fake_lm()):
        both, data = dspy.BetterTogether(metric=recall, **optimizers), {"trainset": list(TRAIN), "valset": VAL}
        best = both.compile(student_of(), **data, strategy="w -> p -> w", seed=0)
    assert not best.flag_compilation_error_occurred
    assert [one["algorithm"] for one in trainings] == ["sft", "ipo"] * 2
    assert trainings[2]["start"] == f"leret/{trainings[0]['directory']}"  # the better one of the first step
    [other] = (tmp_path / "students").iterdir()
    assert Path(trainings[2]["directory"]).parent.parent == other
    n_trained = len(trainings)
    leret_of(tmp_path).compile(student_of(), trainset=TRAIN)  # the first student again
    assert Path(trainings[n_trained]["directory"]).parent.parent == tmp_path
