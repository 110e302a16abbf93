"""The samples of a prompt through a chat completions route, whoever carries the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from leret.core.errors import PolicyError
from leret.core.types import digest
from leret.core.usage import UsageMeter
from leret.policies.base import Completion, Request
from leret.policies.remote.replies import RefusedError

Send = Callable[[dict[str, Any], int | None], Awaitable[list[Completion]]]
"""Carries a body; insists on so many choices, or takes as many as come (None)."""


class Chat:
    """Whether the server makes several choices of one prompt is found by asking it, never assumed: some ignore ``n``.

    Where it does, the samples of a prompt are one request, whose seed is derived from theirs, and the server decides
    how they differ: a sample then depends on the seeds it was asked together with. Where it does not, each sample is a
    request with its own seed.

    Args:
        model: its name on the server.
        send: carries a request.
        meter: counts tokens.
        logprobs: ask for the log-probabilities of the chosen tokens; the value that says so.
        id_extension: ask for token ids beside log-probabilities in vLLM's way, which strict servers refuse.
        enable_thinking: for the server's chat template; None sends nothing.
    """

    def __init__(
        self,
        model: str,
        send: Send,
        meter: UsageMeter,
        *,
        logprobs: bool | int = False,
        id_extension: bool = True,
        enable_thinking: bool | None = None,
    ) -> None:
        self._model = model
        self._send = send
        self._meter = meter
        self._logprobs = logprobs
        self._token_ids = bool(logprobs) and id_extension
        self._takes_n: bool | None = None  # whether the server honours n
        self._enable_thinking = enable_thinking
        self._probing: asyncio.Task[bool] | None = None

    async def complete(self, request: Request) -> list[Completion]:
        """Complete one prompt.

        Returns:
            One completion a seed, in the order of the seeds.

        Raises:
            PolicyError: the server refused the request, or went on failing.
        """
        if not request.seeds:
            raise PolicyError("a request asks for no completion; give it one seed at least")
        seeds = request.seeds if request.temperature > 0 else request.seeds[:1]
        if len(seeds) == 1:
            completions = await self._ask(request, seeds[0])
        else:
            completions = await self._several(request, seeds)
        return completions if request.temperature > 0 else completions * len(request.seeds)

    async def _several(self, request: Request, seeds: tuple[int, ...]) -> list[Completion]:
        together = self._takes_n if self._takes_n is not None else await self._probe(request)
        if together:
            try:
                return await self._ask(request, int(digest("joint seed", list(seeds))[:16], 16), len(seeds))
            except RefusedError:
                # Perhaps so many choices are too many; if it is the request itself, one choice is refused as well.
                completions = await self._one_by_one(request, seeds)
                self._takes_n = False
                return completions
        return await self._one_by_one(request, seeds)

    async def _one_by_one(self, request: Request, seeds: tuple[int, ...]) -> list[Completion]:
        each = await asyncio.gather(*[self._ask(request, seed) for seed in seeds])
        return [completion for one in each for completion in one]

    async def _probe(self, request: Request) -> bool:
        """Two choices asked for: two choices back? Asked once, on the first prompt, for all who wait."""
        if self._probing is None or self._probing.get_loop() is not asyncio.get_running_loop():
            self._probing = asyncio.get_running_loop().create_task(self._ask_for_two(request))
        task = self._probing
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and self._probing is task:
                self._probing = None

    async def _ask_for_two(self, request: Request) -> bool:
        try:
            got = await self._send(self._body(Request(request.messages, (0,), 1.0, 1), 0, 2), None)
            self._takes_n = len(got) == 2
        except RefusedError:
            self._takes_n = False  # if the request itself is at fault, the samples will say so
        return self._takes_n

    async def _ask(self, request: Request, seed: int, n: int = 1) -> list[Completion]:
        try:
            got = await self._send(self._body(request, seed, n), n)
        except RefusedError:
            if not self._token_ids:
                raise
            # An extension that strict servers refuse; if it is something else, it is refused again.
            self._token_ids = False
            try:
                got = await self._send(self._body(request, seed, n), n)
            except RefusedError:
                self._token_ids = True
                raise
        self._meter.wrote(got[0].n_prompt_tokens, sum(one.n_completion_tokens for one in got), n)
        return got

    def _body(self, request: Request, seed: int, n: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": request.messages,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            "seed": server_seed(seed),
        }
        if n > 1:
            body["n"] = n
        if request.stop:
            body["stop"] = list(request.stop)
        if self._logprobs:
            body["logprobs"] = self._logprobs
        if self._token_ids:
            body["return_token_ids"] = True
        if self._enable_thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._enable_thinking}
        return body


def server_seed(seed: int) -> int:
    """A seed of 31 bits for one of 63: not every server takes those."""
    return int(digest("seed", seed)[:8], 16) >> 1
