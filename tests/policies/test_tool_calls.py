import json
from importlib.resources import files
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import add_response_schema

from leret.core.errors import PolicyError
from leret.core.types import message
from leret.policies.local.chat_template import PromptEncoder
from leret.policies.tool_calls import read_calls, reader_of, write_calls
from tests.tiny import tiny_policy

LOOK = {"name": "look_up", "arguments": {"query": "a 'b' é", "k": 2}}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Find.", "parameters": {}}}]


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "a", "arguments": {',
        '["a"]',
        '{"name": "a", "arguments": {"k": NaN}}',
        '{"name": "a", "arguments": {"k": "\\ud800"}}',
        "[" * 9999,
    ],
)
def test_a_completion_with_a_malformed_call_is_all_text(block):
    text = write_calls("so", [("look_up", json.dumps(LOOK["arguments"]))])
    assert read_calls(text) == ("so", [LOOK])
    text += f"<tool_call>\n{block}\n</tool_call>"
    assert read_calls(text) == (text, [])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_policy(tmp_path_factory.mktemp("tools") / "tiny"))


def encoded(tokenizer, template, *, response=False, thinking=None, change=("", "")):
    tokenizer.chat_template = (files("trl") / f"chat_templates/{template}.jinja").read_text().replace(*change)
    tokenizer.response_template = None
    if response:
        add_response_schema(tokenizer)
    asked = message("user", "who?", tools=json.dumps(TOOLS))
    return PromptEncoder(tokenizer, None, template, thinking).encode((asked,)).token_ids


@pytest.mark.parametrize(
    ("template", "how"),
    [("qwen2_5", {}), ("qwen3_training", {}), ("qwen3_training", {"thinking": False}), ("lfm2_v2", {"response": True})],
)
def test_a_template_that_keeps_turns_takes_tools(tokenizer, template, how):
    assert encoded(tokenizer, template, **how)


@pytest.mark.parametrize(
    ("template", "how", "says"),
    [
        ("qwen3", {}, "rewrites earlier turns"),
        ("qwen2_5", {"change": ("tool_call.arguments | tojson", "tool_call.arguments | tojson(sort_keys=true)")},
         "rewrites earlier turns"),
        ("qwen3_8", {}, "shows tool calls in a format that leret does not read; set response_template"),
        ("llama3", {}, "leaves out tools"),
    ],
)  # fmt: skip
def test_a_template_that_rewrites_turns_is_refused_by_name(tokenizer, template, how, says):
    with pytest.raises(PolicyError, match=f"{template}'s chat template {says}|{template}'s chat template rejects"):
        encoded(tokenizer, template, **how)


RESPONSE = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {"open": "[call]", "close": "[/call]", "repeats": True, "content": "json"},
        "content": {"content": "text"},
    },
}


def test_a_response_template_of_the_tokenizer_reads_its_own_format(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": RESPONSE}))
    for place in (SimpleNamespace(response_template=RESPONSE), tmp_path):
        read = reader_of(place)
        assert read(f"so[call]{json.dumps(LOOK)}[/call]", TOOLS) == ("so", [LOOK])
        for text in ("so", "[call]{[/call]", "[call][1][/call]"):
            assert read(text, TOOLS) == (text, [])
    assert reader_of(tmp_path / "absent") is read_calls
