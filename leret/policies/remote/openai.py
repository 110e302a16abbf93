"""Policy on OpenAI-compatible chat completion servers: vLLM, SGLang, TGI, llama.cpp, OpenAI, Together AI."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from leret.core.errors import PolicyError
from leret.core.types import SharedInstance, digest
from leret.http.client import Answer, Call, Client, HttpError, RejectedError, RetryableError, error_text, one_line
from leret.http.endpoints import ApiKey
from leret.http.usage import UsageMeter
from leret.policies.base import Completion, PromptTooLongError, Request
from leret.policies.local.chat_template import before_stop
from leret.policies.tool_calls import split_tools, write_calls

if TYPE_CHECKING:
    from leret.config.policy import OpenAIPolicySettings, TgiPolicySettings, TogetherPolicySettings

_LONGEST_TOKEN = 128  # maximum characters per token (a run of spaces); a longer text is not a completion
_SEED_BITS = 2**31 - 1  # bits of a 63-bit seed that are sent: some servers reject larger numbers
LIST_S = 3.0  # timeout for the list of models
_FINISHED = frozenset({"stop", "length", "eos", "eos_token", "stop_sequence", "tool_calls", None})
"""Finish reasons of OpenAI, Together and TGI; some servers send no reason."""

_TOO_LONG = re.compile(r"(?i)context.(length|size|window)|maximum model length|`inputs` (must have less|tokens \+)")
"""Error messages of vLLM, SGLang, llama.cpp, OpenAI, TGI and Together for a prompt that is too long."""

_LARGEST_ID = 2**31 - 1  # the store keeps 32 bits
_ROUNDING = 1e-3  # maximum of a log-probability: half precision rounds some to above 0


class OpenAIPolicy(SharedInstance):
    """Chat completions from OpenAI-compatible servers.

    One HTTP request asks for all samples of a prompt, with a single seed derived from the samples' seeds. If the server
    rejects or ignores ``n`` in a one-token test request, each sample is a separate request with its seed.
    """

    def __init__(self, settings: OpenAIPolicySettings | TgiPolicySettings | TogetherPolicySettings) -> None:
        self.settings = settings
        self.name = settings.model
        # A client cannot see a server's weights, only their name: new weights must have a new name.
        self.digest = digest(settings.kind, settings.model)
        self.meter = UsageMeter(settings.price_prompt, settings.price_completion)
        self.client = Client(
            settings.urls,
            setting="policy",
            key=ApiKey.from_env(settings.api_key_env, "policy.api_key_env"),
            timeout_s=settings.timeout_s,
            retry_for_s=settings.retry_for_s,
            concurrency=settings.concurrency,
            meter=self.meter,
        )
        tokens = settings.model_copy(update={"logprobs": True})
        self._extensions = {False: settings.request_keys(), True: tokens.request_keys()}  # by `Request.logprobs`
        self._refused: set[str] = set()  # optional keys that the servers have rejected
        self._takes_n: bool | None = None  # None before the probe
        self._probe: asyncio.Task[bool] | None = None

    async def complete(self, request: Request) -> list[Completion]:
        seeds = request.seeds if request.temperature > 0 else request.seeds[:1]
        if not seeds:
            raise PolicyError("the request has no seeds; pass one seed per completion")
        try:
            completions = await (self._ask(request, seeds) if len(seeds) == 1 else self._ask_several(request, seeds))
        except HttpError as error:
            raise policy_error(error) from error
        return completions if request.temperature > 0 else completions * len(request.seeds)

    async def check(self) -> None:
        """Check that the server answers, accepts the key and knows the model.

        If the model is not in the server's list of models, request a completion of one token.
        """
        served = await self.served()
        if self.name in served:
            return
        message = {"role": "user", "content": "Hello"}
        try:
            await self.complete(Request((message,), (0,), self.settings.temperature, 1, self.settings.top_p))
        except PolicyError as error:
            if getattr(error.__cause__, "kind", "") in {"incomplete", "timeout"}:  # it is slow, or needs more tokens
                return
            hint = f"; it serves {', '.join(served)}" if served else ""
            if getattr(error.__cause__, "status", 0) in {404, 405} and "/v1" not in self.client.urls[0]:
                hint += "; make policy.urls end in /v1"
            error.args = (f"{error}{hint}",)
            raise

    async def served(self) -> list[str]:
        """Return the names of the server's models; empty if it lists none. Raise PolicyError if it is unreachable."""
        try:
            return await self.client.request(Call("GET", "/models"), _model_names, timeout_s=LIST_S, retry_for_s=LIST_S)
        except HttpError as error:
            if error.kind in {"rejected", "malformed"}:
                return []
            raise policy_error(error) from error

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _ask_several(self, request: Request, seeds: tuple[int, ...]) -> list[Completion]:
        if await self._honours_n(request):
            with suppress(RejectedError):  # if the request is invalid, the calls below are rejected too
                completions = await self._ask(request, seeds)
                if len(completions) == len(seeds):
                    return completions
        each = await asyncio.gather(*[self._ask(request, (seed,)) for seed in seeds])
        self._takes_n = False
        return [completion for one in each for completion in one]

    async def _honours_n(self, request: Request) -> bool:
        """Return whether the server sends two choices for ``n=2``; all waiting requests share one test request."""
        if self._takes_n is not None:
            return self._takes_n
        if self._probe is None or self._probe.get_loop() is not asyncio.get_running_loop():
            self._probe = asyncio.get_running_loop().create_task(self._request_two(request))
        task = self._probe
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and self._probe is task:
                self._probe = None

    async def _request_two(self, request: Request) -> bool:
        body = {
            "model": self.name,
            "messages": split_tools(request.messages)[0],
            "temperature": 1.0,
            "max_tokens": 1,
            "n": 2,
        }
        try:
            call = Call("POST", "/chat/completions", json=body)
            self._takes_n = await self.client.request(call, lambda answer: len(answer.json["choices"])) == 2
        except RejectedError:
            self._takes_n = False  # an invalid request is rejected again when samples are requested
        return self._takes_n

    async def _ask(self, request: Request, seeds: tuple[int, ...]) -> list[Completion]:
        n = len(seeds)
        seed = seeds[0] if n == 1 else int(digest("joint seed", list(seeds))[:16], 16)
        body: dict[str, Any] = {
            "model": self.name,
            **({"messages": request.messages} if "tools" not in request.messages[0] else _with_tools(request)),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            "seed": seed & _SEED_BITS,
            **self._extensions[request.logprobs],
        }
        if request.token_ids:
            body |= self.settings.id_keys
        if n > 1:
            body["n"] = n
        if request.stop:
            body["stop"] = list(request.stop)
        for key in self._refused:
            if key != "top_p" or request.top_p == 1:
                body.pop(key, None)
        read = partial(completions_of, n=n, max_tokens=request.max_tokens, stop=request.stop, meter=self.meter)
        try:
            return await self.client.request(Call("POST", "/chat/completions", json=body), read)
        except RejectedError as error:
            refused = {"return_token_ids"} & set(body)  # an extension of vLLM, which strict servers reject
            if body.get("top_p") == 1 and "top_p" in str(error):  # TGI rejects the default
                refused.add("top_p")
            if not refused:
                raise
            fewer = {key: value for key, value in body.items() if key not in refused}
            completions = await self.client.request(Call("POST", "/chat/completions", json=fewer), read)
            self._refused |= refused  # only after success: an invalid request fails above
        return completions


