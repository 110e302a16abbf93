"""The compact adapter: fields and nothing else, both ways."""

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError

from leret.programs.adapters import CompactAdapter

ONE = dspy.Signature("question, context: list[str] -> query")
TWO = dspy.Signature("question -> reasoning, n: int")


def test_inputs_become_lines_and_lists_are_clipped():
    inputs = {"question": "Who\nwas it?", "context": ["A | b c d e", "F", "G"]}
    (message,) = CompactAdapter(words_per_item=3, items=2).format(ONE, [], inputs)
    assert message == {"role": "user", "content": "question: Who was it?\ncontext:\nA | b\nF"}


def test_demos_are_turns_without_their_context_after_instructions_where_asked_for():
    demo = {"question": "p", "context": ["A | b"], "query": "x"}
    adapter, signature = CompactAdapter(instructions=True), ONE.with_instructions("Be brief.")
    turns = [(m["role"], m["content"]) for m in adapter.format(signature, [demo], {"question": "q", "context": []})]
    assert turns == [("system", "Be brief."), ("user", "question: p"), ("assistant", "x"), ("user", "question: q")]


@pytest.mark.parametrize(("signature", "outputs"), [(ONE, {"query": "a b"}), (TWO, {"reasoning": "since", "n": 3})])
def test_a_completion_parses_back(signature, outputs):
    adapter = CompactAdapter()
    assert adapter.parse(signature, adapter.format_assistant_message_content(signature, outputs)) == outputs


@pytest.mark.parametrize(
    ("signature", "completion"), [(ONE, "  "), (TWO, "reasoning: x"), (TWO, "reasoning: x\nn: many"), (TWO, "")]
)
def test_what_is_not_in_the_format_is_refused(signature, completion):
    with pytest.raises(AdapterParseError):
        CompactAdapter().parse(signature, completion)


def test_finetuning_data_end_in_the_assistants_turn():
    data = CompactAdapter().format_finetune_data(ONE, [], {"question": "q"}, {"query": "x"})
    assert data["messages"] == [{"role": "user", "content": "question: q"}, {"role": "assistant", "content": "x"}]
