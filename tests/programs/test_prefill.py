import asyncio

import dspy
import pytest

from leret.config.sampling import AdapterSettings
from leret.core.dspy_internals import AdapterParseError, EngineLM, messages_of, text_response
from leret.core.errors import ConfigError
from leret.programs.adapters import make_adapter
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay


class WriteQuery(dspy.Signature):
    """Write a query."""

    question: str = dspy.InputField()
    query: str = dspy.OutputField()


class Plan(dspy.Signature):
    """Plan searches."""

    question: str = dspy.InputField()
    queries: list[str] = dspy.OutputField()
    why: str = dspy.OutputField()


BEGINNINGS = {
    "chat": ("[[ ## query ## ]]\n", "[[ ## queries ## ]]\n"),
    "json": ('{\n  "query": "', '{\n  "queries":'),
    "xml": ("<query>\n", "<queries>\n"),
    "compact": ("query:", "queries:"),
}
ENDS = {"chat": "\n\n[[ ## completed ## ]]\n", "json": '"\n}', "xml": "\n</query>", "compact": ""}
COMPLETIONS = {"chat": "Oslo", "json": "Oslo", "xml": "Oslo\n</query>", "compact": " Oslo"}


def prefilled(kind, **keys):
    return make_adapter(AdapterSettings(kind=kind, prefill=True, **keys))


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_a_prefilled_request_ends_with_the_beginning_of_the_answer(kind):
    adapter, plain = prefilled(kind), make_adapter(AdapterSettings(kind=kind))
    for signature, beginning in zip((WriteQuery, Plan), BEGINNINGS[kind], strict=True):
        *before, last = adapter.format(signature, [], {"question": "where?"})
        assert last == {"role": "assistant", "content": beginning}
        assert before == plain.format(signature, [], {"question": "where?"})


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_a_completion_is_the_text_after_the_beginning(kind):
    adapter = prefilled(kind)
    assert adapter.parse(WriteQuery, COMPLETIONS[kind]) == {"query": "Oslo"}
    rows = adapter.format_finetune_data(WriteQuery, [], {"question": "where?"}, {"query": "Oslo"})["messages"]
    assert [row["role"] for row in rows[-2:]] == ["assistant", "assistant"]
    answer = "".join(row["content"] for row in rows[-2:])
    assert answer == adapter.format_assistant_message_content(WriteQuery, {"query": "Oslo"})
    assert answer.endswith(f"Oslo{ENDS[kind]}")


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_quick_messages_equal_those_of_the_adapter(kind):
    program = dspy.Predict(WriteQuery)
    formatter = Formatter(Replay(program, prefilled(kind)))
    for number in range(2):
        inputs = {"question": f"where is {number}?"}
        messages = formatter.messages(formatter.need("self", inputs))
        assert list(messages) == formatter.adapter.format(WriteQuery, [], inputs)
    assert formatter._heads
    assert isinstance(formatter.step(formatter.need("self", inputs), "").outputs, AdapterParseError)


@pytest.mark.parametrize(
    ("kind", "signature", "stop"),
    [
        ("compact", WriteQuery, ("\n",)),
        ("compact", Plan, ()),
        ("json", WriteQuery, ('"}', '",', '"\n', "\n")),
        ("json", Plan, ()),
        ("chat", WriteQuery, ("[[ ## completed ## ]]",)),
    ],
)
def test_stop_strings_end_the_answer(kind, signature, stop):
    adapter = prefilled(kind)
    formatter = Formatter(Replay(dspy.Predict(signature), adapter))
    assert formatter.need("self", {"question": "where?"}).stop == stop
    assert adapter.stop(signature) == stop


def test_an_lm_of_dspy_gets_the_stop_strings():
    seen = []

    def answer(request):
        seen.append(request)
        return text_response(request, " Oslo")

    with dspy.context(lm=EngineLM("fake", answer), adapter=prefilled("compact")):
        assert dspy.Predict(WriteQuery)(question="where?").query == "Oslo"
        assert asyncio.run(dspy.Predict(WriteQuery).acall(question="where?")).query == "Oslo"
    assert [request.config.stop for request in seen] == [("\n",)] * 2
    assert messages_of(seen[0])[-1] == {"role": "assistant", "content": "query:"}


def test_a_server_of_dspy_is_asked_to_continue_the_answer():
    lm = dspy.LM("openai/tiny", extra_body={"priority": 1})
    keys = prefilled("json")._with_ending(lm, {}, WriteQuery)
    assert keys["extra_body"] == {"priority": 1, "continue_final_message": True, "add_generation_prompt": False}


def test_native_tool_calls_have_no_beginning():
    with pytest.raises(ConfigError, match=r"adapter\.prefill"):
        prefilled("chat", use_native_function_calling=True)