def _with_tools(request: Request) -> dict[str, Any]:
    messages, tools = split_tools(request.messages)
    return {"messages": messages, "tools": tools}


def _model_names(answer: Answer) -> list[str]:
    models = answer.json  # Together sends a list instead of an object
    return [str(model["id"]) for model in (models["data"] if isinstance(models, dict) else models)]


def policy_error(error: HttpError) -> PolicyError:
    """Convert a failed HTTP request to a PolicyError."""
    message = str(error)
    if isinstance(error, RejectedError) and error.status in {400, 413, 422} and _TOO_LONG.search(message):
        return PromptTooLongError(f"{message}; send fewer or shorter passages and demos")
    failure = PolicyError(message)
    failure.exit_code = error.exit_code
    return failure


def completions_of(
    answer: Answer, n: int, max_tokens: int, stop: Sequence[str] = (), meter: UsageMeter | None = None
) -> list[Completion]:
    """Return the completions in an answer, in the order of their index; some servers send fewer than ``n``.

    If the answer has one token count for all completions together, the count is divided in proportion to the lengths of
    their texts. Texts end before the first ``stop`` string (TGI includes it in the text).

    Raises:
        RetryableError: the server failed to generate. A body of unexpected shape raises one of `MALFORMED`.
    """
    body = answer.json
    if body.get("error"):
        raise RetryableError(f"{answer.url} sent status 200 with an error: {error_text(answer.body)}", "server")
    choices: list[dict[str, Any]] = body["choices"]
    if not 1 <= len(choices) <= n:
        raise answer.malformed(f"{len(choices)} choices for n={n}")
    usage = body.get("usage") or {}
    n_prompt, n_written = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    if min(n_prompt, n_written) < 0:
        raise ValueError("a token count is below 0")
    counts = [n_written]
    if len(choices) > 1:
        choices = _by_index(choices)
        counts = shared([len(_text(choice["message"]) or "") for choice in choices], n_written)
    completions = []
    for choice, count in zip(choices, counts, strict=True):
        message, reason = choice["message"], choice.get("finish_reason")
        text = _text(message) if message.get("tool_calls") else message.get("content")
        is_text = isinstance(text, str) and 0 < len(text) <= _LONGEST_TOKEN * max_tokens
        if not is_text or reason not in _FINISHED or choice.get("error"):
            _check_choice(choice, max_tokens, answer.url)
        ids = logprobs = None
        if choice.get("logprobs") is not None or choice.get("token_ids") is not None:
            ids, logprobs = _tokens(choice)
        tokens = logprobs if ids is None else ids
        n_tokens = count if tokens is None else len(tokens)
        is_cut = reason == "length" or (reason is None and n_tokens >= max_tokens)
        finish = "length" if is_cut else "stop"
        text = before_stop(text, stop) if stop else text
        completions.append(Completion(text, finish, n_prompt, n_tokens, ids, logprobs))
    if meter is not None:
        meter.answered(answer.seconds, n_prompt, sum([one.n_completion_tokens for one in completions]), n)
    return completions


