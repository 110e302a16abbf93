"""A program that an optimizer of DSPy may run: it searches, is watched, and takes no outage for a bad query."""

from __future__ import annotations

import threading
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMError

from leret.core.errors import LeretError, PolicyError, ProgramError, RunError
from leret.core.types import Ranking, merge
from leret.programs.replay import question_argument
from leret.programs.search import observed
from leret.retrieval.base import Retriever


class Watch:
    """What all copies of a student share.

    Args:
        retriever: behind the program's searches.
        stop: once set, no run begins.
    """

    def __init__(self, retriever: Retriever, stop: threading.Event) -> None:
        self.retriever = retriever
        self.stop = stop
        self.outage: LeretError | None = None
        self.crash: Exception | None = None
        self.n_runs = 0
        self.n_crashes = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Watch:
        return self

    def note(self, error: Exception) -> None:
        """Keep the first outage, and count what the program itself raised."""
        outage = _outage(error)
        if outage is not None:
            self.outage = self.outage or outage
        else:
            self.crash = error
            self.n_crashes += 1

    def raise_first(self) -> None:
        """Raise what made the bank impossible, if anything did."""
        if self.outage is not None:
            raise type(self.outage)(f"the prompt bank could not be made: {self.outage}") from self.outage
        if self.crash is not None and self.n_crashes == self.n_runs:
            raise ProgramError(
                f"the program failed on every question of the bank: {type(self.crash).__name__}: {self.crash}; "
                "mend the program, or set sampling.prompts: 1 to do without a bank"
            ) from self.crash


def _outage(error: BaseException) -> LeretError | None:
    """What the policy or the retriever raised, under whatever DSPy wrapped around it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LeretError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return PolicyError(f"{type(error).__name__}: {error}") if isinstance(error, LMError) else None


class _Recorder:
    """Stands between the program and its retriever."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self.rankings: list[Ranking] = []

    def search(self, query: str, k: int) -> Ranking:
        return self._retriever.search([query], k)[0]

    def record(self, ranking: Ranking) -> None:
        self.rankings.append(ranking)


class Student(dspy.Module):
    """Runs a program and returns what it retrieved: ``ranking``, and whether it came to its end (``complete``).

    Args:
        program: the user's.
        watch: shared by all copies.
    """

    def __init__(self, program: dspy.Module, watch: Watch) -> None:
        super().__init__()
        self.program = program
        self.watch = watch
        self.argument = question_argument(program)

    def forward(self, question: str) -> dspy.Prediction:
        """Run on one question."""
        if self.watch.stop.is_set():
            self.watch.outage = self.watch.outage or RunError("it was interrupted; run the same command again")
        if self.watch.outage is not None:
            raise self.watch.outage
        recorder = _Recorder(self.watch.retriever)
        token = observed.set(recorder)
        complete: Any = True
        self.watch.n_runs += 1
        try:
            self.program(**{self.argument: question})
        except (AdapterParseError, ContextWindowExceededError):
            complete = False  # a fact about the policy: what was found before counts
        except Exception as error:
            self.watch.note(error)
            raise
        finally:
            observed.reset(token)
        return dspy.Prediction(ranking=merge(recorder.rankings), complete=complete)
