import pytest

from leret.core.errors import LeretError, PolicyError
from leret.policies.base import Completion
from tests.optimize.fakes import TRAIN, VAL, Words, fake_lm, leret_of, student_of

pytestmark = pytest.mark.usefixtures("world")


def test_a_run_directory_of_something_else_is_refused(tmp_path, trainings):
    leret_of(tmp_path).compile(student_of(), trainset=TRAIN)
    with pytest.raises(LeretError, match="samples"):
        leret_of(tmp_path, samples=4).compile(student_of(), trainset=TRAIN)
    with pytest.raises(LeretError, match="trainset: its content"):
        leret_of(tmp_path).compile(student_of(), trainset=TRAIN[1:])


@pytest.mark.parametrize("where", ["policy", "metric"])
def test_an_outage_on_the_valset_is_raised_and_not_scored(where, trainings):
    policy, settings = Words("words"), {}
    if where == "policy":
        policy.fail = lambda request: request.temperature == 0
    else:
        settings["metric"] = lambda example, prediction, trace=None: prediction.nothing
    with pytest.raises((LeretError, AttributeError), match=r"away|nothing"):
        leret_of(**settings).compile(student_of(lm=fake_lm(policy=policy)), trainset=TRAIN, valset=VAL)


@pytest.mark.parametrize("algorithms", [["sft"], ["grpo"]])
def test_compile_ends_after_a_valset_on_which_nothing_parses(algorithms, monkeypatch):
    n_calls = []
    cut = Completion("", "length", 1, 0)
    monkeypatch.setattr(Words, "_one", lambda self, request, seed: n_calls.append(seed) or cut)
    with pytest.raises(PolicyError, match=r"all 6 examples failed to parse.*CompactAdapter.*max_tokens"):
        leret_of(algorithms=algorithms).compile(student_of(), trainset=TRAIN, valset=VAL)
    assert len(n_calls) <= len(VAL)
