import dspy
import pytest

import leret
from leret.optimize import student
from tests.optimize.fakes import fake_training, student_of
from tests.policies.serving.conftest import fake_engine
from tests.sampling.fakes import FakeRetriever
from tests.tiny import tiny_policy

QUESTIONS = [f"who wrote the {word} book" for word in ("red", "green", "blue", "white", "black", "old")]


class Asking(dspy.Module):
    def __init__(self):
        super().__init__()
        self.write = dspy.Predict("question -> query")
        self.answer = dspy.Predict("question, query -> answer")

    def forward(self, question):
        return self.answer(question=question, query=self.write(question=question).query)


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPY_FINETUNEDIR", str(tmp_path / "finetuned"))


@pytest.fixture
def world():
    with dspy.context(adapter=leret.CompactAdapter(), rm=FakeRetriever(), lm=None):
        yield


@pytest.fixture
def trainings(monkeypatch):
    return fake_training(monkeypatch)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_RECORD", str(tmp_path / "record"))
    return fake_engine(tmp_path)


@pytest.fixture
def lm(weights):
    made = leret.LM(weights, temperature=1.0, max_tokens=6, device="cpu")
    with dspy.context(adapter=leret.CompactAdapter()):
        yield made
    made.kill()


@pytest.fixture
def program(lm):
    return student_of(Asking, lm)


@pytest.fixture
def trainset():
    return [dspy.Example(question=text, answer="paris").with_inputs("question") for text in QUESTIONS]


def greedy(lm, prompt="the red book"):
    [text] = lm(prompt, temperature=0.0)
    return text


@pytest.fixture
def heard(caplog):
    dspy.enable_logging()
    log = student.logger
    log.addHandler(caplog.handler)
    caplog.set_level("INFO", logger=log.name)
    yield lambda: [record.getMessage() for record in caplog.records if record.name == log.name]
    log.removeHandler(caplog.handler)
