"""Completions that are known already, as an LM of DSPy.

The zero-shot runs that set the bank's threshold were batched; bootstrapping goes through the same questions with the
same prompts, one call after another. Remembering them saves those calls and their waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import dspy
from dspy import lm15

from leret.core.types import Rollout, digest

Memory = Mapping[str, str]
"""Completions by the digest of their messages."""


def memory_of(rollouts: Iterable[Rollout]) -> dict[str, str]:
    """What a policy wrote in these rollouts."""
    return {
        _key((m["role"], m["content"]) for m in hop.messages): hop.completion or "" for r in rollouts for hop in r.hops
    }


def remembering(memory: Memory, lm: Callable[[], dspy.BaseLM], **settings: Any) -> dspy.LM:
    """An LM that answers from memory, and asks another one for what is not there.

    Args:
        memory: what is known.
        lm: makes the other one, at the first prompt that is not known.
        settings: ``temperature``, ``max_tokens`` and ``top_p`` of what is asked.
    """
    return dspy.LM("leret/remembered", engine=_Engine(memory, lm), cache=False, num_retries=0, **settings)


class _Engine:
    """DSPy's engine protocol over a memory."""

    supported_params = frozenset({"temperature", "max_tokens", "top_p"})

    def __init__(self, memory: Memory, lm: Callable[[], dspy.BaseLM]) -> None:
        self._memory = memory
        self._make = lm
        self._lm: dspy.BaseLM | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> _Engine:
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        text = self._memory.get(_key(messages_of(request)))
        if text is None:
            return self._ask(request)
        usage = lm15.Usage(input_tokens=0, output_tokens=0, total_tokens=0)
        message = lm15.Message.assistant([lm15.TextPart(text)])
        return lm15.Response(id=None, model=request.model, message=message, finish_reason="stop", usage=usage)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        yield from lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Nothing is held."""

    def _ask(self, request: lm15.Request) -> lm15.Response:
        if self._lm is None:
            self._lm = self._make()
        return cast(lm15.Response, self._lm(replace(request, model=self._lm.model)))


def messages_of(request: lm15.Request) -> Iterator[tuple[str, str]]:
    """Role and text of what DSPy sends, in order."""
    if request.system is not None:
        system = request.system
        yield "system", system if isinstance(system, str) else "".join(part.text for part in system)
    for message in request.messages:
        yield message.role, message.text or ""


def _key(messages: Iterable[tuple[str, str]]) -> str:
    return digest([list(message) for message in messages])
