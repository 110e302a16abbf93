"""Policy behind Hugging Face's text-generation-inference, by its route ``POST /generate`` (or ``POST /``).

Requests and answers are types of the ``text-generation`` package. Its ``AsyncClient`` does not carry them: it opens one
connection per call, and drops Retry-After.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.core.errors import MissingDependency, PolicyError
from leret.core.types import SharedInstance, digest
from leret.http.client import Answer, Call, HttpError, RejectedError
from leret.http.usage import UsageMeter
from leret.policies.base import Completion, Request
from leret.policies.local.chat_template import before_stop, load_template
from leret.policies.remote.openai import (
    LONGEST_TOKEN,
    SEED_BITS,
    check_token,
    client_of,
    logprobs_of,
    policy_error,
)

if TYPE_CHECKING:
    from leret.config.policy import TgiPolicySettings

_GENERATION_FAILED = 424
_INSTALL = "pip install --no-deps 'text-generation>=0.7,<0.8'"


class TgiPolicy(SharedInstance):
    """Completions from TGI. The chat template is applied here, so that the server sees the trainer's tokens.

    Each sample of a prompt is a request with its seed. With ``best_of`` they are one request, for which TGI takes no
    seed: those samples are not repeatable. Log-probabilities are TGI's, after temperature and top-p.
    """

    def __init__(self, settings: TgiPolicySettings) -> None:
        try:
            import text_generation  # noqa: F401
        except ImportError as error:
            raise MissingDependency("text-generation", "tgi", command=_INSTALL) from error
        self.settings = settings
        model, tokenizer = Path(settings.model), Path(settings.tokenizer)
        self.name = model.name if tokenizer.is_dir() and tokenizer.name == model.name else settings.model
        self._template = load_template(settings.tokenizer, settings.enable_thinking)
        # The weights behind a name are invisible here: serve new weights under a new name.
        self.digest = digest("tgi", self.name, self._template.template)
        self.meter = UsageMeter(settings.price_prompt, settings.price_completion)
        roots = tuple(url.rstrip("/").removesuffix("/generate") for url in settings.urls)
        rooted = settings.model_copy(update={"urls": roots})
        self.client = client_of(rooted, self.meter, also_retried=frozenset({_GENERATION_FAILED}))
        self._path = "/generate"

    async def complete(self, request: Request) -> list[Completion]:
        if not request.seeds:
            raise PolicyError("a request asks for no completion; add at least one seed")
        inputs = self._template.inputs(request.messages)
        try:
            if request.temperature == 0:
                return (await self._ask(request, inputs, None, 1)) * len(request.seeds)
            if self.settings.best_of and len(request.seeds) > 1:
                return await self._ask(request, inputs, None, len(request.seeds))
            each = await asyncio.gather(*[self._ask(request, inputs, seed, 1) for seed in request.seeds])
        except HttpError as error:
            raise policy_error(error) from error
        return [completion for one in each for completion in one]

    async def check(self) -> None:
        await check_token(self, self.settings)

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _ask(self, request: Request, inputs: str, seed: int | None, n: int) -> list[Completion]:
        body = _body(request, inputs, seed, n)

        def read(answer: Answer) -> list[Completion]:
            counted = answer.headers.get("x-prompt-tokens", "")
            n_prompt = int(counted) if counted.isdecimal() else self._template.n_tokens(inputs)
            completions = _completions(answer, n, n_prompt, request)
            self.meter.answered(answer.seconds, n_prompt, sum(one.n_completion_tokens for one in completions), n)
            return completions

        try:
            return await self.client.request(Call.post(self._path, body), read)
        except RejectedError as error:
            if error.status not in {404, 405} or self._path == "/":
                raise
            self._path = "/"  # the only open route behind some gateways
            return await self.client.request(Call.post(self._path, body), read)


def _body(request: Request, inputs: str, seed: int | None, n: int) -> dict[str, Any]:
    """Return a request as the client package makes it; RejectedError if it refuses the settings."""
    from text_generation import types
    from text_generation.errors import ValidationError

    sampled = request.temperature > 0
    try:
        parameters = types.Parameters(
            do_sample=sampled,
            max_new_tokens=request.max_tokens,
            stop=list(request.stop),
            seed=None if seed is None else seed & SEED_BITS,
            temperature=request.temperature if sampled else None,
            top_p=request.top_p if sampled and request.top_p < 1 else None,  # TGI refuses its default of 1
            best_of=n if n > 1 else None,
            details=True,
        )
        body: dict[str, Any] = types.Request(inputs=inputs, parameters=parameters).model_dump()
    except (ValidationError, ValueError) as error:
        raise RejectedError(f"TGI does not take this request ({error}); correct the policy's settings") from error
    return body


def _completions(answer: Answer, n: int, n_prompt: int, request: Request) -> list[Completion]:
    """Return the completions of an answer: the best sequence first, then the others."""
    from text_generation import types

    value = answer.json
    response = types.Response(**(value[0] if isinstance(value, list) else value))
    sequences = [(response.generated_text, response.details)]
    sequences += [(other.generated_text, other) for other in response.details.best_of_sequences or []]
    if len(sequences) != n:
        raise answer.malformed(f"{len(sequences)} sequences for best_of={n}")
    if max(len(text) for text, _ in sequences) > LONGEST_TOKEN * request.max_tokens:
        raise ValueError(f"the text is too long for max_tokens={request.max_tokens}")
    return [_completion(text, details, n_prompt, request.stop) for text, details in sequences]


def _completion(text: str, details: Any, n_prompt: int, stop: Sequence[str]) -> Completion:
    logprobs = [token.logprob for token in details.tokens]
    return Completion(
        text=before_stop(text, stop),  # TGI includes the stop string
        finish_reason="length" if details.finish_reason.value == "length" else "stop",
        n_prompt_tokens=n_prompt,
        n_completion_tokens=details.generated_tokens,
        token_ids=tuple(token.id for token in details.tokens) or None,
        logprobs=None if not logprobs or None in logprobs else logprobs_of(logprobs),
    )
