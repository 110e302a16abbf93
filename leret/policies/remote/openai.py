"""A policy behind servers that speak OpenAI's chat completions: vLLM, SGLang, TGI, llama.cpp, OpenAI."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from leret.core.errors import PolicyError
from leret.core.types import SharedInstance, digest
from leret.http.answers import Answer, ApiKey, HttpError, RejectedError, RetryableError, error_text, one_line
from leret.http.client import Call, Carry, Client
from leret.http.usage import UsageMeter
from leret.policies.base import Completion, PromptTooLongError, Request

if TYPE_CHECKING:
    from leret.config.policy import OpenAIPolicySettings, PolicySettings, ServedPolicySettings, TogetherPolicySettings
    from leret.policies.base import Policy

LONGEST_TOKEN = 128
"""Characters: runs of spaces, in the vocabularies of OpenAI. A text of more for each token is no completion."""

SEED_BITS = 2**31 - 1
"""Of a sample's 63: not every server takes those."""

LIST_S = 3.0
"""Of `OpenAIPolicy.served`, for the list of models."""

_FINISHED = frozenset({"stop", "length", "eos", "eos_token", "stop_sequence", None})
"""Ends of a completion, as OpenAI, Together and TGI name them; some servers name none."""

_TOO_LONG = re.compile(r"(?i)context.(length|size|window)|maximum model length|`inputs` (must have less|tokens \+)")
"""What vLLM, SGLang, llama.cpp, OpenAI, TGI and Together say of a prompt that does not fit."""

_ROUNDING = 1e-3
"""How far above 0 a log-probability of half precision may be."""


