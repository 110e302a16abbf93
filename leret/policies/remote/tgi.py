"""A policy behind Hugging Face's text-generation-inference, by its own route ``POST /generate`` (or ``POST /``).

Requests are made and answers read by the types of the ``text-generation`` package, so that they are its protocol and
not our idea of it. Its ``AsyncClient`` does not carry them: it opens a connection a call, drops Retry-After and the
count of the prompt's tokens, and knows ``POST /`` alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leret.core.errors import MissingDependency, PolicyError
from leret.core.types import digest
from leret.core.usage import UsageMeter
from leret.http.secrets import Key
from leret.policies.base import Completion, Request
from leret.policies.local.chat_template import ChatTemplate, load_template
from leret.policies.remote.chat import server_seed
from leret.policies.remote.dispatch import Dispatcher
from leret.policies.remote.replies import LONGEST_TOKEN, RefusedError, TryAgainError, logprobs_of
from leret.policies.remote.transport import Transport

_GENERATION_FAILED = 424
_INSTALL = "pip install --no-deps 'text-generation>=0.7,<0.8'"


class TgiPolicy:
    """Implements ``Policy``. The chat template is applied here, so that the server sees the trainer's tokens.

    Each sample of a prompt is a request with its own seed. With ``best_of`` they are one request; TGI takes no seed
    then, so that those samples cannot be drawn again. Log-probabilities are as TGI gives them: of the distribution that
    it drew from, after temperature and top-p.

    Args:
        model: directory of the served model, or its name.
        urls: the servers' roots; the least busy gets the next request, and one that fails rests for a while.
        tokenizer: directory (or hub name) with the tokenizer and its chat template; None takes ``model``.
        best_of: ask for the samples of a prompt together.
        enable_thinking: of the chat template; None leaves it to the template.
        api_key_env: environment variable that holds the key; None sends none.
        dispatch: of `Dispatcher`: ``timeout_s``, ``deadline_s``, ``concurrency``, ``max_retries``, prices.

    Raises:
        MissingDependency: the text-generation package is not installed.
        PolicyError: no URL is given, the key's variable is not set, or there is no tokenizer.
    """

    def __init__(
        self,
        model: str,
        urls: Sequence[str],
        *,
        tokenizer: str | None = None,
        best_of: bool = False,
        enable_thinking: bool | None = None,
        api_key_env: str | None = None,
        **dispatch: Any,
    ) -> None:
        if not urls:
            raise PolicyError("policy.urls is empty; give the server's root, as in http://127.0.0.1:3000")
        _client()
        self.model = model
        self.tokenizer = tokenizer
        self.best_of = best_of
        self.enable_thinking = enable_thinking
        self.api_key_env = api_key_env
        self._template = load_template(tokenizer or model, enable_thinking)
        self._dispatcher = Dispatcher([url.rstrip("/").removesuffix("/generate") for url in urls], **dispatch)
        self._transport = Transport(self._dispatcher, Key.of(api_key_env), frozenset({_GENERATION_FAILED}))
        self._root: set[str] = set()

    def __repr__(self) -> str:
        return f"TgiPolicy({self.model!r}, {list(self.urls)!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> TgiPolicy:
        # Programs are deep-copied by DSPy's optimizers; their connections are not.
        return self

    @property
    def name(self) -> str:
        """The served model's name; of a directory, its last part."""
        return Path(self.model).resolve().name if Path(self.model).is_dir() else self.model

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' roots."""
        return self._dispatcher.urls

    @property
    def meter(self) -> UsageMeter:
        """What was asked, what failed, what it cost."""
        return self._dispatcher.meter

    @property
    def template(self) -> ChatTemplate:
        """What makes a text of messages."""
        return self._template

    @property
    def digest(self) -> str:
        """Names the served model and its chat template, wherever it is served.

        The weights behind a name cannot be seen from here: serve new weights under a new name.
        """
        return digest("tgi", self.name, self._template.template)

    async def complete(self, request: Request) -> list[Completion]:
        """Complete one prompt.

        Returns:
            One completion a seed, in the order of the seeds.

        Raises:
            PolicyError: the server refused the request, or went on failing.
        """
        if not request.seeds:
            raise PolicyError("a request asks for no completion; give it one seed at least")
        inputs = self._template.inputs(request.messages)
        if request.temperature == 0:
            return (await self._ask(request, inputs, None, 1)) * len(request.seeds)
        if self.best_of and len(request.seeds) > 1:
            return await self._ask(request, inputs, None, len(request.seeds))
        if len(request.seeds) == 1:
            return await self._ask(request, inputs, request.seeds[0], 1)
        each = await asyncio.gather(*[self._ask(request, inputs, seed, 1) for seed in request.seeds])
        return [completion for one in each for completion in one]

    async def aclose(self) -> None:
        """Close the running event loop's connections. May be called twice."""
        await self._transport.aclose()

    async def _ask(self, request: Request, inputs: str, seed: int | None, n: int) -> list[Completion]:
        body = _body(request, inputs, seed, n)

        def read(told: bytes, url: str, headers: Mapping[str, str]) -> list[Completion]:
            counted = headers.get("x-prompt-tokens", "")
            n_prompt = int(counted) if counted.isdecimal() else self._template.n_tokens(inputs)
            return _completions(told, n, n_prompt, request, url)

        got = await self._transport.post(self._path, body, read, self._other_path)
        self.meter.wrote(got[0].n_prompt_tokens, sum(one.n_completion_tokens for one in got), n)
        return got

    def _path(self, url: str) -> str:
        return "/" if url in self._root else "/generate"

    def _other_path(self, url: str, status: int) -> bool:
        """Behind some gateways only ``POST /`` is open: found out once a server."""
        if status in {404, 405} and url not in self._root:
            self._root.add(url)
            return True
        return False


