"""A policy in training that writes on its run's servers: before each round they load the adapter as it is then."""

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
from leret.policies.serving.model import resolve_policy
from leret.policies.serving.refresh import refresh
from leret.training.data import end_token
from leret.training.model import save_policy, stop_ids


class ServedPolicy:
    """What a round needs of a `LocalPolicy`, with completions of servers.

    Args:
        settings: of the servers, which have the adapter's base.
        model: an adapter of peft, in training.
        tokenizer: with the chat template of the servers.
        directory: where the servers read the adapter from.
        name: as reports call it.
        digest: names its weights as they are now.
    """

    def __init__(
        self, settings: OpenAIPolicySettings, model: Any, tokenizer: Any, directory: Path, *, name: str, digest: str
    ) -> None:
        self.name, self.digest = name, digest
        self._model, self._tokenizer, self._directory = model, tokenizer, directory
        self._settings = settings.model_copy(update={"logprobs": True})  # with them a server gives its tokens' ids
        self._encoder = PromptEncoder(tokenizer, positions(model), name, settings.enable_thinking)
        self._ends = stop_ids(model)
        self._end = end_token(tokenizer, self._ends)

    def renew(self, digest: str) -> None:
        """The weights have changed, and this names them now: the servers get them, or `PolicyError` says why not."""
        self.digest = digest
        save_policy(self._model, self._tokenizer, self._directory)
        directory = str(self._directory)
        self._settings = refresh(self._settings, resolve_policy(directory), directory)

    def prompt_ids(self, messages: Messages) -> tuple[int, ...]:
        """The prompt as it is trained; `PromptTooLongError` where it takes all of the model's positions."""
        return self._encoder.encode(messages).token_ids

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion] | BaseException]:
        """The completions of each request, or why there are none."""
        return submit(self._complete(requests)).result()

    def close(self) -> None:
        """Nothing is held between rounds."""

    async def _complete(self, requests: Sequence[Request]) -> list[list[Completion] | BaseException]:
        async with aclosing(OpenAIPolicy(self._settings)) as policy:
            made = await asyncio.gather(*map(policy.complete, requests), return_exceptions=True)
        return [
            own if isinstance(own, BaseException) else [self._with_ids(one, request) for one in own]
            for request, own in zip(requests, made, strict=True)
        ]

    def _with_ids(self, completion: Completion, request: Request) -> Completion:
        n = len(self.prompt_ids(request.messages))
        if completion.n_prompt_tokens not in (0, n):
            raise TrainingError(
                f"{self._settings.urls[0]} counts {completion.n_prompt_tokens} tokens in a prompt of {n}: its chat "
                "template or tokenizer is not the one that is trained; serve the model with these"
            )
        ids = completion.token_ids or self._tokenizer(completion.text, add_special_tokens=False)["input_ids"]
        if completion.token_ids:
            self._check_ids(completion, completion.token_ids)
        if completion.finish_reason == "stop" and (not ids or ids[-1] not in self._ends):
            ids = [*ids, self._end]
        return replace(completion, token_ids=tuple(ids))

    def _check_ids(self, completion: Completion, ids: Sequence[int]) -> None:
        """Refuse token ids that are not those of the text, which would be trained in its place."""
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
            f"{self._settings.urls[0]} sent {fault}: its tokenizer is not the one that is trained, or it changes the "
            "text; serve the model with its own tokenizer and without a parser of reasoning or tools"
        )


def _letters(text: str) -> str:
    """A text without what servers decode differently: white space, and a last letter that is cut off."""
    return "".join(text.split()).rstrip("\ufffd")