class OpenAIPolicy(SharedInstance):
    """Implements ``Policy``.

    Whether the server makes several choices of one prompt is found by asking it, never assumed: some ignore ``n``.
    Where it does, the samples of a prompt are one request, whose seed is derived from theirs, and the server decides
    how they differ: a sample then depends on the seeds it was asked together with. Where it does not, each sample is a
    request with its own seed.
    """

    def __init__(self, settings: OpenAIPolicySettings | TogetherPolicySettings, carry: Carry | None = None) -> None:
        self.settings = settings
        self.name = settings.model
        # The weights behind a name cannot be seen from here: serve new weights under a new name.
        self.digest = digest(settings.kind, settings.model)
        self.meter = UsageMeter(settings.price_prompt, settings.price_completion)
        self.client = client_of(settings, self.meter, carry=carry)
        # A number a token in Together's API, a switch in OpenAI's.
        self._logprobs: bool | int = int(settings.logprobs) if settings.kind == "together" else settings.logprobs
        self._token_ids = settings.logprobs and settings.kind == "openai"  # vLLM's extension, which others may refuse
        self._thinking: bool | None = getattr(settings, "enable_thinking", None)
        self._takes_n: bool | None = None
        self._probing: asyncio.Task[bool] | None = None

    async def complete(self, request: Request) -> list[Completion]:
        seeds = request.seeds if request.temperature > 0 else request.seeds[:1]
        if not seeds:
            raise PolicyError("a request asks for no completion; give it one seed at least")
        try:
            own = await (self._ask(request, seeds) if len(seeds) == 1 else self._ask_several(request, seeds))
        except HttpError as error:
            raise policy_error(error) from error
        return own if request.temperature > 0 else own * len(request.seeds)

    async def check(self) -> None:
        """See that the server answers, takes the key and knows the model; PolicyError with its URL if not.

        A list of models that names the model is enough; else a completion of one token decides.
        """
        served = await self.served()
        if self.name in served:
            return
        try:
            await check_token(self, self.settings)
        except PolicyError as error:
            hint = f"; it serves {', '.join(served)}" if served else ""
            if getattr(error.__cause__, "status", 0) in {404, 405} and "/v1" not in self.client.urls[0]:
                hint += "; is /v1 missing at the end of policy.urls?"
            error.args = (f"{error}{hint}",)
            raise

    async def served(self) -> list[str]:
        """The names in the server's list of models; empty where it gives none, PolicyError where it is away."""
        call = Call("GET", "/models")
        try:
            return await self.client.request(
                call,
                lambda answer: [str(entry["id"]) for entry in answer.json["data"]],
                timeout_s=LIST_S,
                retry_for_s=LIST_S,
            )
        except RejectedError:
            return []
        except RetryableError as error:
            if error.kind == "malformed":
                return []
            raise policy_error(error) from error

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _ask_several(self, request: Request, seeds: tuple[int, ...]) -> list[Completion]:
        if self._takes_n if self._takes_n is not None else await self._probe(request):
            try:
                return await self._ask(request, seeds)
            except RejectedError:
                # Perhaps so many choices are too many; if it is the request itself, one choice is refused as well.
                completions = await self._one_by_one(request, seeds)
                self._takes_n = False
                return completions
        return await self._one_by_one(request, seeds)

    async def _one_by_one(self, request: Request, seeds: tuple[int, ...]) -> list[Completion]:
        each = await asyncio.gather(*[self._ask(request, (seed,)) for seed in seeds])
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
            call = self._call(Request(request.messages, (0,), 1.0, 1), 0, 2)
            self._takes_n = await self.client.request(call, lambda answer: len(answer.json["choices"])) == 2
        except RejectedError:
            self._takes_n = False  # if the request itself is at fault, the samples will say so
        return self._takes_n

    async def _ask(self, request: Request, seeds: tuple[int, ...]) -> list[Completion]:
        n = len(seeds)
        seed = seeds[0] if n == 1 else int(digest("joint seed", list(seeds))[:16], 16)
        read = partial(completions_of, n=n, max_tokens=request.max_tokens)
        try:
            own = await self.client.request(self._call(request, seed, n), read)
        except RejectedError:
            if not self._token_ids:
                raise
            # An extension that strict servers refuse; if it is something else, it is refused again.
            self._token_ids = False
            try:
                own = await self.client.request(self._call(request, seed, n), read)
            except RejectedError:
                self._token_ids = True
                raise
        self.meter.wrote(own[0].n_prompt_tokens, sum(one.n_completion_tokens for one in own), n)
        return own

    def _call(self, request: Request, seed: int, n: int) -> Call:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": request.messages,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            "seed": seed & SEED_BITS,
        }
        if n > 1:
            body["n"] = n
        if request.stop:
            body["stop"] = list(request.stop)
        if self._logprobs:
            body["logprobs"] = self._logprobs
        if self._token_ids:
            body["return_token_ids"] = True
        if self._thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._thinking}
        return Call.post("/chat/completions", body)


def client_of(
    settings: ServedPolicySettings,
    meter: UsageMeter,
    *,
    carry: Carry | None = None,
    also_retried: frozenset[int] = frozenset(),
) -> Client:
    """The HTTP client of a served policy."""
    return Client(
        settings.urls,
        setting="policy",
        key=ApiKey.from_env(settings.api_key_env, "policy.api_key_env"),
        timeout_s=settings.timeout_s,
        retry_for_s=settings.retry_for_s,
        concurrency=settings.concurrency,
        also_retried=also_retried,
        carry=carry,
        meter=meter,
    )


def policy_error(error: HttpError) -> PolicyError:
    """A failed request as the policy's failure."""
    told = str(error)
    if isinstance(error, RejectedError) and error.status in {400, 413, 422} and _TOO_LONG.search(told):
        return PromptTooLongError(f"{told}; send fewer or shorter passages and demos")
    failure = PolicyError(told)
    failure.exit_code = error.exit_code
    return failure


async def check_token(policy: Policy, settings: PolicySettings) -> None:
    """See that a policy completes a prompt; one that is late, or that needs more than a token, is let pass."""
    request = Request(({"role": "user", "content": "Hello"},), (0,), settings.temperature, 1, settings.top_p)
    try:
        await policy.complete(request)
    except PolicyError as error:
        if getattr(error.__cause__, "kind", "") not in {"incomplete", "timeout"}:
            raise


