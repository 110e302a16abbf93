"""Policy on OpenAI-compatible servers: vLLM, SGLang, TGI, llama.cpp, OpenAI, Together AI."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from leret.core.aio import gathered
from leret.core.errors import PolicyError
from leret.core.types import SharedInstance, digest
from leret.http.client import (
    Answer,
    Call,
    Client,
    HttpError,
    RejectedError,
    RetryableError,
    error_text,
    one_line,
)
from leret.http.endpoints import ApiKey
from leret.http.usage import FaultMeter
from leret.policies.base import Completion, PromptTooLongError, Request
from leret.policies.local.chat_template import before_stop
from leret.policies.remote.refusals import TEMPLATE, TOO_LONG, UNFINISHED, refusals_of
from leret.policies.tool_calls import split_tools, write_calls

if TYPE_CHECKING:
    from leret.config.policy import OpenAIPolicySettings, TgiPolicySettings, TogetherPolicySettings

# maximum characters per token (a run of spaces); a longer text is not a completion
_LONGEST_TOKEN = 128
_SEED_BITS = 2**31 - 1  # bits of a 63-bit seed that are sent: some servers reject larger numbers
LIST_S = 3.0  # timeout for the list of models
_STOPPED = re.compile(
    r"|stop|eos|(eos|stop)_token|stop_sequence|end(_turn)?|tool_(calls|use)|function_call|done|(complete|finish)(d|ed)?"
)
"""Finish reasons, in lower case, of servers for a completion that ended.

