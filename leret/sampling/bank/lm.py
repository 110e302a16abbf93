"""Completions that are known already, as an LM of DSPy.

The zero-shot runs that set the bank's threshold were batched; bootstrapping goes through the same questions with the
same prompts, one call after another. This LM saves those calls and their waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import dspy

from leret.core.dspy_internals import EngineLM, lm15, messages_of, text_response
from leret.core.types import Rollout, digest


def cached_completion_lm(rollouts: Iterable[Rollout], make_lm: Callable[[], dspy.BaseLM], **settings: Any) -> dspy.LM:
    """An LM that answers from rollouts, and asks another one for prompts that are not in them."""
    completions = {digest(list(hop.messages)): hop.completion for rollout in rollouts for hop in rollout.hops}
    made: list[dspy.BaseLM] = []

    def answer(request: lm15.Request) -> lm15.Response:
        text = completions.get(digest(list(messages_of(request))))
        if text is not None:
            return text_response(request, text)
        if not made:
            made.append(make_lm())
        return cast(lm15.Response, made[0](replace(request, model=made[0].model)))

    return EngineLM("cached", answer, **settings)
