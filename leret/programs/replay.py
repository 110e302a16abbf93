"""Calling a program's modules without what DSPy does around a call.

A call of a ``dspy.Module`` collects callbacks, notes its callers and opens a context of settings. None of that can
change what a replayed program does, since neither its LM nor its retriever is asked, and all of it is paid for every
module of every replay: more than everything else in one together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import dspy
from pydantic_core import to_jsonable_python

from leret.core.errors import ProgramError
from leret.core.types import Ranking, merge
from leret.programs.search import observed


def unwrap(program: dspy.Module) -> None:
    """Let calls of a program and of the modules in it go straight to ``forward``.

    Args:
        program: a module of its own for this; its modules become instances of subclasses of their classes. A class
            with a ``__call__`` of its own keeps it.
    """
    for _, module in program.named_sub_modules(type_=dspy.Module):
        kind = type(module)
        call = _CALLS.get(kind.__call__)
        if call is not None:
            made: Any = type(kind)
            names = {"__call__": call, "__module__": kind.__module__}
            if kind.__getattribute__ is dspy.Module.__getattribute__:
                names["__getattribute__"] = object.__getattribute__  # DSPy's looks for who calls forward, to warn
            module.__class__ = made(kind.__name__, (kind,), names)


class _Module:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class _Predictor:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return dspy.Predict.__call__(self, *args, **kwargs)  # says what is wrong with it
        return self.forward(**kwargs)


_CALLS: dict[Any, Any] = {
    dspy.Module.__call__: _Module.__call__,
    dspy.Predict.__call__: _Predictor.__call__,
}


pass


Known = Callable[[str, int], Ranking | None]
"""The retriever's answer to (query, k) where it is known."""


@dataclass(frozen=True)
class NeedsCompletion:
    """The program stands at a step that has no completion yet.

    Attributes:
        predictor: its name in ``program.named_predictors()``.
        inputs: JSON values by field name.
        ranking: the union of what was retrieved before this step.
    """

    predictor: str
    inputs: Mapping[str, Any]
    ranking: Ranking


@dataclass(frozen=True)
class NeedsSearch:
    """The program stands at a search whose answer is not known yet."""

    query: str
    k: int


@dataclass(frozen=True)
class Finished:
    """The program returned."""

    prediction: Any
    ranking: Ranking


class _Stop(BaseException):
    """Carries a need out of the program; not an Exception, so that a program's own handlers let it pass."""

    def __init__(self, need: NeedsCompletion | NeedsSearch) -> None:
        self.need = need


class Replay:
    """Runs one program many times; not to be shared between threads.

    Args:
        program: a module of its own for this replay (it is changed: its predictors answer from memory).
        adapter: of the run, for a program that asks ``dspy.settings.adapter`` (dspy.ReAct does).

    Raises:
        ProgramError: the program has no predictor, or no argument that takes the question.
    """

    def __init__(self, program: dspy.Module, adapter: dspy.Adapter | None = None) -> None:
        self.program = program
        self._argument = question_argument(program)
        self._outputs: Sequence[Mapping[str, Any]] = ()
        self._n_used = 0
        self._known: Known = lambda query, k: None
        self._searches: list[Ranking] = []
        predictors = program.named_predictors()
        if not predictors:
            raise ProgramError(
                f"{type(program).__name__} has no predictor to train; use dspy.Predict or ChainOfThought"
            )
        for name, predictor in predictors:
            predictor.forward = partial(self._step, name, predictor)
        unwrap(program)
        self._context = self._surroundings(adapter)

    def run(
        self, question: str, outputs: Sequence[Mapping[str, Any]], known: Known
    ) -> NeedsCompletion | NeedsSearch | Finished:
        """Run from the start with the outputs of the first steps.

        Args:
            question: the question's text.
            outputs: parsed fields, one mapping a step, in order.
            known: answers of the retriever, by (query, k).

        Returns:
            What is missing next, or the program's prediction. ``ranking`` holds only what was retrieved so far.

        Raises:
            ProgramError: the program raised, or ended before it used all outputs.
        """
        self._outputs, self._n_used, self._known, self._searches = outputs, 0, known, []
        try:
            prediction = self._context.run(self.program, **{self._argument: question})
        except _Stop as stop:
            return stop.need
        except Exception as error:
            raise ProgramError(
                f"{type(self.program).__name__} failed on {question!r} after {self._n_used} completions: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self._n_used < len(outputs):
            raise ProgramError(
                f"{type(self.program).__name__} is not deterministic: it ended before its step {len(outputs)}"
            )
        return Finished(prediction, merge(self._searches))

    def search(self, query: str, k: int) -> Ranking:
        """The known answer of the retriever; stops the program where there is none."""
        ranking = self._known(query, k)
        if ranking is None:
            raise _Stop(NeedsSearch(query, k))
        return ranking

    def record(self, ranking: Ranking) -> None:
        """Take note of what a search added."""
        self._searches.append(ranking)

    def _surroundings(self, adapter: dspy.Adapter | None) -> Context:
        """What a run stands in: made once, since making it costs as much as a run."""
        token = observed.set(self)
        try:
            with dspy.context(trace=None, disable_history=True, adapter=adapter):
                return copy_context()
        finally:
            observed.reset(token)

    def _step(self, name: str, predictor: dspy.Predict, **kwargs: Any) -> dspy.Prediction:
        signature = predictor.signature
        if self._n_used < len(self._outputs):
            outputs = self._outputs[self._n_used]
            self._n_used += 1
            return dspy.Prediction.from_completions([dict(outputs)], signature=signature)
        inputs = {
            field: to_jsonable_python(kwargs[field], fallback=str)
            for field in signature.input_fields
            if field in kwargs
        }
        raise _Stop(NeedsCompletion(name, inputs, merge(self._searches)))


def question_argument(program: dspy.Module) -> str:
    """The argument of ``forward`` that takes the question: ``question``, or the only one without a default.

    Raises:
        ProgramError: neither exists.
    """
    parameters = dict(list(inspect.signature(type(program).forward).parameters.items())[1:])
    required = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if "question" in parameters and set(required) <= {"question"}:
        return "question"
    if len(required) == 1:
        return required[0]
    raise ProgramError(
        f"{type(program).__name__}.forward takes {', '.join(parameters) or 'nothing'}; it must take the question "
        "alone, as `question` or as its only argument without a default"
    )