Some servers send no reason.
"""

_CUT = re.compile(r"length|max_|token_limit")
"""Finish reasons for a completion that a limit cut: length, MAX_TOKENS, max_output_tokens."""

_FILTERED = re.compile(
    r"filter|safety|recitation|refus|block|prohibited|sensitive|moderation|flagged"
)
"""Finish reasons for a completion that a content filter ended."""

_REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message

_LARGEST_ID = 2**31 - 1  # the store keeps 32 bits
_ROUNDING = 1e-3  # maximum of a log-probability: half precision rounds some to above 0


class OpenAIPolicy(SharedInstance):
    """Chat completions from OpenAI-compatible servers.

    One HTTP request asks for all samples of a prompt, with a single seed derived from the samples'
    seeds. Once the server has rejected or ignored ``n``, each sample is a separate request with its
    seed.
    """

    def __init__(
        self, settings: OpenAIPolicySettings | TgiPolicySettings | TogetherPolicySettings
    ) -> None:
        self.settings = settings
        self.name = settings.model
        # A client cannot see a server's weights, only their name: new weights must have a new name.
        body = settings.extra_body
        self.digest = (
            digest(settings.kind, settings.model, body)
            if body
            else digest(settings.kind, settings.model)
        )
        self.meter = FaultMeter()
        self.client = client_of(settings, "policy", self.meter)
        tokens = settings.model_copy(update={"logprobs": True})
        self._extensions = {  # by `Request.logprobs`
            False: settings.merged_body(settings.request_keys()),
            True: settings.merged_body(tokens.request_keys()),
        }
        self._refusals = refusals_of(tuple(settings.urls), settings.model)
        # of requests that the server accepts as they are
        self._shapes: set[tuple[Any, ...]] = set()
        self._takes_n = True

    async def complete(self, request: Request) -> list[Completion]:
        seeds = request.seeds if request.temperature > 0 else request.seeds[:1]
        try:
            if len(seeds) == 1:
                completions = await self._ask(request, seeds)
            else:
                completions = await self._ask_several(request, seeds)
        except HttpError as error:
            raise policy_error(error) from error
        if request.temperature > 0:
            return completions
        return completions * len(request.seeds)

    async def check(self) -> None:
        """Check that the server answers, accepts the key and knows the model.

        If the model is not in the server's list of models, request a completion of one token.
        """
        served = await self.served()
        if self.name in served:
            return
        message = {"role": "user", "content": "Hello"}
        try:
            await self.complete(
                Request((message,), (0,), self.settings.temperature, 1, self.settings.top_p)
            )
        except PolicyError as error:
            is_slow = getattr(error.__cause__, "kind", "") in {"incomplete", "timeout"}
            if is_slow or UNFINISHED.search(str(error)):  # it needs more time or tokens
                return
            hint = f"; it serves {', '.join(served)}" if served else ""
            if (
                getattr(error.__cause__, "status", 0) in {404, 405}
                and "/v1" not in self.client.urls[0]
            ):
                hint += "; make policy.urls end in /v1"
            error.args = (f"{error}{hint}",)
            raise

    async def served(self) -> list[str]:
        """Return the names of the server's models; empty if it lists none.

        Raise PolicyError if it is unreachable.
        """
        try:
            return await self.client.request(
                Call("GET", "/models"), _model_names, timeout_s=LIST_S, retry_for_s=LIST_S
            )
        except HttpError as error:
            if error.kind in {"rejected", "malformed"}:
                return []
            raise policy_error(error) from error

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _ask_several(self, request: Request, seeds: tuple[int, ...]) -> list[Completion]:
        is_filtered = False
        if self._takes_n:
            try:
                completions = await self._ask(request, seeds)
                if len(completions) == len(seeds):
                    return completions
            except RejectedError as error:
                # If the request is invalid, the calls below are rejected too.
                is_filtered = error.status == 200  # a content filter refuses single choices
        calls = [self._ask(request, (seed,)) for seed in seeds]
        completions = []
        for answer in await gathered(calls):
            completions += answer
        if not is_filtered:
            self._takes_n = False
        return completions

    async def _ask(self, request: Request, seeds: tuple[int, ...]) -> list[Completion]:
        n = len(seeds)
        seed = seeds[0] if n == 1 else int(digest("joint seed", list(seeds))[:16], 16)
        body: dict[str, Any] = {
            "model": self.name,
            "messages": request.messages,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            "seed": seed & _SEED_BITS,
            **self._extensions[request.logprobs],
        }
        if "tools" in request.messages[0]:
            body["messages"], body["tools"] = split_tools(request.messages)
        if request.token_ids:
            body |= self.settings.id_keys
        if n > 1:
            body["n"] = n
        if request.messages[-1]["role"] == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if request.stop:
            body["stop"] = list(request.stop)
        shape = (*body, request.temperature, request.top_p)
        reader = partial(completions_of, n=n, max_tokens=request.max_tokens, stop=request.stop)
        if shape in self._shapes:
            return await self.client.request(Call("POST", "/chat/completions", json=body), reader)
        answer = await self._refusals.send(body, partial(self._post, reader))
        if not self._refusals.names:
            self._shapes.add(shape)
        return answer

    async def _post(
        self, read: Callable[..., list[Completion]], body: dict[str, Any]
    ) -> list[Completion]:
        if "max_tokens" not in body and "max_completion_tokens" not in body:
            read = partial(read, max_tokens=None)
        return await self.client.request(Call("POST", "/chat/completions", json=body), read)


def _model_names(answer: Answer) -> list[str]:
    models = answer.json  # Together sends a list instead of an object
    if isinstance(models, dict):
        models = models["data"]
    return [str(model["id"]) for model in models]


def client_of(
    settings: OpenAIPolicySettings | TgiPolicySettings | TogetherPolicySettings,
    section: str,
    meter: FaultMeter | None = None,
) -> Client:
    """Return a client of the servers that a section of a recipe names."""
    return Client(
        settings.urls,
        setting=section,
        key=ApiKey.from_env(settings.api_key_env, f"{section}.api_key_env"),
        timeout_s=settings.timeout_s,
        retry_for_s=settings.retry_for_s,
        concurrency=settings.concurrency,
        meter=meter,
    )


def policy_error(error: HttpError) -> PolicyError:
    """Convert a failed HTTP request to a PolicyError."""
    message = str(error)
    if isinstance(error, RejectedError) and error.status in {400, 413, 422, 500}:
        if TOO_LONG.search(message):
            return PromptTooLongError(f"{message}; send fewer or shorter passages and demos")
        if TEMPLATE.search(message):
            message += "; the server's chat template refuses these messages: serve the model with another template"
    failure = PolicyError(message)
    failure.exit_code = error.exit_code
    return failure


def completions_of(
    answer: Answer,
    n: int,
    max_tokens: int | None,
    stop: Sequence[str] = (),
) -> list[Completion]:
    """Return the completions in an answer, in the order of their index.

    Some servers send fewer than ``n``.

    If the answer has one token count for all completions together, the count is divided in
    proportion to the lengths of their texts. Texts end before the first ``stop`` string (TGI
    includes it in the text). ``max_tokens`` is None if the server refuses a limit.

    Raises:
        RetryableError: the server failed to generate. A body of unexpected shape raises one of
            `MALFORMED`.
        RejectedError: a content filter ended a completion, or the model refused.
    """
    body = answer.json
    if body.get("error"):
        fault = f"an error: {error_text(answer.body)}"
        raise RetryableError(f"{answer.url} sent status 200 with {fault}", "server")
    choices: list[dict[str, Any]] = body["choices"]
    if not 1 <= len(choices) <= n:
        raise answer.malformed(f"{len(choices)} choices for n={n}")
    usage = body.get("usage") or {}
    n_prompt = int(usage.get("prompt_tokens") or 0)
    n_written = int(usage.get("completion_tokens") or 0)
    if min(n_prompt, n_written) < 0:
        raise ValueError("a token count is below 0")
    counts = [n_written]
    if len(choices) > 1:
        choices = _by_index(choices)
        lengths = [len(_text(choice["message"]) or "") for choice in choices]
        counts = shared(lengths, n_written)
    limit = math.inf if max_tokens is None else max_tokens
    completions = []
    for choice, count in zip(choices, counts, strict=True):
        message = choice["message"]
        reason = str(choice.get("finish_reason") or "").lower()
        text = message.get("content")
        if not isinstance(text, str) or message.get("tool_calls"):
            text = _text(message)
        if not text or choice.get("error") or reason not in {"stop", "length"}:
            _check_choice(choice, text, reason, answer)
        if len(text) > _LONGEST_TOKEN * limit:
            raise ValueError(f"a text of {len(text)} characters exceeds max_tokens={max_tokens}")
        ids = logprobs = None
        if choice.get("logprobs") or choice.get("token_ids"):
            ids, logprobs = _tokens(choice)
        n_tokens = count
        tokens = ids or logprobs
        if tokens:
            n_tokens = len(tokens)
            if n_tokens > limit:
                raise ValueError(f"{n_tokens} tokens exceed max_tokens={max_tokens}")
        # Without a reason, a completion of full length was probably cut.
        is_cut = not _STOPPED.fullmatch(reason) if reason else n_tokens >= limit
        finish = "length" if is_cut else "stop"
        if any(mark in text for mark in stop):
            finish = "stop"
            if not text.endswith(tuple(stop)):
                ids = logprobs = None  # they include the tokens after the stop string
            text = before_stop(text, stop)
        completions.append(Completion(text, finish, n_prompt, n_tokens, ids, logprobs))
    return completions


def _by_index(choices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len({choice.get("index", place) for place, choice in enumerate(choices)}) < len(choices):
        raise ValueError("two choices have the same index")
    return sorted(choices, key=lambda choice: choice.get("index", 0))


def _text(message: Mapping[str, Any]) -> Any:
    """Return a message's content, with its parts joined.

    Tool calls that the server parsed follow it as text.
    """
    content = message.get("content")
    if isinstance(content, dict):
        content = [content]
    if isinstance(content, list):
        content = "".join(map(_part, content))
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        calls.append((function["name"], arguments))
    if not calls:
        return content
    return write_calls(content or "", calls)


def _part(part: Any) -> str:
    """Return the text of a part of a message; reasoning has none."""
    if isinstance(part, str):
        return part
    kind = str(part.get("type"))
    text = part.get("text")
    if "thinking" in kind or "reasoning" in kind:
        return ""
    if not isinstance(text, str):
        raise TypeError(f"message.content has a part of type {kind} without text")
    return text


def _check_choice(choice: Mapping[str, Any], text: Any, reason: str, answer: Answer) -> None:
    """Raise an error if a choice is not a complete completion."""
    message = choice["message"]
    error = choice.get("error")
    refusal = message.get("refusal")
    if _FILTERED.search(reason) or (refusal and not text):
        cause = (
            f"the model refused: {one_line(str(refusal))}"
            if refusal
            else f"a content filter ended it ({reason})"
        )
        raise RejectedError(
            f"{answer.url} sent no complete completion: {cause}; change the prompt, or use another "
            "model",
            answer.status,
        )
    if error or not (_STOPPED.fullmatch(reason) or _CUT.search(reason)):
        fault = f"error {one_line(str(error))}" if error else f"finish_reason {one_line(reason)}"
        raise RetryableError(f"{answer.url} sent a completion with {fault}", "incomplete")
    if not text and (isinstance(message.get("content"), list) or any(map(message.get, _REASONING))):
        raise RetryableError(
            f"{answer.url} sent reasoning without content (finish_reason {reason}); increase "
            "policy.max_tokens, or turn off the model's reasoning or the server's reasoning parser",
            "incomplete",
        )
    if not isinstance(text, str):
        raise answer.malformed("a completion without text (message.content is not text)")


def _tokens(choice: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """Return token ids and log-probabilities; None for a list that is empty or missing."""
    table = choice.get("logprobs") or {}
    ids = choice.get("token_ids")
    if ids is None:
        ids = table.get("token_ids")
    logprobs = table.get("token_logprobs")
    if logprobs is None and table.get("content") is not None:
        logprobs = [token["logprob"] for token in table["content"]]
    # not any(... > ...): comparisons with NaN are False
    if logprobs and not all(float(logprob) <= _ROUNDING for logprob in logprobs):
        raise ValueError("a log-probability is above 0 or not a number")
    if ids and any(abs(int(token)) > _LARGEST_ID for token in ids):
        raise ValueError("a token id does not fit 32 bits")
    return (
        tuple(map(int, ids)) if ids else None,
        tuple(map(float, logprobs)) if logprobs else None,
    )


def shared(lengths: Sequence[int], total: int) -> list[int]:
    """Split ``total`` in proportion to ``lengths``, into integers with the sum ``total``.

    >>> shared([1, 1, 2], 10)
    [2, 3, 5]
    """
    weights = lengths if any(lengths) else [1] * len(lengths)
    sum_of_weights = sum(weights)
    ends = [total * end // sum_of_weights for end in accumulate(weights)]
    return [end - start for start, end in pairwise([0, *ends])]
