"""What leret sends is what the DSPy program would send, under every adapter."""

import asyncio

import dspy
import pytest

from leret.config.sampling import AdapterSettings
from leret.core.errors import RunError
from leret.programs.adapters import make_adapter
from leret.programs.prompts import ZERO_SHOT, Formatter, Prompt

DEMO = {"question": "Who wrote Mara?", "context": ["Mara | A novel."], "query": "author of Mara"}


@pytest.mark.parametrize("kind", ["chat", "json", "xml"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_adapter_sends_a_served_lm_messages_alone(kind, asynchronous, monkeypatch):
    """The sampler sends no ``response_format``; neither do the bank, evaluation and leret.load through a dspy.LM."""
    lm = dspy.LM("openai/gpt-4o", api_key="none", cache=False)
    assert "response_format" in lm.supported_params
    seen = []

    def sent(self, prompt=None, messages=None, **kwargs):
        seen.append(kwargs)
        return [Formatter(program, adapter).completion("write", {"query": "silent harbor"})]

    async def sent_later(self, prompt=None, messages=None, **kwargs):
        return sent(self, prompt, messages, **kwargs)

    monkeypatch.setattr(dspy.LM, "__call__", sent)
    monkeypatch.setattr(dspy.LM, "acall", sent_later)
    adapter, program = make_adapter(AdapterSettings(kind=kind)), Asks("question -> query")
    with dspy.context(lm=lm, adapter=adapter):
        found = asyncio.run(program.write.acall(question="?")) if asynchronous else program.write(question="?")
    assert found.query == "silent harbor"
    assert seen == [{}]


def test_a_completion_out_of_format_is_none():
    assert Formatter(Asks(), make_adapter(AdapterSettings(kind="chat"))).parse("write", "hello") is None


def test_a_prompt_is_read_back(tmp_path):
    prompt = Prompt("2", {"write_query": [DEMO]}, {"write_query": "Be brief."}, 0.5)
    prompt.save(tmp_path / "2.json")
    assert Prompt.load(tmp_path / "2.json") == prompt


def test_a_digest_ignores_the_name():
    assert Prompt("1", {"p": [DEMO]}).digest == Prompt("2", {"p": [DEMO]}).digest != ZERO_SHOT.digest


@pytest.mark.parametrize(
    "text", ["", "[]", '{"name": "1"}', "{", '{"name": "1", "demos": [{}]}', '{"name": "1", "demos": {"p": {}}}']
)
def test_what_is_not_a_prompt_is_refused(tmp_path, text):
    (tmp_path / "1.json").write_text(text)
    with pytest.raises(RunError, match=r"not a prompt.* a prompt file is .*\"demos\": \{PREDICTOR"):
        Prompt.load(tmp_path / "1.json")


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


STEP = {"question": "who", "context": ["a | b"], "hop": 0, "query": "find who"}
PROMPTS = (
    ZERO_SHOT,
    Prompt("1", {"write": [STEP]}),
    Prompt("2", {"write": [STEP, {"question": "what", "query": "it"}]}, {"write": "Say\nsomething else."}),
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
    formatter, before = Formatter(Asks(), Counting()), Counting.n
    for i in range(9):
        assert formatter.messages("write", INPUTS[i])[0]["content"] == f"message {before + i + 1}"


class Moody(dspy.ChatAdapter):
    """Its instructions depend on what was asked before."""

    n = 0

    def format_task_description(self, signature):
        self.n += 1
        return f"task {self.n}"


def test_a_beginning_that_changes_is_not_kept():
    formatter = Formatter(Asks(), Moody())
    told = [formatter.messages("write", inputs)[0]["content"].split()[-1] for inputs in INPUTS[:8]]
    assert told == [str(n) for n in range(1, 9)]


class Talk(dspy.Signature):
    """Go on."""

    history: dspy.History = dspy.InputField()
    question: str = dspy.InputField()
    query: str = dspy.OutputField()


TURNS = [{"question": f"q{i}", "query": f"a{i}"} for i in range(3)]
MARKED = '<<CUSTOM-TYPE-START-IDENTIFIER>>[{"type": "text", "text": "x"}]<<CUSTOM-TYPE-END-IDENTIFIER>>'


@pytest.mark.parametrize(
    ("signature", "asked"),
    [
        (Talk, [{"history": dspy.History(messages=TURNS[:n]), "question": "?"} for n in (1, 2, 3, 1, 2, 0, 1)]),
        (Write, [*INPUTS[:6], {"question": MARKED, "context": [], "hop": 0}, INPUTS[7]]),
    ],
    ids=["history", "marker"],
)
def test_what_dspy_lays_out_over_several_messages_is_left_to_it(signature, asked):
    adapter = make_adapter(AdapterSettings())
    formatter = Formatter(Asks(signature), adapter)
    for inputs in asked:
        assert formatter.messages("write", inputs) == tuple(adapter.format(signature, [], dict(inputs)))
