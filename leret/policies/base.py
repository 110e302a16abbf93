"""Policy protocol: the LMs that the sampler and the evaluator call for a program."""

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
    temperature: float  # 0 is greedy: all completions are identical
    max_tokens: int  # maximum number of completion tokens
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # strings that end a completion; excluded from its text
    # candidates to pick from; the completion's text is the id of the pick
    choice: Choice | None = None
    predictor: str = ""  # name of the calling predictor; `PolicySet` selects the policy by it
    logprobs: bool = False  # ask a server for token ids and log-probabilities
    token_ids: bool = False  # ask a server for token ids, if it can send them alone


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion; ``finish_reason`` is ``stop`` or ``length``.

    ``token_ids`` and ``logprobs`` (natural logarithm, one per token, end token included) are None
    if the server does not send them. For a picker, ``logprobs`` has one entry (the choice) and
    ``value`` is the Q-value of the choice.
    """

    text: str
    finish_reason: str
    n_prompt_tokens: int
    n_completion_tokens: int
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    value: float | None = None


class PromptTooLongError(PolicyError):
    """A prompt that leaves no room for a completion."""


class Policy(Protocol):
    """A model that completes prompts. Safe to call from many tasks of one event loop."""

    @property
    def name(self) -> str:
        """Name of the model in recipes and reports."""

    @property
    def digest(self) -> str:
        """Digest of the weights (local) or of the model name (remote).

        It is part of each sample's id.
        """

    async def complete(self, request: Request) -> list[Completion]:
        """Return one completion per seed, in the order of the seeds.

        Raise PolicyError if a completion is empty.
        """
        ...

    async def aclose(self) -> None:
        """Release resources, and close connections of the running event loop.

        May be called twice.
        """
