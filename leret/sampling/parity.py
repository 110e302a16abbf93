"""What is sent and stored is what the DSPy program itself would send: proven before a question is sampled.

The program is run twice on the same question with the same made-up completions and the same retriever: by the replay
that sampling is made of, and by DSPy, with an LM that writes down what it is asked.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal

import dspy
from dspy import lm15
from pydantic import BaseModel, ValidationError

from leret.core.aio import suppress_output
from leret.core.errors import ProgramError, RetrievalError
from leret.core.types import Ranking, Task
from leret.policies.base import Messages
from leret.programs.prompts import Formatter, Prompt
from leret.programs.replay import NeedsCompletion, NeedsSearch, Replay, question_argument
from leret.retrieval.base import Retriever
from leret.sampling.bank.lm import messages_of

_MAX_STEPS = 8
_SHOWN = 60


class Step(typing.NamedTuple):
    """One LM call of a program: who asks, what leret sends, and the completion that answers it."""

    predictor: str
    messages: Messages
    completion: str


def check_messages(
    program: dspy.Module,
    replay: Replay,
    formatter: Formatter,
    retriever: Retriever,
    prompts: Sequence[Prompt],
    questions: Sequence[Task],
) -> tuple[int, tuple[str, ...]]:
    """Compare what leret sends with what the program sends, for the first question that calls an LM.

    Args:
        program: not the one that is replayed.
        replay: of another instance of the same program.
        formatter: that sampling formats with.
        retriever: behind both.
        prompts: of the bank.
        questions: a few; the program may fail on some, or answer them without an LM.

    Returns:
        LM calls that were compared, and why not more, where the program had not ended.

    Raises:
        ProgramError: they differ, with the first place; or nothing could be compared.
        RetrievalError: the retriever cannot answer.
    """
    n = 0
    stops: dict[str, None] = {}
    for question in questions:
        if n:
            break
        for prompt in prompts:
            steps, why = replayed_steps(replay, formatter, retriever, question, prompt)
            sent = program_messages(program, formatter, retriever, question, prompt, steps)
            for place, step in enumerate(steps):
                theirs = sent[place] if place < len(sent) else None
                if theirs != step.messages:
                    raise ProgramError(_refusal(program, question, prompt, place, step, theirs))
            n += len(steps)
            if why:
                stops[f"question {question.id}, after LM call {len(steps)}: {why}"] = None
    if not n:
        why = next(iter(stops), f"question {questions[0].id} ends without one")
        raise ProgramError(
            f"{type(program).__name__} calls no LM for {len(questions)} questions ({why}), so there is nothing to "
            "sample, and what it sends cannot be checked; mend the program, or remove those questions"
        )
    return n, tuple(stops)


def replayed_steps(
    replay: Replay, formatter: Formatter, retriever: Retriever, question: Task, prompt: Prompt
) -> tuple[list[Step], str | None]:
    """The steps of one run as sampling sees them, answered by `made_up` outputs.

    Returns:
        The steps, and why they do not lead to the program's end, where they do not.
    """
    known: dict[tuple[str, int], Ranking] = {}
    outputs: list[Mapping[str, Any]] = []
    steps: list[Step] = []
    while len(steps) < _MAX_STEPS:
        try:
            need = replay.run(question.text, outputs, lambda query, k: known.get((query, k)))
        except ProgramError as error:
            return steps, str(error)  # what is made up need not make sense to it; sampling records such a failure
        if isinstance(need, NeedsSearch):
            known[need.query, need.k] = retriever.search([need.query], need.k)[0]
            continue
        if not isinstance(need, NeedsCompletion):
            return steps, None
        fields = made_up(formatter.signature(need.predictor, prompt), question.text)
        completion = "" if fields is None else formatter.completion(need.predictor, fields)
        steps.append(Step(need.predictor, formatter.messages(need.predictor, need.inputs, prompt), completion))
        parsed = formatter.parse(need.predictor, completion) if completion else None
        if parsed is None:
            return steps, f"no outputs of predictor {need.predictor} could be made up that the adapter reads back"
        outputs.append(parsed)
    return steps, f"no more than {_MAX_STEPS} calls are compared"


def program_messages(
    program: dspy.Module,
    formatter: Formatter,
    retriever: Retriever,
    question: Task,
    prompt: Prompt,
    steps: Sequence[Step],
) -> list[Messages]:
    """What DSPy sends when it runs the program under a prompt and is answered as ``steps`` were.

    Args:
        program: not the one that is replayed.
        formatter: knows the adapter and the signatures.
        retriever: DSPy's ``rm``.
        question: that is asked.
        prompt: whose demos and instructions the program gets.
        steps: as many calls are answered and recorded.

    Raises:
        RetrievalError: the retriever cannot answer.
    """
    recorder = _Recorder([step.completion for step in steps])
    lm = dspy.LM("leret/recorder", engine=recorder, cache=False, num_retries=0)
    try:
        with (
            suppress_output("dspy"),
            _prompted(program, formatter, prompt),
            dspy.context(lm=lm, adapter=formatter.adapter, rm=retriever, disable_history=True),
        ):
            program(**{question_argument(program): question.text})
    except RetrievalError:
        raise
    except Exception:
        pass  # it goes no further; a call that is missing then is told as a difference
    return recorder.sent


@contextmanager
def _prompted(program: dspy.Module, formatter: Formatter, prompt: Prompt) -> Iterator[None]:
    """The program's predictors with the demos and instructions of a prompt, for a while."""
    before = [(predictor, predictor.signature, predictor.demos) for _, predictor in program.named_predictors()]
    try:
        for name, predictor in program.named_predictors():
            predictor.signature = formatter.signature(name, prompt)
            if name in prompt.demos:
                predictor.demos = [dict(demo) for demo in prompt.demos[name]]
        yield
    finally:
        for predictor, signature, demos in before:
            predictor.signature, predictor.demos = signature, demos


