import dspy
import pytest

from leret.config.sampling import AdapterSettings
from leret.core.dspy_internals import AdapterParseError
from leret.core.errors import RunError
from leret.core.types import Task
from leret.policies.tool_calls import write_calls
from leret.programs.adapters import make_adapter
from leret.programs.prompts import ZERO_SHOT, Formatter, Prompt
from leret.programs.replay import Replay

STEP = {"question": "who", "context": ["a | b"], "hop": 0, "query": "find who"}
PROMPTS = (
    ZERO_SHOT,
    Prompt("1", {"write": [STEP]}),
    Prompt("2", {"write": [STEP, {"question": "what", "query": "it"}]}, {"write": "Say\nsomething else."}, 0.5),
)
INPUTS = [
    {"question": f"what is {i}?", "context": [f"t{j} | é\n{j}" for j in range(i % 4)], "hop": i} for i in range(9)
] + [{"question": "", "context": [], "hop": 0}, {"question": "[[ ## query ## ]]", "context": ["]]"], "hop": 1}]


class Asks(dspy.Module):
    def __init__(self, signature="question, context: list[str], hop: int -> query"):
        super().__init__()
        self.write = dspy.Predict(signature)

    def forward(self, **inputs):
        return self.write(**inputs)


@pytest.mark.parametrize("kind", ["chat", "json", "xml"])
def test_an_adapter_sends_a_served_lm_messages_alone(kind, monkeypatch):
    lm = dspy.LM("openai/gpt-4o", api_key="none", cache=False)
    assert "response_format" in lm.supported_params
    adapter, program, seen = make_adapter(AdapterSettings(kind=kind)), Asks("question -> query"), []

    def sent(self, prompt=None, messages=None, **kwargs):
        seen.append(kwargs)
        return [Formatter(Replay(program.deepcopy(), adapter)).completion("write", {"query": "silent harbor"})]

    monkeypatch.setattr(dspy.LM, "__call__", sent)
    with dspy.context(lm=lm, adapter=adapter):
        assert program.write(question="?").query == "silent harbor"
    assert seen == [{}]


def test_a_prompt_is_read_back_and_its_digest_ignores_the_name(tmp_path):
    PROMPTS[2].save(tmp_path / "2.json")
    assert Prompt.load(tmp_path / "2.json") == PROMPTS[2]
    assert Prompt("1", {"p": [STEP]}).digest == Prompt("2", {"p": [STEP]}).digest != ZERO_SHOT.digest


@pytest.mark.parametrize("text", ["", "[]", '{"name": "1", "demos": {"p": {}}}'])
def test_what_is_not_a_prompt_is_refused(tmp_path, text):
    (tmp_path / "1.json").write_text(text)
    with pytest.raises(RunError, match=r"not a prompt.* the format is .*\"demos\": \{PREDICTOR"):
        Prompt.load(tmp_path / "1.json")


@pytest.mark.parametrize("kind", ["chat", "json", "xml", "compact"])
def test_messages_are_what_the_adapter_gives(kind):
    adapter = make_adapter(AdapterSettings(kind=kind))
    formatter = Formatter(Replay(Asks(), adapter))
    for inputs in INPUTS:
        alike = formatter.messages(formatter.need("write", inputs))
        for prompt in PROMPTS:
            demos = [dict(demo) for demo in prompt.demos.get("write", [])]
            whole = tuple(adapter.format(formatter.signature("write", prompt), demos, dict(inputs)))
            assert formatter.messages(formatter.need("write", inputs), prompt) == whole
            assert formatter.messages(formatter.need("write", inputs), prompt, alike) == whole


def look_up(query: str) -> str:
    """Find."""


class Tools(dspy.Module):
    def __init__(self, signature, **config):
        super().__init__()
        self.write, self.config = dspy.Predict(signature), config

    def forward(self, question):
        return self.write(question=question, tools=[dspy.Tool(look_up)], config=self.config)


CALLS, BOTH = (f"question, tools: list[dspy.Tool] -> {name}calls: dspy.ToolCalls" for name in ("", "thought, "))


@pytest.mark.parametrize(
    ("signature", "forced", "calls", "fault"),
    [
        (CALLS, False, [("look_up", '{"query": "a"}')], None),
        (CALLS, False, [], "no valid call of look_up"),
        (BOTH, False, [], None),
        (BOTH, True, [], "no valid call of look_up"),
        (BOTH, True, [("stop", "{}")], "no valid call of look_up"),
        (BOTH, True, [("look_up", '{"query": 1}')], "arguments of look_up are invalid: 1 is not of type 'string'"),
    ],
)
def test_a_required_tool_call_that_is_missing_is_unparsed(signature, forced, calls, fault):
    config = {"tool_choice": {"type": "function", "function": {"name": "look_up"}}} if forced else {}
    replay = Replay(Tools(signature, **config), dspy.ChatAdapter(use_native_function_calling=True))
    need = replay.run(Task.question("q", "who?"), [], {})
    text = write_calls("" if signature == CALLS and calls else "[[ ## thought ## ]]\nso", calls)
    for _ in range(5):  # the fast path would skip the tools
        outputs = Formatter(replay).step(need, text).outputs
        if fault is None:
            assert [call.name for call in (outputs[0]["calls"] or dspy.ToolCalls(tool_calls=[])).tool_calls] == [
                name for name, _ in calls
            ]
        else:
            assert isinstance(outputs, AdapterParseError)
            assert fault in str(outputs)
