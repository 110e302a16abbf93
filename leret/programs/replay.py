"""Running a program as a function of its completions.

A program is run from its start at every step, with the outputs of the steps before: neither an LM nor a retriever is
asked on the way, so a run takes microseconds, and any state can be reached again from what is stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dspy
from pydantic_core import to_jsonable_python

from leret.core.dspy_internals import replay_context, without_bookkeeping
from leret.core.errors import ProgramError
from leret.core.types import Ranking, Task, merge
from leret.programs.search import observed

SearchResults = dict[tuple[str, int], Ranking]
"""The retriever's answers on one path, by (query, k)."""

PLAIN = (str, int, float, bool, type(None))
"""Values that are JSON as they are."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class NeedsSearch:
    """The program stands at a search whose answer is not known yet."""

    query: str
    k: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The program returned ``prediction``."""

    prediction: Any
    ranking: Ranking


class _Stop(BaseException):
    """Carries a need or an error out of the program; not an Exception: a program's own handlers let it pass."""


class Replay:
    """Runs one program many times; not to be shared between threads."""

    def __init__(self, program: dspy.Module, adapter: dspy.Adapter | None = None) -> None:
        self.program = program
        self._names = _input_names(program)
        stands = {id(p): ReplayedPredictor(name, p, self) for name, p in program.named_predictors()}
        if not stands:
            raise ProgramError(
                f"{type(program).__name__} has no predictor to train; use dspy.Predict or ChainOfThought"
            )
        while any(id(predictor) in stands for _, predictor in program.named_predictors()):  # one may have two names
            program.map_named_predictors(lambda predictor: stands.get(id(predictor), predictor))
        self._call = without_bookkeeping(program)
        token = observed.set(self)
        self._context = replay_context(adapter or dspy.ChatAdapter())
        observed.reset(token)

    def run(
        self,
        task: Task,
        outputs: Sequence[Mapping[str, Any]],
        results: SearchResults,
        retrieve: Callable[[str, int], Ranking | None] | None = None,
    ) -> NeedsCompletion | NeedsSearch | Finished:
        """Run from the start with the outputs of the first steps.

        Args:
            task: whose inputs the program gets.
            outputs: parsed fields, one mapping a step, in order.
            results: answers of the retriever; what ``retrieve`` answers is added.
            retrieve: answers a search at once, or returns None where it cannot.

        Returns:
            What is missing next, or the program's prediction. ``ranking`` holds only what was retrieved so far.
        """
        self.outputs, self.n_used = outputs, 0
        self._results, self._retrieve = results, retrieve
        self.searches: list[Ranking] = []
        inputs = task.inputs if len(task.inputs) > 1 else dict(zip(self._names, task.inputs.values(), strict=False))
        try:
            prediction = self._context.run(self._call, **inputs)
        except _Stop as stop:
            need: NeedsCompletion | NeedsSearch | Exception = stop.args[0]
            if isinstance(need, Exception):
                raise need from None
            return need
        except Exception as error:
            raise ProgramError(
                f"{type(self.program).__name__} failed on {task.text!r} after {self.n_used} completions: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self.n_used < len(outputs):
            raise ProgramError(
                f"{type(self.program).__name__} is not deterministic: it ended before its step {len(outputs)}"
            )
        return Finished(prediction, merge(self.searches))

    def search(self, query: str, k: int) -> Ranking:
        """The known answer of the retriever; stops the program where there is none."""
        ranking = self._results.get((query, k))
        if ranking is None:
            try:
                ranking = None if self._retrieve is None else self._retrieve(query, k)
            except Exception as error:
                raise _Stop(error) from error
            if ranking is None:
                raise _Stop(NeedsSearch(query, k))
            self._results[query, k] = ranking
        return ranking


class ReplayedPredictor(dspy.Predict):
    """Stands in a predictor's place and answers from the outputs that its replay was given."""

    def __init__(self, name: str, predictor: dspy.Predict, replay: Replay) -> None:
        self.__dict__.update(vars(predictor))
        self._place = name, replay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the next step; stops the program where there are none."""
        if args:
            return super().__call__(*args, **kwargs)  # says what is wrong with it
        name, replay = self._place
        if replay.n_used < len(replay.outputs):
            outputs = replay.outputs[replay.n_used]
            replay.n_used += 1
            return dspy.Prediction.from_completions([dict(outputs)], signature=self.signature)
        inputs = {}
        for field in self.signature.input_fields:
            if field in kwargs:
                value = kwargs[field]
                inputs[field] = value if type(value) in PLAIN else to_jsonable_python(value, fallback=str)
        raise _Stop(NeedsCompletion(name, inputs, merge(replay.searches)))

    forward = __call__


def bound_inputs(program: dspy.Module, task: Task) -> Mapping[str, Any]:
    """A task's inputs by the arguments of ``forward``: a single input goes to the first one, whatever its name."""
    values = task.inputs.values()
    return task.inputs if len(values) > 1 else dict(zip(_input_names(program), values, strict=False))


def _input_names(program: dspy.Module) -> tuple[str, ...]:
    """The arguments of ``forward`` that take a task's inputs: those without a default, or ``question``."""
    parameters = dict(list(inspect.signature(type(program).forward).parameters.items())[1:])
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = tuple(name for name, p in parameters.items() if p.default is p.empty and p.kind in kinds)
    if "question" in parameters and set(required) <= {"question"}:
        return ("question",)
    if not required:
        raise ProgramError(
            f"{type(program).__name__}.forward takes {', '.join(parameters) or 'nothing'}; it must take the task's "
            "inputs by name, or a question as `question` or as its only argument without a default"
        )
    return required