def made_up(signature: type[dspy.Signature], text: str) -> dict[str, Any] | None:
    """Values for the outputs of a signature, or None where a type is too special for that."""
    try:
        values = {name: _value(info.annotation, text) for name, info in signature.output_fields.items()}
    except RecursionError:  # a model that holds itself
        return None
    return None if any(value is None for value in values.values()) else values


def message_difference(ours: Messages, theirs: Messages | None, names: tuple[str, str] = ("leret", "program")) -> str:
    """Where two prompts first differ, in a few lines.

    Args:
        ours: one of them.
        theirs: the other one; None where there is none.
        names: what they are called.
    """
    if theirs is None:
        return f"  {names[1]}: nothing is sent there"
    for place, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if own == other:
            continue
        if own.get("role") != other.get("role"):
            return f"  message {place}: of role {own.get('role')} ({names[0]}) and {other.get('role')} ({names[1]})"
        one, two = str(own.get("content")), str(other.get("content"))
        start = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        width = max(map(len, names)) + 1
        return (
            f"  message {place} ({own.get('role')}), from character {start} on:\n"
            f"    {names[0] + ':':<{width}} {_around(one, start)}\n    {names[1] + ':':<{width}} {_around(two, start)}"
        )
    return f"  {len(ours)} messages ({names[0]}) and {len(theirs)} ({names[1]})"


class _Recorder:
    """DSPy's engine protocol over a list of answers."""

    supported_params = frozenset({"temperature", "max_tokens", "top_p"})

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = answers
        self.sent: list[Messages] = []

    def __deepcopy__(self, memo: dict[int, object]) -> _Recorder:
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        if len(self.sent) == len(self._answers):
            raise ProgramError("all calls that are compared were made")
        answer = self._answers[len(self.sent)]
        self.sent.append(tuple({"role": role, "content": text} for role, text in messages_of(request)))
        message = lm15.Message.assistant([lm15.TextPart(answer)])
        usage = lm15.Usage(input_tokens=0, output_tokens=0, total_tokens=0)
        return lm15.Response(id=None, model=request.model, message=message, finish_reason="stop", usage=usage)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        yield from lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Nothing is held."""


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
            return None
    return None


def _refusal(
    program: dspy.Module, question: Task, prompt: Prompt, place: int, step: Step, theirs: Messages | None
) -> str:
    return (
        f"{type(program).__name__}, question {question.id}, prompt {prompt.name}, LM call {place + 1} (predictor "
        f"{step.predictor}): what leret would send and store is not what the program sends:\n"
        f"{message_difference(step.messages, theirs)}\n"
        "Nothing was sampled. The program must build its inputs from its question, its completions and leret.Search "
        "alone, the same in every run, and call its predictors as they are"
    )


def _around(text: str, start: int) -> str:
    begin, end = max(0, start - 20), start + _SHOWN
    return f"{'...' if begin else ''}{text[begin:end]!r}{'...' if end < len(text) else ''}"
