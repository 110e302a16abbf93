"""What is sent and stored is what the DSPy program itself would send: proven before a question is sampled.

The program is run twice on the same task with the same made-up completions and the same retriever: by the runner that
sampling is made of, and by DSPy, with an LM that records what it is asked.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal

import dspy
from pydantic import BaseModel, ValidationError

from leret.core.aio import suppress_output
from leret.core.dspy_internals import EngineLM, lm15, messages_of, text_response
from leret.core.errors import ProgramError, RetrievalError
from leret.core.types import Hop, Task
from leret.policies.base import Messages
from leret.programs.prompts import ZERO_SHOT, Prompt
from leret.programs.replay import Finished, SearchResults, bound_inputs
from leret.programs.runner import ProgramRunner


async def check_messages(
    program: dspy.Module, runner: ProgramRunner, prompts: Sequence[Prompt], tasks: Sequence[Task]
) -> tuple[int, tuple[str, ...]]:
    """Compare what leret sends with what the program sends, for the first task that calls an LM.

    ``program`` is not the one that is replayed, but another instance; it may fail on some of the tasks.

    Returns:
        LM calls that were compared, and why not more, where the program had not ended.
    """
    n = 0
    stops: dict[str, None] = {}
    for task in tasks:
        if n:
            break
        for prompt in prompts:
            hops, why = await made_up_hops(runner, task, prompt)
            sent = program_messages(program, runner, task, prompt, [hop.completion or "" for hop in hops])
            for place, hop in enumerate(hops):
                theirs = sent[place] if place < len(sent) else None
                if theirs != hop.messages:
                    raise ProgramError(
                        f"{type(program).__name__}, question {task.id}, prompt {prompt.name}, LM call {place + 1} "
                        f"(predictor {hop.predictor}): what leret would send and store is not what the program sends:\n"
                        f"{message_difference(hop.messages, theirs)}\n"
                        "Nothing was sampled. The program must build its inputs from its question, its completions "
                        "and leret.Search alone, the same in every run, and call its predictors as they are"
                    )
            n += len(hops)
            if why:
                stops[f"question {task.id}, after LM call {len(hops)}: {why}"] = None
    if not n:
        why = next(iter(stops), f"question {tasks[0].id} ends without one")
        raise ProgramError(
            f"{type(program).__name__} calls no LM for {len(tasks)} questions ({why}), so there is nothing to "
            "sample, and what it sends cannot be checked; correct the program, or remove those questions"
        )
    return n, tuple(stops)


async def made_up_hops(runner: ProgramRunner, task: Task, prompt: Prompt = ZERO_SHOT) -> tuple[list[Hop], str | None]:
    """The steps of one run, answered by made-up outputs, and why they do not lead to its end, where they do not."""
    formatter, results = runner.formatter, SearchResults()
    hops: list[Hop] = []
    while True:
        try:
            need = await runner.advance(task, [hop.outputs or {} for hop in hops], results)
        except ProgramError as error:
            return hops, str(error)  # made-up outputs need not make sense to it; sampling records such a failure
        if isinstance(need, Finished):
            return hops, None
        name = need.predictor
        fields = made_up(formatter.signature(name, prompt), f"{task.text} {len(hops)}")
        completion = "" if fields is None else formatter.completion(name, fields)
        outputs = formatter.parse(name, completion) if completion else None
        messages = formatter.messages(name, need.inputs, prompt)
        hops.append(Hop(name, need.inputs, messages, completion, outputs, need.ranking))
        if outputs is None:
            return hops, f"no outputs of predictor {name} could be made up that the adapter reads back"


def program_messages(
    program: dspy.Module, runner: ProgramRunner, task: Task, prompt: Prompt, completions: Sequence[str]
) -> list[Messages]:
    """What DSPy sends when it runs the program under a prompt, gets these completions, and is stopped after them."""
    formatter = runner.formatter
    sent: list[Messages] = []

    def answer(request: lm15.Request) -> lm15.Response:
        if len(sent) == len(completions):
            raise ProgramError("all calls that are compared were made")
        sent.append(messages_of(request))
        return text_response(request, completions[len(sent) - 1])

    lm, retriever = EngineLM("recorder", answer), runner.searches.retriever
    before = [(predictor, predictor.signature, predictor.demos) for _, predictor in program.named_predictors()]
    try:
        for name, predictor in program.named_predictors():
            predictor.signature = formatter.signature(name, prompt)
            if name in prompt.demos:
                predictor.demos = [dict(demo) for demo in prompt.demos[name]]
        with (
            suppress_output("dspy"),
            dspy.context(lm=lm, adapter=formatter.adapter, rm=retriever, disable_history=True),
        ):
            program(**bound_inputs(program, task))
    except RetrievalError:
        raise
    except Exception:
        pass  # it goes no further; a call that is missing then is reported as a difference
    finally:
        for predictor, signature, demos in before:
            predictor.signature, predictor.demos = signature, demos
    return sent


def made_up(signature: type[dspy.Signature], text: str) -> dict[str, Any] | None:
    """Values for the outputs of a signature, or None where a type is too special for that."""
    try:
        values = {name: _value(info.annotation, text) for name, info in signature.output_fields.items()}
    except RecursionError:  # a model that holds itself
        return None
    return None if any(value is None for value in values.values()) else values


def message_difference(
    ours: Sequence[typing.Mapping[str, str]],
    theirs: Sequence[typing.Mapping[str, str]] | None,
    names: tuple[str, str] = ("leret", "program"),
) -> str:
    """Where two prompts, called ``names``, first differ, in a few lines; the second is None where there is none."""
    if theirs is None:
        return f"  {names[1]}: nothing is sent there"
    for place, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if own == other:
            continue
        if own.get("role") != other.get("role"):
            return f"  message {place}: of role {own.get('role')} ({names[0]}) and {other.get('role')} ({names[1]})"
        texts = str(own.get("content")), str(other.get("content"))
        start = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
        begin, end, width = max(0, start - 20), start + 60, max(map(len, names)) + 1
        lines = [f"  message {place} ({own.get('role')}), from character {start} on:"]
        for name, text in zip(names, texts, strict=True):
            shown = f"{'...' if begin else ''}{text[begin:end]!r}{'...' if end < len(text) else ''}"
            lines.append(f"    {name + ':':<{width}} {shown}")
        return "\n".join(lines)
    return f"  {len(ours)} messages ({names[0]}) and {len(theirs)} ({names[1]})"


def _value(kind: Any, text: str) -> Any:
    plain = {str: text, int: 1, float: 1.0, bool: True, Any: text}
    if kind in plain:
        return plain[kind]
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Literal:
        return inner[0]
    if origin is typing.Annotated:
        return _value(inner[0], text)
    if origin in (typing.Union, types.UnionType):
        return next((value for value in (_value(one, text) for one in inner) if value is not None), None)
    if origin in (list, tuple, dict):
        parts = [_value(one, text) for one in inner if one is not ...] or [text, text]
        if any(part is None for part in parts):
            return None
        return dict([parts]) if origin is dict else origin(parts)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, dspy.Type):
        required = {name: info for name, info in kind.model_fields.items() if info.is_required()}
        try:
            return kind.model_validate({name: _value(info.annotation, text) for name, info in required.items()})
        except ValidationError:
            pass
    return None
