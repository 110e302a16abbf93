"""Request keys that a server refuses.

They are found by errors or by trial, left out or renamed, and remembered.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from leret.http.client import RejectedError

T = TypeVar("T")
Body = dict[str, Any]
Ask = Callable[[Body], Awaitable[T]]

_LOG = logging.getLogger("leret")

_WITHOUT = {
    "return_token_ids": "the server sends no token ids; training tokenizes the text of completions",
    "chat_template_kwargs": "policy.enable_thinking has no effect; the server's chat template "
    "decides",
    "logprobs": "no log-probabilities are stored",
    "n": "each sample is a separate request",
    "seed": "the same request can give another completion, so a repeated run differs",
    "stop": "leret cuts completions at stop strings, but the tokens after them are paid for",
    "top_p=1": "the server's default applies, usually 1",
    "top_p": "completions are drawn with the server's top_p, usually 1, instead of policy.top_p",
    "temperature=1": "the server's default applies, usually 1",
    "temperature": "completions are drawn at the server's temperature, usually 1: greedy "
    "evaluation varies, and grpo, rloo and ppo train as if it were the recipe's temperature, so "
    "set temperature to 1",
    "max_tokens": "leret sends max_completion_tokens instead",
    "max_completion_tokens": "completions end at the server's own limit",
}
"""Optional keys in the order of trials, each with the consequence of leaving it out."""

_NEW_LIMIT = "max_completion_tokens"  # OpenAI's new name of max_tokens
# the user must fix a wrong value of these
_SAMPLING = {"max_tokens", "max_completion_tokens", "temperature", "top_p"}
_STATUSES = {400, 422, 500, 501}

TOO_LONG = re.compile(
    r"(?i)context.(length|size|window)|maximum model length|`inputs` (must have less|tokens \+)"
)
"""Error messages of servers for a prompt that is too long."""

TEMPLATE = re.compile(r"(?i)roles? must|jinja|chat.template(?!_kwargs)|template.?error")
"""Error messages of servers with a chat template that refuses the messages."""

UNFINISHED = re.compile(r"(?i)could not finish the message")
"""Error message of OpenAI if the model's reasoning needs more tokens than the limit."""

_OF_PROMPT = re.compile(r"(param|loc)\W+(body\W+)?(messages|model|tools)\b")
_OF_VALUE = re.compile(
    r"(?i)too (large|long|small|high|low|many)|at (most|least)|exceed|must be|(less|greater|more) than|maximum|minimum"
    r"|out of range|between|reduce|higher"
)
_OF_KEY = re.compile(r"(?i)not supported|unsupported|does not support|not permitted|extra")


@cache
def refusals_of(urls: tuple[str, ...], model: str) -> Refusals:
    """Return the refused keys that all policies with these servers and this model share."""
    return Refusals(urls[0])


@cache  # one note per key and server
def _note(server: str, name: str) -> None:
    _LOG.warning(
        "%s refuses the request key %s: %s", server, name.partition("=")[0], _WITHOUT[name]
    )


class Refusals:
    """Refused keys of requests to a server.

    A key is refused if the same request without it succeeds.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self.names: frozenset[str] = frozenset()  # in `_WITHOUT`
        self._accepted: set[str] = set()
        self._locks: Any = WeakKeyDictionary()  # by event loop

    async def send(self, body: Body, ask: Ask[T]) -> T:
        """Send a request without refused keys, and return the answer. ``ask`` sends a request.

        Raises:
            RejectedError: the request is refused for another reason.
        """
        sent = _without(body, self.names)
        try:
            answer = await ask(sent)
        except RejectedError as error:
            if self._suspect(error, sent) is None:
                raise
            refusal = error
        else:
            self._accepted.update(map(_name, sent, sent.values()))
            return answer
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if sent == _without(body, self.names):  # else another request found the key meanwhile
                return await self._search(body, refusal, ask)
        return await self.send(body, ask)

    async def _search(self, body: Body, refusal: RejectedError, ask: Ask[T]) -> T:
        """Leave out one key after the other until a request succeeds.

        Then add those that the server accepts.
        """
        error = refusal
        refused = list(self.names)
        while True:
            name = self._suspect(error, _without(body, refused))
            if name is None:
                raise refusal
            refused.append(name)
            try:
                answer = await ask(_without(body, refused))
                break
            except RejectedError as another:
                error = another
        for name in refused[len(self.names) : -1]:  # the last is certainly refused
            with suppress(RejectedError):
                answer = await ask(_without(body, {*refused} - {name}))
                refused.remove(name)
        for name in refused:
            if name != "max_tokens" or _NEW_LIMIT not in refused:
                _note(self._server, name)
        self.names = frozenset(refused)
        return answer

    def _suspect(self, error: RejectedError, sent: Body) -> str | None:
        """Return the key that the server probably refuses: from its error, or the next to try."""
        text = str(error).partition(" answered ")[2]
        of_others = (TOO_LONG, TEMPLATE, UNFINISHED, _OF_PROMPT)
        if error.status not in _STATUSES or any(pattern.search(text) for pattern in of_others):
            return None
        names = {key: _name(key, value) for key, value in sent.items()}
        suspects = [
            name for name in _WITHOUT if name in names.values() and name not in self._accepted
        ]
        named = [names[word] for word in re.findall(r"\w+", text) if names.get(word) in suspects]
        if not named:
            return next(iter(suspects), None)
        is_of_value = _OF_VALUE.search(text) and not _OF_KEY.search(text)
        return None if is_of_value and named[0] in _SAMPLING else named[0]


def _name(key: str, value: Any) -> str:
    return f"{key}=1" if value == 1 and key in {"temperature", "top_p"} else key


def _without(body: Body, refused: Collection[str]) -> Body:
    """Return a request without refused keys; ``max_tokens`` gets its new name instead."""
    sent = {key: value for key, value in body.items() if _name(key, value) not in refused}
    if "max_tokens" in refused and _NEW_LIMIT not in refused:
        sent[_NEW_LIMIT] = body["max_tokens"]
    return sent
