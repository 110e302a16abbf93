"""The protocol of policies: the LMs behind programs, for the sampler and the evaluator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from leret.core.errors import PolicyError
from leret.core.types import Choice
from leret.core.types import Messages as Messages  # noqa: PLC0414  re-exported


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete ``len(seeds)`` times."""

    messages: Messages
    seeds: tuple[int, ...]  # one 63-bit seed per completion; a completion depends only on its seed
    temperature: float  # 0 is greedy, with one seed
    max_tokens: int  # most completion tokens
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # strings that end a completion, excluded from its text
    choice: Choice | None = None  # candidates in the messages; the text of the completion is the id of one
    predictor: str = ""  # step of the program that asks; `PolicySet` selects the policy by it


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion; ``finish_reason`` is ``stop`` or ``length``.

    ``token_ids`` and ``logprobs`` (natural logarithm, one per token, end token included) are None if a server sends
    none. A picker's ``logprobs`` has one entry, for the choice, and ``value`` is its Q-value.
    """

    text: str
    finish_reason: str
    n_prompt_tokens: int
    n_completion_tokens: int
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    value: float | None = None


class PromptTooLongError(PolicyError):
    """A prompt without a position left for the answer."""


class Policy(Protocol):
    """Completion of prompts. Safe to call from many tasks of one event loop."""

    @property
    def name(self) -> str:
        """Name of the model in recipes and reports."""

    @property
    def digest(self) -> str:
        """Digest of the weights (local) or of the served model's name (remote): part of each sample's id."""

    async def complete(self, request: Request) -> list[Completion]:
        """Return one completion per seed, in their order; PolicyError instead of an empty one."""
        ...

    async def aclose(self) -> None:
        """Release resources and the running event loop's connections. May be called twice."""
