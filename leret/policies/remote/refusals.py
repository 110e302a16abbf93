"""Request keys that a server refuses: found by its errors or by trial, left out or renamed, and remembered."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
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
    "chat_template_kwargs": "policy.enable_thinking has no effect; the server's chat template decides",
    "logprobs": "no log-probabilities are stored",
    "n": "each sample is a separate request",
    "seed": "the same request can give another completion, so a repeated run differs",
    "stop": "leret cuts completions at stop strings, but the tokens after them are paid for",
    "top_p=1": "the server's default applies, usually 1",
    "top_p": "completions are drawn with the server's top_p, usually 1, instead of policy.top_p",
    "temperature=1": "the server's default applies, usually 1",
    "temperature": "completions are drawn at the server's temperature, usually 1: greedy evaluation varies, and grpo, "
    "rloo and ppo train as if it were the recipe's temperature, so set temperature to 1",
    "max_tokens": "leret sends max_completion_tokens instead",
    "max_completion_tokens": "completions end at the server's own limit",
}
"""Optional keys in the order of trials, each with the consequence of leaving it out."""

_RENAMED = {"max_tokens": "max_completion_tokens"}
_SAMPLING = {"max_tokens", "max_completion_tokens", "temperature", "top_p"}  # the user must fix a wrong value of these
_STATUSES = {400, 422, 500, 501}

TOO_LONG = re.compile(r"(?i)context.(length|size|window)|maximum model length|`inputs` (must have less|tokens \+)")
"""Error messages of vLLM, SGLang, llama.cpp, OpenAI, TGI and Together for a prompt that is too long."""

TEMPLATE = re.compile(r"(?i)roles? must|jinja|chat.template(?!_kwargs)|template.?error")
"""Error messages of servers with a chat template that refuses the messages."""

_OF_PROMPT = re.compile(r"(param|loc)\W+(body\W+)?(messages|model|tools)\b")
_OF_VALUE = re.compile(
    r"(?i)too (large|long|small|high|low|many)|at (most|least)|exceed|must be|(less|greater|more) than|maximum|minimum"
    r"|out of range|between|reduce|higher"
)
_OF_KEY = re.compile(r"(?i)not supported|unsupported|does not support|not permitted|extra")
_INPUT = re.compile(r"""['"]input['"]""")  # pydantic repeats the request after it


@cache
def refusals_of(urls: tuple[str, ...], model: str) -> Refusals:
    """Return the refused keys that all policies with these servers and this model share in this process."""
    return Refusals(urls[0])


@cache  # one note per key and server
def _note(server: str, name: str) -> None:
    _LOG.warning("%s refuses the request key %s: %s", server, name.partition("=")[0], _WITHOUT[name])


class Refusals:
    """Refused keys of requests to a server. A key is refused if the same request without it succeeds."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._refused = frozenset[str]()  # names in `_WITHOUT`
        self._accepted: set[frozenset[str]] = set()  # names of the keys of requests that succeeded
        self._locks: Any = WeakKeyDictionary()  # by event loop

    async def send(self, body: Body, ask: Ask[T]) -> T:
        """Send a request without refused keys, and return the answer. ``ask`` sends a request.

        Raises:
            RejectedError: the request is refused for another reason.
        """
        sent = _without(body, self._refused)
        try:
            answer = await ask(sent)
        except RejectedError as error:
            if self._suspect(error, sent) is None:
                raise
            refusal = error
        else:
            self._accepted.add(_names(sent))
            return answer
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if sent == _without(body, self._refused):  # else another request found the key meanwhile
                return await self._search(body, refusal, ask)
        return await self.send(body, ask)

    async def _search(self, body: Body, refusal: RejectedError, ask: Ask[T]) -> T:
        """Leave out one key after the other until a request succeeds. Then add those that the server accepts."""
        error, left_out = refusal, list[str]()
        sent = _without(body, self._refused)
        while True:
            name = self._suspect(error, sent)
            if name is None:
                raise refusal
            left_out.append(name)
            sent = _without(body, self._refused.union(left_out))
            try:
                answer = await ask(sent)
                break
            except RejectedError as another:
                error = another
        for name in left_out[:-1]:  # the last is certainly refused
            fewer = self._refused.union(left_out) - {name}
            with suppress(RejectedError):
                answer = await ask(_without(body, fewer))
                left_out.remove(name)
        for name in left_out:
            if _RENAMED.get(name) not in left_out:
                _note(self._server, name)
        self._refused = self._refused.union(left_out)
        self._accepted.add(_names(_without(body, self._refused)))
        return answer

    def _suspect(self, error: RejectedError, sent: Body) -> str | None:
        """Return the name of the key that the server probably refuses: the one in its error, or the next to try."""
        text = _INPUT.split(error.body)[0].replace("\\n", " ")
        of_others = (TOO_LONG, TEMPLATE, _OF_PROMPT)
        if error.status not in _STATUSES or any(pattern.search(text) for pattern in of_others):
            return None
        optional = {key: _name(key, value) for key, value in sent.items() if _name(key, value) in _WITHOUT}
        words = re.findall(r"(?<!\\)\b\w+", text)
        name = next((optional[word] for word in words if word in optional), None)
        if name is None:
            untried = [] if _names(sent) in self._accepted else _WITHOUT
            return next((name for name in untried if name in optional.values()), None)
        is_of_value = _OF_VALUE.search(text) and not _OF_KEY.search(text)
        return None if is_of_value and name in _SAMPLING else name


def _name(key: str, value: Any) -> str:
    return f"{key}=1" if value == 1 and key in {"temperature", "top_p"} else key


def _names(sent: Body) -> frozenset[str]:
    return frozenset(map(_name, sent, sent.values()))


def _without(body: Body, refused: frozenset[str]) -> Body:
    """Return a request without refused keys; a renamed key takes the place of a refused one."""
    sent = {key: value for key, value in body.items() if _name(key, value) not in refused}
    for key, new in _RENAMED.items():
        if key in refused and new not in refused:
            sent[new] = body[key]
    return sent
