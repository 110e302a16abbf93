"""The LM behind a program, as the sampler and the evaluator see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from leret.core.errors import PolicyError
from leret.core.types import Choice
from leret.core.types import Messages as Messages  # noqa: PLC0414  re-exported


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete ``len(seeds)`` times.

    Attributes:
        seeds: one 63-bit seed a completion; a completion depends on its own seed alone.
        temperature: 0 is greedy (one seed, then).
        max_tokens: completion tokens at most.
        stop: strings that end a completion, themselves left out of its text.
        choice: what the messages put into words, where one of several candidates is asked for: the text of the
            completion is the id of one.
        predictor: name of the step of the program that asks; a `PolicySet` goes by it.
    """

    messages: Messages
    seeds: tuple[int, ...]
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    choice: Choice | None = None
    predictor: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion; ``finish_reason`` is ``stop`` or ``length``.

    ``token_ids`` and ``logprobs`` (natural logarithm, one a token, end token included) are None where a server
    gives none. Of a picker, ``logprobs`` has one entry, the choice's, and ``value`` is its Q-value.
    """

    text: str
    finish_reason: str
    n_prompt_tokens: int
    n_completion_tokens: int
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    value: float | None = None


class PromptTooLongError(PolicyError):
    """A prompt that leaves the model no position to answer in."""


class Policy(Protocol):
    """Completes prompts. Safe to call from many tasks of one event loop."""

    @property
    def name(self) -> str:
        """The model as recipes and reports call it."""

    @property
    def digest(self) -> str:
        """Names the weights (local) or the served model (remote): part of every sample's id."""

    async def complete(self, request: Request) -> list[Completion]:
        """One completion a seed, in their order; PolicyError where one could not be had, never an empty one."""
        ...

    async def aclose(self) -> None:
        """Free what the policy holds; of connections, those of the running event loop. May be called twice."""
