import asyncio

import dspy
import pytest

from leret.config.sampling import AdapterSettings
from leret.core.dspy_internals import AdapterParseError, EngineLM, messages_of, text_response
from leret.core.errors import ConfigError
from leret.programs.adapters import make_adapter
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay

WRITE_QUERY, PLAN = dspy.Signature("question -> query"), dspy.Signature("question -> queries: list[str], why")


def prefilled(kind, **keys):
    return make_adapter(AdapterSettings(kind=kind, prefill=True, **keys))


@pytest.mark.parametrize(
    ("kind", "beginnings", "completion", "end"),
    [
        ("chat", ["[[ ## query ## ]]\n", "[[ ## queries ## ]]\n"], "Oslo", "\n\n[[ ## completed ## ]]\n"),
        ("json", ['{\n  "query": "', '{\n  "queries":'], "Oslo", '"\n}'),
        ("xml", ["<query>\n", "<queries>\n"], "Oslo\n</query>", "\n</query>"),
        ("compact", ["query:", "queries:"], " Oslo", ""),
    ],
)
def test_a_request_ends_with_the_beginning_of_the_answer_and_a_completion_is_its_rest(
    kind, beginnings, completion, end
):
    adapter, plain, inputs = prefilled(kind), make_adapter(AdapterSettings(kind=kind)), {"question": "where?"}
    for signature, beginning in zip((WRITE_QUERY, PLAN), beginnings, strict=True):
        messages = adapter.format(signature, [], inputs)
        assert messages == [*plain.format(signature, [], inputs), {"role": "assistant", "content": beginning}]
        formatter = Formatter(Replay(dspy.Predict(signature), adapter))
        for _ in range(2):  # the second time, the quick way
            assert list(formatter.messages(formatter.need("self", inputs))) == messages
        assert formatter._heads
        assert isinstance(formatter.step(formatter.need("self", inputs), "").outputs, AdapterParseError)

    assert adapter.parse(WRITE_QUERY, completion) == {"query": "Oslo"}
    rows = adapter.format_finetune_data(WRITE_QUERY, [], inputs, {"query": "Oslo"})["messages"]
    assert [row["role"] for row in rows[-2:]] == ["assistant", "assistant"]
    answer = "".join(row["content"] for row in rows[-2:])
    assert answer == adapter.format_assistant_message_content(WRITE_QUERY, {"query": "Oslo"})
    assert answer.endswith(f"Oslo{end}")


@pytest.mark.parametrize(
    ("kind", "signature", "stop"),
    [
        ("compact", WRITE_QUERY, ("\n",)),
        ("compact", PLAN, ()),
        ("json", WRITE_QUERY, ('"}', '",', '"\n', "\n")),
        ("chat", WRITE_QUERY, ("[[ ## completed ## ]]",)),
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
        assert dspy.Predict(WRITE_QUERY)(question="where?").query == "Oslo"
        assert asyncio.run(dspy.Predict(WRITE_QUERY).acall(question="where?")).query == "Oslo"
    assert [request.config.stop for request in seen] == [("\n",)] * 2
    assert messages_of(seen[0])[-1] == {"role": "assistant", "content": "query:"}


def test_a_server_of_dspy_is_asked_to_continue_the_answer_without_native_tool_calls():
    lm = dspy.LM("openai/tiny", extra_body={"priority": 1})
    keys = prefilled("json")._with_ending(lm, {}, WRITE_QUERY)
    assert keys["extra_body"] == {"priority": 1, "continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(ConfigError, match=r"adapter\.prefill"):
        prefilled("chat", use_native_function_calling=True)
