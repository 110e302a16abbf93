import logging

import pytest

from leret.core.dspy_internals import one_truncation_warning
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


def test_a_completion_that_does_not_parse_scores_zero_on_the_valset(trainings, monkeypatch):
    real, empty = Words._one, Completion("", "stop", 1, 0)
    last = VAL[-1].question
    monkeypatch.setattr(
        Words, "_one", lambda self, r, seed: real(self, r, seed) if r.temperature or last in str(r.messages) else empty
    )
    best = leret_of().compile(student_of(), trainset=TRAIN, valset=VAL)
    assert [one["subscores"][:-1] for one in best.candidate_programs] == [[0.0] * (len(VAL) - 1)] * 3


@pytest.mark.parametrize("algorithms", [["sft"], ["grpo"]])
def test_compile_ends_after_a_valset_on_which_nothing_parses(algorithms, monkeypatch):
    n_calls = []
    cut = Completion("", "length", 1, 0)
    monkeypatch.setattr(Words, "_one", lambda self, request, seed: n_calls.append(seed) or cut)
    with pytest.raises(PolicyError, match=r"all 6 examples failed to parse.*CompactAdapter.*max_tokens"):
        leret_of(algorithms=algorithms).compile(student_of(), trainset=TRAIN, valset=VAL)
    assert len(n_calls) <= len(VAL)


def test_dspy_warns_once_about_truncated_responses(monkeypatch, caplog):
    log = logging.getLogger("dspy.clients.lm")
    monkeypatch.setattr(log, "level", logging.WARNING)
    monkeypatch.setattr(log, "disabled", False)
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    log.manager._clear_cache()
    with one_truncation_warning():
        for _ in range(3):
            log.warning("LM response was truncated; increase max_tokens or inspect history.")
        log.warning("another warning")
    assert len(caplog.records) == 2
    assert not log.filters
