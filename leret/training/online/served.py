"""A policy in training that the run's servers sample: they load its current adapter before each round."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from leret.config.policy import OpenAIPolicySettings
from leret.core.aio import submit
from leret.core.errors import TrainingError
from leret.policies.base import Completion, Messages, Request
from leret.policies.checkpoints import positions
from leret.policies.local.chat_template import PromptEncoder
from leret.policies.remote.openai import OpenAIPolicy
from leret.policies.serving.model import refresh, resolve_policy
from leret.training.data import end_token
from leret.training.model import save_policy, stop_ids


class ServedPolicy:
    """The part of a `LocalPolicy` that rounds need, with completions of servers.

    Args:
        settings: of the servers, which hold the adapter's base.
        model: an adapter of peft, in training.
        tokenizer: with the servers' chat template.
        directory: the servers read the adapter from it.
        name: for reports.
        digest: name of its current weights.
    """

    def __init__(
        self, settings: OpenAIPolicySettings, model: Any, tokenizer: Any, directory: Path, *, name: str, digest: str
    ) -> None:
        self.name, self.digest = name, digest
        self._model, self._tokenizer, self._directory = model, tokenizer, directory
        self._settings = settings.model_copy(update={"logprobs": True})  # servers then send token ids too
        self._encoder = PromptEncoder(tokenizer, positions(model), name, settings.enable_thinking)
        self._ends = stop_ids(model)
        self._end = end_token(tokenizer, self._ends)

    def renew(self, digest: str) -> None:
        """Send the current weights, named ``digest``, to the servers; `PolicyError` says why that fails."""
        self.digest = digest
        save_policy(self._model, self._tokenizer, self._directory)
        directory = str(self._directory)
        self._settings = refresh(self._settings, resolve_policy(directory), directory)

    def prompt_ids(self, messages: Messages) -> tuple[int, ...]:
        """Return the prompt's ids; `PromptTooLongError` if it takes all of the model's positions."""
        return self._encoder.encode(messages).token_ids

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion] | BaseException]:
        return submit(self._complete(requests)).result()

    def close(self) -> None:
        """Nothing is held between rounds."""

    async def _complete(self, requests: Sequence[Request]) -> list[list[Completion] | BaseException]:
        async with aclosing(OpenAIPolicy(self._settings)) as policy:
            answers = await asyncio.gather(*map(policy.complete, requests), return_exceptions=True)
        return [
            answer if isinstance(answer, BaseException) else [self._with_ids(one, request) for one in answer]
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _with_ids(self, completion: Completion, request: Request) -> Completion:
        n = len(self.prompt_ids(request.messages))
        if completion.n_prompt_tokens not in (0, n):
            raise TrainingError(
                f"{self._settings.urls[0]} counts {completion.n_prompt_tokens} tokens in a prompt of {n}: its chat "
                "template or tokenizer is not that of the training; serve the model with these"
            )
        ids = completion.token_ids or self._tokenizer(completion.text, add_special_tokens=False)["input_ids"]
        if completion.token_ids:
            self._check_ids(completion, completion.token_ids)
        if completion.finish_reason == "stop" and (not ids or ids[-1] not in self._ends):
            ids = [*ids, self._end]
        return replace(completion, token_ids=tuple(ids))

    def _check_ids(self, completion: Completion, ids: Sequence[int]) -> None:
        """Refuse token ids of another text, which would be trained instead."""
        size, n_logprobs = self._model.get_input_embeddings().num_embeddings, len(completion.logprobs or ids)
        if not all(0 <= one < size for one in ids):
            fault = f"token ids from {min(ids)} to {max(ids)}, and the vocabulary has {size} tokens"
        elif len(ids) != n_logprobs:
            fault = f"{len(ids)} token ids and {n_logprobs} log-probabilities for one completion"
        elif _letters(text := self._tokenizer.decode(ids, skip_special_tokens=True)) != _letters(completion.text):
            fault = f"token ids of {text[:80]!r} for the completion {completion.text[:80]!r}"
        else:
            return
        raise TrainingError(
            f"{self._settings.urls[0]} sent {fault}: its tokenizer is not that of the training, or it changes the "
            "text; serve the model with its tokenizer and without a parser of reasoning or tools"
        )


def _letters(text: str) -> str:
    """Return a text without the parts that servers decode differently: white space, and a cut-off last letter."""
    return "".join(text.split()).rstrip("\ufffd")