def completions_of(answer: Answer, n: int, max_tokens: int) -> list[Completion]:
    """The choices of a chat completion, in the order of their index; one of `MALFORMED` or RetryableError if none.

    Where a server counts the tokens of all choices together, each choice gets its share by the length of its text,
    and the shares add up to what was counted.
    """
    body = answer.json
    if body.get("error"):
        raise RetryableError(f"{answer.url} answered 200 with an error: {error_text(answer.body)}", "server")
    choices: list[dict[str, Any]] = body["choices"]
    if len(choices) != n:
        raise answer.malformed(f"{len(choices)} choices for n={n}")
    if n > 1:
        choices = sorted(choices, key=lambda choice: choice.get("index", 0))
        if len({choice.get("index", place) for place, choice in enumerate(choices)}) < n:
            raise ValueError("two choices have one index")
    usage = body.get("usage") or {}
    n_prompt, n_written = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    if min(n_prompt, n_written) < 0:
        raise ValueError("a number of tokens is below 0")
    if n == 1:
        return [_completion(choices[0], max_tokens, answer.url, n_prompt, n_written)]
    counts = shared([len(choice["message"]["content"] or "") for choice in choices], n_written)
    pairs = zip(choices, counts, strict=True)
    return [_completion(choice, max_tokens, answer.url, n_prompt, count) for choice, count in pairs]


def _completion(choice: Mapping[str, Any], max_tokens: int, url: str, n_prompt: int, n_written: int) -> Completion:
    """A choice that is a completion, whatever its text; ``n_written`` counts where no tokens are given."""
    message, reason = choice["message"], choice.get("finish_reason")
    text, error = message.get("content"), choice.get("error")
    if error or reason not in _FINISHED:
        told = f"error {one_line(str(error))}" if error else f"finish_reason {one_line(str(reason))}"
        raise RetryableError(f"{url} sent a completion with {told}", "incomplete")
    if not text and (message.get("reasoning_content") or message.get("reasoning")):
        raise RetryableError(
            f"{url} sent reasoning and no content (finish_reason {reason}); raise policy.max_tokens, or turn the "
            "model's reasoning or the server's parser of it off",
            "incomplete",
        )
    if not isinstance(text, str):
        raise TypeError("message.content is no text")
    if len(text) > LONGEST_TOKEN * max_tokens:
        raise ValueError(f"{len(text)} characters for max_tokens={max_tokens}")
    finish = "length" if reason == "length" else "stop"
    if choice.get("logprobs") is None and choice.get("token_ids") is None:
        return Completion(text, finish, n_prompt, n_written)
    ids, logprobs = _tokens(choice)
    tokens = ids if ids is not None else logprobs
    return Completion(text, finish, n_prompt, n_written if tokens is None else len(tokens), ids, logprobs)


def _tokens(choice: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """Token ids and log-probabilities, in OpenAI's form, vLLM's or Together's."""
    told, given = choice.get("logprobs") or {}, choice.get("token_ids")
    values, ids = told.get("token_logprobs"), told.get("token_ids")
    if values is None and told.get("content") is not None:
        values = [token["logprob"] for token in told["content"]]
    if given is not None:
        ids = given
    logprobs = None if values is None else logprobs_of(values)
    return None if ids is None else tuple(int(token) for token in ids), logprobs


def logprobs_of(values: Sequence[Any]) -> tuple[float, ...]:
    """Log-probabilities; ValueError where one cannot be such."""
    if not all(float(value) <= _ROUNDING for value in values):
        raise ValueError("a log-probability is above 0, or no number")
    return tuple(float(value) for value in values)


def shared(lengths: Sequence[int], total: int) -> list[int]:
    """``total`` split by length, in whole numbers that add up to it.

    >>> shared([1, 1, 2], 10)
    [2, 3, 5]
    """
    weights = lengths if any(lengths) else [1] * len(lengths)
    ends = [total * end // sum(weights) for end in accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