def _client() -> Any:
    """The text-generation package.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import text_generation
    except ImportError as error:
        raise MissingDependency("text-generation", "tgi", command=_INSTALL) from error
    return text_generation


def _body(request: Request, inputs: str, seed: int | None, n: int) -> dict[str, Any]:
    """The request as the client package makes it.

    Raises:
        RefusedError: the package finds it impossible.
    """
    from text_generation import types
    from text_generation.errors import ValidationError

    sampled = request.temperature > 0
    try:
        parameters = types.Parameters(
            do_sample=sampled,
            max_new_tokens=request.max_tokens,
            stop=list(request.stop),
            seed=None if seed is None else server_seed(seed),
            temperature=request.temperature if sampled else None,
            top_p=request.top_p if sampled and request.top_p < 1 else None,  # TGI refuses 1, which is its default
            best_of=n if n > 1 else None,
            details=True,
        )
        body: dict[str, Any] = types.Request(inputs=inputs, parameters=parameters).model_dump()
    except (ValidationError, ValueError) as error:
        raise RefusedError(f"TGI takes no such request ({error}); mend the policy's settings") from error
    return body


def _completions(told: bytes, n: int, n_prompt: int, request: Request, url: str) -> list[Completion]:
    """What TGI wrote: the best sequence first, then the others, where it was asked for several.

    Raises:
        TryAgainError: there is another number of sequences.
        Exception: one of `MALFORMED`; the answer is none of TGI's.
    """
    from text_generation import types

    value = json.loads(told)
    answer = types.Response(**(value[0] if isinstance(value, list) else value))
    sequences = [(answer.generated_text, answer.details)]
    sequences += [(other.generated_text, other) for other in answer.details.best_of_sequences or []]
    if len(sequences) != n:
        raise TryAgainError(f"{url} sent {len(sequences)} sequences for best_of={n}", "garbled")
    if max(len(text) for text, _ in sequences) > LONGEST_TOKEN * request.max_tokens:
        raise ValueError(f"too long a text for max_tokens={request.max_tokens}")
    return [_completion(text, details, n_prompt, request.stop) for text, details in sequences]


def _completion(text: str, details: Any, n_prompt: int, stop: Sequence[str]) -> Completion:
    ends = [found for found in (text.find(mark) for mark in stop) if found >= 0]  # TGI leaves the stop string in
    logprobs = [token.logprob for token in details.tokens]
    return Completion(
        text=text[: min(ends)] if ends else text,
        finish_reason="length" if details.finish_reason.value == "length" else "stop",
        n_prompt_tokens=n_prompt,
        n_completion_tokens=details.generated_tokens,
        token_ids=tuple(token.id for token in details.tokens) or None,
        logprobs=None if not logprobs or None in logprobs else logprobs_of(logprobs),
    )
