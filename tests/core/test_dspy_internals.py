"""What leret expects of DSPy beyond its documented interface; a failure here names what a new version changed.

Adapters with a format of their own, and messages that DSPy splits, are in tests/programs/test_prompts.py.
"""

import copy

import dspy
import pytest

from leret.core import dspy_internals
from leret.core.dspy_internals import is_turn_by_turn, messages_of, parse_value, without_bookkeeping

SIGNATURE = dspy.Signature("question -> answer")


class Asking(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict(SIGNATURE)

    def forward(self, question):
        return self.ask(question=question).answer


def test_version_is_the_one_that_was_read():
    assert dspy.__version__.startswith("3.4.")


@pytest.mark.parametrize("kind", [dspy.ChatAdapter, dspy.JSONAdapter, dspy.XMLAdapter])
def test_only_the_last_message_depends_on_the_inputs(kind):
    adapter, demos = kind(), [{"question": "a", "answer": "b"}]
    assert is_turn_by_turn(adapter, [])
    *before, last = adapter.format(SIGNATURE, demos, {"question": "who"})
    assert before == adapter.format(SIGNATURE, demos, {"question": "what"})[:-1]
    assert last == dspy_internals.last_message(adapter, SIGNATURE, {"question": "who"})


def test_an_engine_of_a_function_gets_the_messages_and_gives_the_text():
    def echo(request):
        return dspy_internals.text_response(request, messages_of(request)[-1]["content"].split()[-1], 3, 1)

    lm = dspy_internals.EngineLM("echo", echo, temperature=0.5)
    assert lm("say hello") == ["hello"]
    assert copy.deepcopy(lm)("say hello") == ["hello"], "optimizers copy programs with their LM"


def test_calls_without_bookkeeping_need_no_context(caplog):
    program = Asking()
    program.ask = lambda **inputs: dspy.Prediction(answer="x")
    assert without_bookkeeping(program)(question="?") == "x"
    assert not caplog.records, "DSPy warns where forward is called directly"
    own = type("Own", (Asking,), {"__call__": lambda self, question: "own"})
    assert without_bookkeeping(own())(question="?") == "own"


def test_settings_of_a_replay_hold_in_its_context_alone():
    adapter = dspy.XMLAdapter()
    context = dspy_internals.replay_context(adapter)
    assert context.run(lambda: (dspy.settings.adapter, dspy.settings.trace)) == (adapter, None)
    assert dspy.settings.adapter is not adapter


def test_values_are_parsed_by_their_annotation():
    assert parse_value("[1, 2]", list[int]) == [1, 2]
    with pytest.raises(Exception, match="int"):
        parse_value("x", int)
    with pytest.raises(dspy_internals.AdapterParseError):
        dspy.ChatAdapter().parse(SIGNATURE, "no field")
