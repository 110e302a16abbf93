import asyncio
import json
import random
import typing
from contextlib import closing

import dspy
import pytest

from leret.core.types import Passage, Task
from leret.policies.tool_calls import write_calls
from leret.programs.checks import check_path
from leret.programs.needs import NeedsCompletion
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher


class Shelf:
    digest = "shelf"

    def search(self, queries, k):
        return [tuple(Passage(f"{q}-{i}", f"T{i}", f"on {q}", 5.0 - i) for i in range(k)) for q in queries]


def made_up(signature, text):
    """Return made-up values for a signature's outputs; None if there are tool calls among them."""
    values = {name: value_of(info.annotation, text) for name, info in signature.output_fields.items()}
    return None if None in values.values() else values


def value_of(kind, text):
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        return typing.get_args(kind)[0]
    return {str: text, list: [text], dict: {}}.get(origin)


def complete(need):
    call = need.call
    if need.choice is not None:
        return random.Random(need.key).choice(need.choice.candidates).id
    if call.signature is None:
        return "[[ ## query ## ]]\nxyz\n\n[[ ## completed ## ]]" if need.predictor != "(direct)" else "some words"
    fields = made_up(call.signature, f"word {random.Random(need.key).randrange(1000)}")
    if fields is None:  # ReActV2's tool calls
        fields = dict.fromkeys(call.signature.output_fields, "word")
        last = "observation" in str(need.inputs) or "on word" in str(need.inputs)
        name, argument = ("submit", "answer") if last else ("look_up", "query")
        if call.adapter.use_native_function_calling:
            return write_calls("", [(name, json.dumps({argument: "word"}))])
        fields["tool_calls"] = dspy.ToolCalls.from_dict_list([{"name": name, "args": {argument: "word"}}])
    if "next_tool_args" in fields:
        fields["next_tool_args"] = {"query": "word"}
    return str(call.adapter.format_assistant_message_content(call.signature, fields))


@pytest.fixture
def walk():

    def walked(program, adapter=None, *, check=False, pure=None, shared=True):
        async def run(searches):
            runner = ProgramRunner.over(program, adapter, searches if shared else None)
            task, steps, results, needs = Task.question("q", "who is it?"), [], {}, []
            while isinstance(need := await runner.advance(task, steps, results, check), NeedsCompletion):
                needs.append(need)
                steps.append(runner.formatter.step(need, complete(need)))
            if pure is not None:
                await check_path(pure, runner, task, steps, results)
            return needs, need

        with closing(SearchBatcher(Shelf())) as searches:
            return asyncio.run(run(searches))

    return walked