def _by_index(choices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len({choice.get("index", place) for place, choice in enumerate(choices)}) < len(choices):
        raise ValueError("two choices have the same index")
    return sorted(choices, key=lambda choice: choice.get("index", 0))


def _text(message: Mapping[str, Any]) -> Any:
    """Return a message's content; tool calls that the server parsed follow it as text."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if not functions:
        return message.get("content")
    return write_calls(message.get("content") or "", [(one["name"], one["arguments"]) for one in functions])


def _check_choice(choice: Mapping[str, Any], max_tokens: int, url: str) -> None:
    """Raise an error if a choice is not a valid completion."""
    message, reason = choice["message"], choice.get("finish_reason")
    text, error = _text(message), choice.get("error")
    if error or reason not in _FINISHED:
        fault = f"error {one_line(str(error))}" if error else f"finish_reason {one_line(str(reason))}"
        raise RetryableError(f"{url} sent a completion with {fault}", "incomplete")
    if not text and (message.get("reasoning_content") or message.get("reasoning")):
        raise RetryableError(
            f"{url} sent reasoning without content (finish_reason {reason}); increase policy.max_tokens, or turn off "
            "the model's reasoning or the server's reasoning parser",
            "incomplete",
        )
    if not isinstance(text, str):
        raise TypeError("message.content is not text")
    if len(text) > _LONGEST_TOKEN * max_tokens:
        raise ValueError(f"a text of {len(text)} characters exceeds max_tokens={max_tokens}")


def _tokens(choice: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    table, ids = choice.get("logprobs") or {}, choice.get("token_ids")
    ids = table.get("token_ids") if ids is None else ids
    values = table.get("token_logprobs")
    if values is None and table.get("content") is not None:
        values = [token["logprob"] for token in table["content"]]
    if values is not None and not all(float(value) <= _ROUNDING for value in values):
        raise ValueError("a log-probability is above 0 or not a number")
    if ids is not None and not all(abs(int(token)) <= _LARGEST_ID for token in ids):
        raise ValueError("a token id does not fit 32 bits")
    return None if ids is None else tuple(map(int, ids)), None if values is None else tuple(map(float, values))


def shared(lengths: Sequence[int], total: int) -> list[int]:
    """Split ``total`` in proportion to ``lengths``, into integers with the sum ``total``.

    >>> shared([1, 1, 2], 10)
    [2, 3, 5]
    """
    weights = lengths if any(lengths) else [1] * len(lengths)
    ends = [total * end // sum(weights) for end in accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
