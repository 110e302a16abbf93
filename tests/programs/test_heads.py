"""Messages whose beginning is kept are the adapter's own, byte for byte."""

import dspy
import pytest

from leret.config.sampling import AdapterSettings
from leret.programs.adapters import make_adapter
from leret.programs.prompts import ZERO_SHOT, Formatter, Heads, Prompt


class Write(dspy.Signature):
    """Write a query."""

    question: str = dspy.InputField()
    context: list[str] = dspy.InputField(desc="passages")
    hop: int = dspy.InputField()
    query: str = dspy.OutputField()


class Asks(dspy.Module):
    def __init__(self, signature=Write):
        super().__init__()
        self.write = dspy.Predict(signature)


DEMO = {"question": "who", "context": ["a | b"], "hop": 0, "query": "find who"}
PROMPTS = (
    ZERO_SHOT,
    Prompt("1", {"write": [DEMO]}),
    Prompt("2", {"write": [DEMO, {"question": "what", "query": "it"}]}, {"write": "Say\nsomething else."}),
)
INPUTS = [
    {"question": f"what is {i}?", "context": [f"t{j} | é\n{j}" for j in range(i % 4)], "hop": i} for i in range(12)
] + [{"question": "", "context": [], "hop": 0}, {"question": "[[ ## query ## ]]", "context": ["]]"], "hop": 1}]


@pytest.mark.parametrize("kind", ["chat", "json", "xml", "compact"])
def test_they_are_what_the_adapter_gives(kind):
    program, adapter = Asks(), make_adapter(AdapterSettings(kind=kind))
    formatter = Formatter(program, adapter)
    for inputs in INPUTS:
        last = formatter.messages("write", inputs)[-1]
        for prompt in PROMPTS:
            signature = formatter.signature("write", prompt)
            demos = [dict(demo) for demo in prompt.demos.get("write", [])]
            whole = tuple(adapter.format(signature, demos, dict(inputs)))
            assert formatter.messages("write", inputs, prompt) == whole
            assert formatter.messages("write", inputs, prompt, last) == whole


class Counting(dspy.ChatAdapter):
    """Numbers its messages: no message of it can be foretold."""

    n = 0

    def format(self, signature, demos, inputs):
        Counting.n += 1
        return [{"role": "user", "content": f"message {Counting.n}"}]


def test_an_adapter_with_a_format_of_its_own_is_asked_every_time():
    heads, before = Heads(Counting()), Counting.n
    for i in range(9):
        assert heads.messages("key", Write, (), INPUTS[i])[0]["content"] == f"message {before + i + 1}"


class Moody(dspy.ChatAdapter):
    """Its instructions depend on what was asked before."""

    n = 0

    def format_task_description(self, signature):
        self.n += 1
        return f"task {self.n}"


def test_a_beginning_that_changes_is_not_kept():
    heads = Heads(Moody())
    told = [heads.messages("key", Write, (), inputs)[0]["content"].split()[-1] for inputs in INPUTS[:8]]
    assert told == [str(n) for n in range(1, 9)]


def test_a_history_is_laid_out_in_full():
    class Talk(dspy.Signature):
        """Go on."""

        history: dspy.History = dspy.InputField()
        question: str = dspy.InputField()
        query: str = dspy.OutputField()

    adapter = make_adapter(AdapterSettings())
    heads = Heads(adapter)
    for n in (1, 2, 3, 1, 2, 0, 1):
        history = dspy.History(messages=[{"question": f"q{i}", "query": f"a{i}"} for i in range(n)])
        inputs = {"history": history, "question": "and then?"}
        assert heads.messages("key", Talk, (), inputs) == tuple(adapter.format(Talk, [], dict(inputs)))


def test_a_marker_of_dspys_in_a_passage_is_left_to_dspy():
    adapter = make_adapter(AdapterSettings())
    heads = Heads(adapter)
    marked = '<<CUSTOM-TYPE-START-IDENTIFIER>>[{"type": "text", "text": "x"}]<<CUSTOM-TYPE-END-IDENTIFIER>>'
    for inputs in [*INPUTS[:6], {"question": marked, "context": [], "hop": 0}, INPUTS[7]]:
        assert heads.messages("key", Write, (), inputs) == tuple(adapter.format(Write, [], dict(inputs)))
