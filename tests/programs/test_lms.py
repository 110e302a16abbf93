from pathlib import Path

import dspy
import pytest

from leret.core.dspy_internals import EngineLM, messages_of, text_response
from leret.programs.adapters import CompactAdapter
from leret.sampling.store.store import Store
from tests.optimize.fakes import TRAIN, Words, Writer, fake_lm, fake_training, leret_of, student_of
from tests.sampling.fakes import FakeRetriever

STRONG = []


@pytest.fixture(autouse=True)
def world(monkeypatch):
    fake_training(monkeypatch)
    asked = []

    def answer(request):
        asked.append(messages_of(request))
        return text_response(request, "beta")

    STRONG[:] = [EngineLM("strong", answer)]
    with dspy.context(adapter=CompactAdapter(), rm=FakeRetriever(), lm=None):
        yield asked
    STRONG.clear()


class Noting(Writer):
    def __init__(self, how="attribute"):
        super().__init__()
        self.note, self.how = dspy.Predict("question -> note"), how
        self.strong = None if how == "of the predictor" else STRONG[0]

    def ask(self, question):
        match self.how:
            case "attribute":
                return self.note(question=question, lm=self.strong).note
            case "direct":
                return self.strong(f"a note on {question}")[0]
            case "of the predictor":
                return self.note.lm(f"a note on {question}")[0]

    def forward(self, question):
        note = self.ask(question)
        found = self.search(self.write(question=f"{question} {note}", context=[]).query)
        return dspy.Prediction(found=found.doc_ids)


@pytest.mark.parametrize("how", ["attribute", "direct", "of the predictor"])
def test_a_call_is_answered_by_the_lm_that_dspy_asks(how, world, tmp_path):
    policy, lms = Words("words"), {"note": STRONG[0]} if how == "of the predictor" else {}
    student_of(lambda: Noting(how), **lms)(question=TRAIN[0].question)
    assert len(world) == 1
    [told] = world
    world.clear()
    student = student_of(lambda: Noting(how), fake_lm(policy=policy), **lms)
    best = leret_of(tmp_path, credit="final", algorithms=["sft"]).compile(student, trainset=TRAIN)
    assert world.count(told) >= 1
    assert not any("note" in str(request.messages[-1]["content"]).split() for request in policy.requests)
    [calls] = [entry["lm_calls"] for entry in best.trial_logs if entry["stage"] == "sample"]
    n_policy = sum(len(request.seeds) for request in policy.requests)
    assert calls == n_policy + len(world)
    with Store(Path(best.run_dir) / "rollouts.db", read_only=True) as store:
        assert {group.state.predictor for group in store.groups() if group.samples[0].is_sampled} == {"write"}
    assert len(world) <= 3 * len(TRAIN), "replays do not repeat the call"


class HalfWrapped(Writer):
    def forward(self, question):
        found = self.search(self.write(question=question, context=[]).query).doc_ids
        return dspy.Prediction(context=[*found, "unseen document"], found=found)


class Unlisted(Writer):
    def __init__(self):
        super().__init__()
        self.notes = {"first": [dspy.Predict("question -> note")]}

    def forward(self, question):
        self.notes["first"][0](question=question)
        return super().forward(question)


@pytest.mark.parametrize(
    ("kind", "fact", "more"),
    [(HalfWrapped, "no search seen", "returns context"),
     (Unlisted, "named_predictors() does not list it", "(StringSignature) is not sampled")],
)  # fmt: skip
def test_unseen_searches_and_unlisted_predictors_are_noted(kind, fact, more, tmp_path):
    with dspy.context(lm=STRONG[0]):
        best = leret_of(tmp_path).compile(student_of(kind), trainset=TRAIN)
    [note] = [entry["text"] for entry in best.trial_logs if fact in entry["text"]]
    assert more in note
