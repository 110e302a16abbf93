import asyncio
import json
from functools import partial
from pathlib import Path

import dspy
import pytest
from dspy.utils.callback import BaseCallback

import leret
from leret.core.dspy_internals import EngineLM, messages_of, text_response
from leret.core.errors import LeretError, PolicyError
from leret.optimize import student, teleprompter
from leret.policies.base import Completion
from leret.programs.search import search_tool
from tests.optimize.fakes import TRAIN, VAL, Answering, Words, Writer, example, fake_lm, leret_of, recall, student_of
from tests.sampling.fakes import WORDS, FakePolicy

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def heard(caplog):
    dspy.enable_logging()
    log = student.logger
    log.addHandler(caplog.handler)
    caplog.set_level("INFO", logger=log.name)
    yield lambda: [record.getMessage() for record in caplog.records if record.name == log.name]
    log.removeHandler(caplog.handler)


class Choosing(Writer):
    def __init__(self, actor=None):
        super().__init__()
        self.pick = leret.Pick(actor=actor)

    def forward(self, question):
        made = super().forward(question)
        one = self.pick(made.found, question=question)
        return dspy.Prediction(found=[one.text])


class First(FakePolicy):
    def _one(self, request, seed):
        return Completion(request.choice.candidates[0].id, "stop", 0, 0, value=1.0)


def test_picks_are_answered_by_their_actors_and_not_trained(tmp_path, trainings):
    student, actor = student_of(Choosing), First()
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


def test_the_student_is_returned_where_nothing_was_better(monkeypatch, trainings, heard):
    monkeypatch.setattr(Words, "_one", FakePolicy._one)  # no policy is better than another
    optimizer = leret_of(metric=lambda example, prediction, trace=None: 0.5)
    best = optimizer.compile(student_of(), trainset=TRAIN, valset=VAL)
    assert best.write.lm.model == "leret/words"
    assert best._compiled
    assert any("returning the student (50 on valset): no training improved it" in line for line in heard())


def test_without_a_valset_the_last_result_is_returned_unscored(trainings, heard):
    best = leret_of(metric=partial(recall)).compile(student_of(), trainset=TRAIN)
    assert best.write.lm.model == f"leret/{trainings[-1]['directory']}"
    assert best.candidate_programs[0]["score"] is None
    assert any("no valset" in line for line in heard())


def test_every_distinct_lm_is_trained_once_on_its_own_predictors(trainings):
    one, two = fake_lm("one"), fake_lm("two")
    settings = {"reward": None, "algorithms": ["sft"], "metric": lambda example, p, trace=None: len(set(p.answer))}
    best = leret_of(**settings).compile(student_of(Answering, one, answer=two), trainset=TRAIN)
    assert len(trainings) == 2
    assert best.write.lm.model != best.answer.lm.model
    for training, has_context in zip(trainings, (False, True), strict=True):
        assert {"context:" in row.prompt[-1]["content"] for row in training["examples"]} == {has_context}


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


def test_keys_of_a_training_are_shared_or_of_one_algorithm(trainings):
    keys = {"max_length": 128, "ipo": {"beta": 0.2}}
    leret_of(train_kwargs=keys, seed=7).compile(student_of(), trainset=TRAIN)
    assert [(t["max_length"], t.get("beta"), t["seed"]) for t in trainings] == [(128, None, 7), (128, 0.2, 7)]


TITLED = [example(i, gold=[], gold_titles={WORDS[i % 6].title()}) for i in range(8)]


@pytest.mark.parametrize(
    ("reward", "trainset"),
    [("recall@2", TRAIN), (lambda example, outcome: len({*outcome.doc_ids} & {*example.gold}), TRAIN), ("ap", TITLED)],
)
def test_a_reward_is_a_name_or_a_function_of_example_and_outcome(reward, trainset, trainings):
    leret_of(reward=reward, metric=None).compile(student_of(), trainset=trainset)
    assert trainings[0]["examples"]


def test_equal_examples_are_one(trainings, heard):
    leret_of().compile(student_of(), trainset=[*TRAIN, TRAIN[0]])
    assert any("1 duplicate examples" in line for line in heard())


def test_compile_works_in_a_notebook(trainings):
    async def cell():
        return leret_of().compile(student_of(), trainset=TRAIN, valset=VAL)

    assert asyncio.run(cell())._compiled


def test_dspys_callbacks_hear_compile_and_each_evaluation_and_no_replay(trainings):
    heard = []

    class Watch(BaseCallback):
        def on_compile_start(self, call_id, instance, inputs):
            heard.append(type(instance).__name__)

        def on_evaluate_start(self, call_id, instance, inputs):
            heard.append(inputs["callback_metadata"]["stage"])

        def on_adapter_parse_start(self, call_id, instance, inputs):
            heard.append("parse")

    with dspy.context(callbacks=[Watch()]):
        leret_of().compile(student_of(), trainset=TRAIN, valset=VAL)
    assert [name for name in heard if name != "parse"] == ["LeReT", "student", "sft", "ipo"]
    assert heard.count("parse") == 3 * 2 * len(VAL)  # of the evaluations alone


def test_leret_is_a_direct_subclass_of_teleprompter():
    assert leret.LeReT in dspy.teleprompt.Teleprompter.__subclasses__()
    assert leret.LeReT in teleprompter.FinetuneTeleprompter.__subclasses__()


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


class Unnamed(Writer):
    def __init__(self):
        super().__init__()
        self.rows = search_tool(lambda query: [object()], name="rows")

    def forward(self, question):
        self.rows(self.write(question=question, context=[]).query)
        return dspy.Prediction(found=[])


class Broken(Writer):
    def forward(self, question):
        raise KeyError("before any completion")


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
    "a picker": (Writer, {"algorithms": ["pick"]}, "trains pickers"),
    "ids without name": (Unnamed, {}, "ids="),
    "crash before any": (Broken, {}, "before any completion"),
    "no completion parses": (lambda: student_of(lm=fake_lm(policy=Words("words", text=" "))), {}, "pars"),
    "no LM to train": (lambda: student_of(lm=EngineLM("other", print)), {}, "leret.LM"),
    "no weights": (lambda: student_of(lm=fake_lm(finetuning_model="leret/nowhere")), {}, "no local weights"),
    "temperature 0": (lambda: student_of(lm=fake_lm(temperature=0.0)), {}, "temperature 0"),
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


def test_the_demo_policy_is_sampled_trained_and_scored(tmp_path):
    student = student_of(lm=leret.LM("demo", max_tokens=8))
    settings = {"run_dir": tmp_path / "run", "train_kwargs": {"max_steps": 1, "device": "cpu", "max_length": 256}}
    settings["reward"] = lambda example, outcome: len(outcome.text)
    best = leret_of(**settings).compile(student, trainset=TRAIN[:4], valset=VAL[:2])
    assert len(best.candidate_programs) == 3
    models = {one["stage"]: one["program"].write.lm.model for one in best.candidate_programs}
    assert len(set(models.values())) == 3
    again = leret_of(**settings).compile(student, trainset=TRAIN[:4], valset=VAL[:2])
    assert {one["stage"]: one["program"].write.lm.model for one in again.candidate_programs} == models
    assert sum(entry.get("lm_calls", 0) for entry in again.trial_logs if entry["stage"] == "sample") == 0
