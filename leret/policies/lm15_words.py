"""What DSPy's engines are asked, in leret's words, and leret's failures in DSPy's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, cast

from dspy import lm15

from leret.errors import LeretError
from leret.policies.base import Messages
from leret.policies.replies import PromptTooLongError

__all__ = ["as_lm15", "messages_of", "refuse_unsupported"]


def messages_of(request: lm15.Request) -> Messages:
    """Text messages in order; the system's first.

    Raises:
        dspy.lm15.UnsupportedFeatureError: there is more than text in them.
    """
    messages: list[dict[str, str]] = []
    if request.system is not None:
        parts = request.system
        text = parts if isinstance(parts, str) else "".join(_text(part) for part in parts)
        messages.append({"role": "system", "content": text})
    for message in request.messages:
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": "".join(_text(part) for part in message.parts)})
    return tuple(messages)


def _text(part: Any) -> str:
    if not isinstance(part, lm15.TextPart):
        raise lm15.UnsupportedFeatureError(
            f"a leret policy reads text alone, and the prompt holds a {type(part).__name__}", feature="messages"
        )
    return cast(str, part.text)


def refuse_unsupported(request: lm15.Request, extensions: dict[str, Any]) -> None:
    """Say what a policy cannot do instead of leaving it out.

    Raises:
        dspy.lm15.UnsupportedFeatureError: it is asked for.
    """
    config = request.config
    asked = {
        "tools": request.tools,
        "response_format": config.response_format,
        "top_k": config.top_k,
        "frequency_penalty": config.frequency_penalty,
        "presence_penalty": config.presence_penalty,
        "logprobs": config.logprobs is not None,
        "reasoning": config.reasoning,
        **extensions,
    }
    refused = sorted(name for name, value in asked.items() if value)
    if refused:
        raise lm15.UnsupportedFeatureError(
            f"a leret policy does not take {', '.join(refused)}; leave it out, or serve the model and use dspy.LM",
            feature=refused[0],
        )


@contextmanager
def as_lm15() -> Iterator[None]:
    """A policy's failures in the words that DSPy's retries and callers understand."""
    try:
        yield
    except PromptTooLongError as error:
        raise lm15.ContextLengthError(str(error)) from error
    except (LeretError, CancelledError) as error:
        raise lm15.ProviderError(str(error) or "the policy's engine was closed while it was asked") from error
