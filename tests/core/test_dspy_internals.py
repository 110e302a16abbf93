"""What leret expects of DSPy beyond its documented interface; a failure here names what a new version changed."""

import copy

import dspy
import pytest

from leret.core.dspy_internals import (
    PART_MARKER,
    AdapterParseError,
    EngineLM,
    is_turn_by_turn,
    last_message,
    lm15,
    messages_of,
    parse_value,
    replay_context,
    text_response,
    without_bookkeeping,
)

SIGNATURE = dspy.Signature("question -> answer")


class Asking(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict(SIGNATURE)

    def forward(self, question):
        return self.ask(question=question).answer


def echo(request):
    return text_response(request, messages_of(request)[-1]["content"].split()[-1], 3, 1)


def test_version_is_the_one_that_was_read():
    assert dspy.__version__.split(".")[:2] == ["3", "4"]


@pytest.mark.parametrize(
    "adapter", [dspy.ChatAdapter(), dspy.JSONAdapter(), dspy.XMLAdapter()], ids=lambda a: type(a).__name__
)
def test_only_the_last_message_depends_on_the_inputs(adapter):
    assert is_turn_by_turn(adapter, [])
    demos = [{"question": "a", "answer": "b"}]
    whole = adapter.format(SIGNATURE, demos, {"question": "who"})
    other = adapter.format(SIGNATURE, demos, {"question": "what"})
    assert whole[:-1] == other[:-1]
    assert whole[-1] == last_message(adapter, SIGNATURE, {"question": "who"})


def test_a_format_of_its_own_is_noticed():
    own = type("Own", (dspy.ChatAdapter,), {"format": lambda self, signature, demos, inputs: []})
    assert not is_turn_by_turn(own(), [])
    assert is_turn_by_turn(own(), [own])


def test_a_marker_splits_a_message():
    marked = '<<CUSTOM-TYPE-START-IDENTIFIER>>[{"type": "text", "text": "x"}]<<CUSTOM-TYPE-END-IDENTIFIER>>'
    assert PART_MARKER in marked
    assert not isinstance(dspy.ChatAdapter().format(SIGNATURE, [], {"question": marked})[-1]["content"], str)


def test_an_engine_of_a_function_gets_the_messages_and_gives_the_text():
    lm = EngineLM("echo", echo, temperature=0.5)
    assert lm("say hello") == ["hello"]
    assert copy.deepcopy(lm)("say hello") == ["hello"], "optimizers copy programs with their LM"


def test_messages_of_more_than_text_are_refused():
    request = lm15.Request(model="m", messages=(lm15.Message.user([lm15.TextPart("hi")]),), system="be brief")
    assert messages_of(request) == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})


def test_calls_without_bookkeeping_need_no_context(caplog):
    program = Asking()
    program.ask = lambda **inputs: dspy.Prediction(answer="x")
    assert without_bookkeeping(program)(question="?") == "x"
    assert not caplog.records, "DSPy warns where forward is called directly"
    own = type("Own", (Asking,), {"__call__": lambda self, question: "own"})
    assert without_bookkeeping(own())(question="?") == "own"


def test_predictors_are_replaced_by_name():
    program = Asking()
    program.map_named_predictors(lambda predictor: dspy.Predict("question -> other"))
    assert list(program.ask.signature.output_fields) == ["other"]


def test_settings_of_a_replay_hold_in_its_context_alone():
    adapter = dspy.XMLAdapter()
    context = replay_context(adapter)
    assert context.run(lambda: (dspy.settings.adapter, dspy.settings.trace)) == (adapter, None)
    assert dspy.settings.adapter is not adapter


def test_values_are_parsed_by_their_annotation():
    assert parse_value("[1, 2]", list[int]) == [1, 2]
    with pytest.raises(Exception, match="int"):
        parse_value("x", int)
    with pytest.raises(AdapterParseError):
        dspy.ChatAdapter().parse(SIGNATURE, "no field")
