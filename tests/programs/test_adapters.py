import json

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError

from leret.config.sampling import AdapterSettings
from leret.core.dspy_internals import PlainJSONAdapter
from leret.core.errors import ConfigError, ProgramError
from leret.programs.adapters import CompactAdapter, adapter_record, load_adapter, make_adapter

ONE = dspy.Signature("question, context: list[str] -> query")
TWO = dspy.Signature("question -> reasoning, n: int")


@pytest.mark.parametrize(
    ("signature", "inputs", "shown"),
    [
        (ONE, {"question": "Who\nwas it?", "context": ["A | b c d e", "F", "G"]},
         "question: Who was it?\ncontext:\nA | b\nF"),
        (dspy.Signature("rows: list, arguments: dict -> x"),
         {"rows": [{"id": "d7", "title": "A"}], "arguments": {"query": "ü b"}},
         'rows:\nd7 | A\narguments: {"query": "ü b"}'),
    ],
)  # fmt: skip
def test_inputs_become_lines_rows_their_values_mappings_json_and_lists_are_clipped(signature, inputs, shown):
    adapter = CompactAdapter(words_per_item=3, items=2)
    assert adapter.format(signature, [], inputs) == [{"role": "user", "content": shown}]
    assert adapter.format_user_message_content(signature, inputs) == shown


def test_demos_are_turns_without_their_context_after_instructions_where_asked_for():
    demo = {"question": "p", "context": ["A | b"], "query": "x"}
    adapter, signature = CompactAdapter(instructions=True), ONE.with_instructions("Be brief.")
    turns = [(m["role"], m["content"]) for m in adapter.format(signature, [demo], {"question": "q", "context": []})]
    assert turns == [("system", "Be brief."), ("user", "question: p"), ("assistant", "x"), ("user", "question: q")]


def test_a_call_ends_with_its_outputs_where_asked_for():
    react = dspy.ReAct("question -> answer", tools=[dspy.Tool(lambda query: query, name="find")])
    demo = {"question": "p", "trajectory": "", "next_thought": "t", "next_tool_name": "finish", "next_tool_args": {}}
    messages = CompactAdapter(outputs=True).format(react.react.signature, [demo], {"question": "q", "trajectory": ""})
    asked = "trajectory: \noutputs: next_thought, next_tool_name (find | finish), next_tool_args (dict)"
    assert [message["content"] for message in messages] == [
        f"question: p\n{asked}",
        "next_thought: t\nnext_tool_name: finish\nnext_tool_args: {}",
        f"question: q\n{asked}",
    ]


NESTED = dspy.Signature("q -> a: dict, b: list[str]")


@pytest.mark.parametrize(
    ("signature", "outputs"),
    [
        (ONE, {"query": "a b"}),
        (TWO, {"reasoning": "since", "n": 3}),
        (NESTED, {"a": {"query": 'say "x"'}, "b": ["c", "d, e"]}),
    ],
)
def test_a_completion_parses_back_and_spaces_beside_quotation_marks_do_not_count(signature, outputs):
    adapter = CompactAdapter()
    assert adapter.parse(signature, adapter.format_assistant_message_content(signature, outputs)) == outputs
    for malformed in ("  ", "reasoning: x", "reasoning: x\nn: many"):
        with pytest.raises(AdapterParseError):
            adapter.parse(TWO, malformed)
    spaced = adapter.parse(NESTED, 'a : { " query " : " a b " }\nb : [ " c " , " d " ]')
    assert spaced == {"a": {"query": "a b"}, "b": ["c", "d"]}


class Renaming(dspy.ChatAdapter):
    name = "written"

    def __init__(self, style: str = "plain"):
        super().__init__()
        setattr(self, self.name, style)


class Styled(Renaming):
    name = "style"


ADAPTERS = [
    dspy.ChatAdapter(use_json_adapter_fallback=False, parallel_tool_calls=True), dspy.XMLAdapter(), Renaming(),
    PlainJSONAdapter(use_native_function_calling=True), CompactAdapter(items=3, instructions=True), Styled("ornate"),
    make_adapter(AdapterSettings(kind="json", prefill=True)),
]  # fmt: skip


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: type(adapter).__name__)
def test_an_adapter_comes_back_with_all_its_settings(adapter):
    again = load_adapter(json.loads(json.dumps(adapter_record(adapter))))
    assert (type(again), vars(again)) == (type(adapter), vars(adapter))


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (dspy.TwoStepAdapter(dspy.LM("openai/m")), "extraction_model"),
        (dspy.ChatAdapter(native_response_types=[dspy.Reasoning]), "does not restore native_response_types"),
        (Renaming("ornate"), "does not restore written"),
        (type("Local", (dspy.ChatAdapter,), {"__qualname__": "f.<locals>.Local"})(), "cannot be imported"),
    ],
)
def test_an_adapter_that_json_cannot_say_is_refused(adapter, says):
    with pytest.raises(ProgramError, match=says):
        adapter_record(adapter)


def test_a_recipe_turns_native_tool_calls_on():
    for kind in ("chat", "json", "xml"):
        for tools in (False, True):
            settings = AdapterSettings(kind=kind, use_native_function_calling=tools)
            assert make_adapter(settings).use_native_function_calling == tools
    with pytest.raises(ConfigError, match="compact does not pass tools"):
        make_adapter(AdapterSettings(kind="compact", use_native_function_calling=True))
