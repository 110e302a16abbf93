import ast
import asyncio
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dspy
import pytest
from dspy import lm15

from leret.core import dspy_internals
from leret.core.dspy_internals import messages_of, muted

SIGNATURE = dspy.Signature("question -> answer")


class Asking(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict(SIGNATURE)

    def forward(self, question):
        return self.ask(question=question).answer


def test_one_thread_at_a_time_parses(monkeypatch):
    at_work, most = [], []

    def parse(source):
        at_work.append(source)
        time.sleep(0.001)
        most.append(len(at_work))
        at_work.remove(source)

    monkeypatch.setattr(ast, "parse", parse)
    dspy_internals.parse_in_turns()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ast.parse, "abcd"))
    assert most == [1, 1, 1, 1]


def test_parts_of_tool_calls_are_text_and_images_are_refused():
    call, result = lm15.ToolCallPart("1", "look", {"query": "é"}), lm15.ToolResultPart("1", [lm15.TextPart("found")])
    messages = [lm15.Message.user("hi"), lm15.Message.assistant([call]), lm15.Message("tool", [result])]
    request = lm15.Request(model="m", messages=messages)
    texts = [(one["role"], one["content"]) for one in messages_of(request)]
    assert texts == [("user", "hi"), ("assistant", '{"name": "look", "args": {"query": "é"}}'), ("user", "found")]
    with pytest.raises(lm15.UnsupportedFeatureError, match="ImagePart"):
        messages_of(lm15.Request(model="m", messages=[lm15.Message("user", [lm15.ImagePart(url="http://a/b.png")])]))


def asking(**choice):
    call = lm15.ToolCallPart("1", "look", {"b": "é", "a": 1})
    result = lm15.ToolResultPart("1", [lm15.TextPart("found")], name="look")
    assistant = lm15.Message.assistant([lm15.TextPart("so"), call])
    return lm15.Request(
        model="m", messages=[lm15.Message.user("hi"), assistant, lm15.Message("tool", [result])],
        tools=[lm15.FunctionTool("look", "Look."), lm15.FunctionTool("stop")],
        config=lm15.Config(tool_choice=lm15.ToolChoice(**choice) if choice else None),
    )  # fmt: skip


def test_a_request_with_tools_has_native_tool_messages():
    first, assistant, result = messages_of(asking())
    tools = [one["function"] for one in json.loads(first.pop("tools"))]
    assert first == {"role": "user", "content": "hi"}
    assert [tools[0]["name"], tools[0]["description"], tools[1]["name"]] == ["look", "Look.", "stop"]
    function = {"name": "look", "arguments": '{"b": "é", "a": 1}'}  # as text: digests and stores keep the order
    assert assistant == {
        "role": "assistant", "content": "so", "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }  # fmt: skip
    assert result == {"role": "tool", "content": "found", "tool_call_id": "1", "name": "look"}


def test_a_forced_call_shows_only_its_tool():
    [tool] = json.loads(messages_of(asking(mode="required", allowed=("stop",)))[0]["tools"])
    assert tool["function"]["name"] == "stop"
    assert "tools" not in messages_of(asking(mode="none"))[0]
    with pytest.raises(lm15.UnsupportedFeatureError, match="remove parallel_tool_calls=False"):
        messages_of(asking(parallel=False))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_adapter_proxy_gets_every_call(asynchronous):
    """The arguments by name, the module at work in ``caller_modules``, and the run, in DSPy's threads as well."""
    seen = []

    def answer(adapter, lm, *arguments):
        seen.append((*arguments, dspy_internals.calling_predictor(), dspy_internals.carried_run()))
        return [{"answer": "x"}]

    program, inner, run = Asking(), dspy.XMLAdapter(), object()
    proxy = dspy_internals.AdapterProxy(inner, answer)
    assert isinstance(proxy, dspy.XMLAdapter)
    assert proxy.format_user_message_content.__self__ is inner
    lm = dspy_internals.EngineLM("none", lambda request: None)
    context = dspy_internals.carrying(run, {**dspy_internals.QUIET, "adapter": proxy, "lm": lm})
    if asynchronous:
        found = [context.run(asyncio.run, program.ask.acall(question="?")).answer]
    else:
        pairs = [(program, {"question": "?"})] * 2
        found = context.run(dspy.Parallel(num_threads=2, disable_progress_bar=True), pairs)
    assert set(found) == {"x"}
    assert seen == [({}, SIGNATURE, [], {"question": "?"}, program.ask, run)] * len(found)


@pytest.mark.parametrize("outputs", [[{"answer": "a"}], [{"answer": "a"}, {"answer": ["b"]}], []])
def test_prediction_equals_from_completions(outputs):
    own, stock = dspy_internals.prediction_of(outputs, SIGNATURE), dspy.Prediction.from_completions(outputs, SIGNATURE)
    assert vars(own.completions) == vars(stock.completions)
    assert {**vars(own), "_completions": None} == {**vars(stock), "_completions": None}


def test_unparsed_completion_is_one_request():
    adapter, asked = dspy.ChatAdapter(), []

    def answer(request):
        asked.append(request)
        return dspy_internals.text_response(request, "no field")

    settings = dspy.context(lm=dspy_internals.EngineLM("bad", answer), adapter=dspy_internals.one_call(adapter))
    with settings, pytest.raises(dspy_internals.AdapterParseError):
        dspy.Predict(SIGNATURE)(question="?")
    assert (len(asked), adapter.use_json_adapter_fallback) == (1, True)


def test_muted_blocks_of_two_threads_may_overlap(capsys):
    begun, left, before = threading.Event(), threading.Event(), sys.stdout

    def second():
        print("before")
        with muted():
            begun.set()
            left.wait(5)
            print("theirs")

    other = threading.Thread(target=second)
    with muted():
        other.start()
        begun.wait(5)
        print("mine")
    print("after")
    left.set()
    other.join()
    assert (sys.stdout, capsys.readouterr().out) == (before, "before\nafter\n")
