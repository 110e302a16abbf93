"""What leret sends is what the DSPy program would send, under every adapter."""

import asyncio
from pathlib import Path

import dspy
import pytest
from dspy import lm15

from leret.config.sampling import AdapterSettings
from leret.core.errors import RunError
from leret.core.types import Passage
from leret.programs.adapters import make_adapter
from leret.programs.load import load_program
from leret.programs.prompts import ZERO_SHOT, Formatter, Prompt
from leret.retrieval.base import Retriever

ROOT = Path(__file__).parents[2]
DEMO = {"question": "Who wrote Mara?", "context": ["Mara | A novel."], "query": "author of Mara"}


class Shelf:
    digest = "shelf"

    def search(self, queries, k):
        return [(Passage("d1", "Silent Harbor", "A film by Ann Vale.", 1.0),) for _ in queries]


class Fixed:
    """An engine that always says the same."""

    def __init__(self, text):
        self.text = text

    def complete(self, request):
        usage = lm15.Usage(input_tokens=0, output_tokens=0, total_tokens=0)
        message = lm15.Message.assistant([lm15.TextPart(self.text)])
        return lm15.Response(id=None, model="fixed", message=message, finish_reason="stop", usage=usage)


@pytest.mark.parametrize("kind", ["chat", "json", "xml", "compact"])
@pytest.mark.parametrize("reason", [False, True])
@pytest.mark.parametrize("prompt", [ZERO_SHOT, Prompt("1", {"write_query": [DEMO]}, {"write_query": "Be brief."})])
def test_messages_equal_those_of_the_program_itself(kind, reason, prompt):
    program = load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": 2, "reason": reason})
    (name, predictor), *_ = program.named_predictors()
    demos, instructions = {name: [DEMO]}, {name: "Be brief."}  # under the name that this predictor has
    prompt = Prompt(prompt.name, demos if prompt.demos else {}, instructions if prompt.instructions else {})
    adapter = make_adapter(AdapterSettings(kind=kind))
    formatter = Formatter(program, adapter)
    outputs = {"reasoning": "I see.", "query": "silent harbor"} if reason else {"query": "silent harbor"}
    completion = formatter.completion(name, outputs)
    expected = [
        formatter.messages(name, {"question": "Who?", "context": context}, prompt)
        for context in ([], ["Silent Harbor | A film by Ann Vale."])
    ]

    predictor.demos = list(prompt.demos.get(name, ()))
    predictor.signature = formatter.signature(name, prompt)
    lm = dspy.LM("fixed/answer", engine=Fixed(completion), cache=False)
    assert isinstance(Shelf(), Retriever)
    with dspy.context(lm=lm, adapter=adapter, rm=Shelf()):
        program(question="Who?")
    assert [tuple(call["messages"]) for call in lm.history] == expected
    assert formatter.parse(name, completion) == outputs


@pytest.mark.parametrize("kind", ["chat", "json", "xml"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_adapter_sends_a_served_lm_messages_alone(kind, asynchronous, monkeypatch):
    """The sampler sends no ``response_format``; neither do the bank, evaluation and leret.load through a dspy.LM."""
    lm = dspy.LM("openai/gpt-4o", api_key="none", cache=False)
    assert "response_format" in lm.supported_params
    seen = []

    def sent(self, prompt=None, messages=None, **kwargs):
        seen.append(kwargs)
        return [Formatter(program, adapter).completion("ask", {"query": "silent harbor"})]

    async def sent_later(self, prompt=None, messages=None, **kwargs):
        return sent(self, prompt, messages, **kwargs)

    monkeypatch.setattr(dspy.LM, "__call__", sent)
    monkeypatch.setattr(dspy.LM, "acall", sent_later)
    adapter, program = make_adapter(AdapterSettings(kind=kind)), Asking()
    with dspy.context(lm=lm, adapter=adapter):
        found = asyncio.run(program.ask.acall(question="?")) if asynchronous else program.ask(question="?")
    assert found.query == "silent harbor"
    assert seen == [{}]


class Asking(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> query")


def test_a_completion_out_of_format_is_none():
    program = load_program(ROOT / "pipelines/multihop.py", "MultiHop", {})
    assert Formatter(program, make_adapter(AdapterSettings(kind="chat"))).parse("write_query", "hello") is None


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
