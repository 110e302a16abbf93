"""Policy in this process, with dynamic batching: all waiting requests are decoded together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from leret.config.policy import LocalPolicySettings
from leret.core.errors import PolicyError
from leret.core.types import SharedInstance
from leret.policies.base import Completion, Messages, Request
from leret.policies.checkpoints import find_model, model_digest, policy_directory
from leret.policies.local.batching import BatchWorker
from leret.policies.local.model import (
    CausalModel,
    architecture_of,
    base_network,
    evaluation_mode,
    load_model,
)

if TYPE_CHECKING:
    from leret.policies.local.decoder import Job

_TINY = 10_000_000  # parameters; a smaller model is faster with one thread


class LocalPolicy(SharedInstance):
    """A Hugging Face model in this process. Safe to use from several threads and event loops.

    End tokens and suppressed tokens come from the model's ``generation_config``. Temperature, top-p
    and lengths come from each request.
    """

    def __init__(self, settings: LocalPolicySettings) -> None:
        path = find_model(settings.model)
        name = settings.model if policy_directory(settings.model) else path.resolve().name
        model = load_model(path, settings, name)
        weights = list(model.network.parameters())
        tiny = weights[0].device.type == "cpu" and sum(weight.numel() for weight in weights) < _TINY
        self._open(model, settings, name, model_digest(path), threads=1 if tiny else None)

    @classmethod
    def over(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        digest: str,
        enable_thinking: bool | None = None,
    ) -> LocalPolicy:
        """Return a policy over a loaded network.

        If the network is being trained, call `renew` after each update.

        The network is switched to evaluation mode during decoding. While requests are pending, its
        weights must not change and no other thread may use the network.

        ``model`` is a transformers model, or a peft model with an active adapter. ``digest`` is the
        digest of the current weights.
        """
        self = cls.__new__(cls)
        network = base_network(model)
        settings = LocalPolicySettings(model=name, enable_thinking=enable_thinking)
        self._open(
            architecture_of(network)(network, tokenizer, name, enable_thinking),
            settings,
            name,
            digest,
        )
        return self

    def _open(
        self,
        model: CausalModel,
        settings: LocalPolicySettings,
        name: str,
        digest: str,
        threads: int | None = None,
    ) -> None:
        import torch

        # saved settings may be loaded elsewhere
        self.settings = settings.model_copy(update={"device": "auto"})
        self.name = name
        self.digest = digest
        self.model = model
        self.device = str(next(model.network.parameters()).device)
        # counts prompts, completions and padding
        self.max_batch_tokens = 16_384 if self.device == "cpu" else 131_072
        start = None if threads is None else partial(torch.set_num_threads, threads)
        self._worker: BatchWorker[Job, list[Completion]] = BatchWorker(
            self._process, self._plan, name=f"policy {name}", start=start
        )

    def renew(self, digest: str) -> None:
        """Set the digest of the updated weights, and clear the caches."""
        self.digest = digest
        self.model.renew()

    @property
    def n_batches(self) -> int:
        return self._worker.n_batches

    @property
    def closed(self) -> bool:
        return self._worker.closed

    async def complete(self, request: Request) -> list[Completion]:
        return await asyncio.wrap_future(self.submit(request))

    def submit(self, request: Request) -> Future[list[Completion]]:
        """Queue a request from any thread.

        Raise `PolicyError` if the prompt is too long or the policy is closed.
        """
        return self._submit([request])[0]

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Complete requests synchronously.

        The batches depend only on the requests, not on timing.
        """
        return [future.result() for future in self._submit(requests)]

    def _submit(self, requests: Sequence[Request]) -> list[Future[list[Completion]]]:
        return self._worker.submit([self._job(request) for request in requests])

    def prompt_ids(self, messages: Messages, n_completion: int = 1) -> tuple[int, ...]:
        """Return the prompt's tokens; raise `PromptTooLongError` if ``n_completion`` more do not fit."""
        return self.model.encode(messages, n_completion).token_ids

    def close(self) -> None:
        self._worker.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def _job(self, request: Request) -> Job:
        from leret.policies.local.decoder import Job

        if not request.seeds or request.max_tokens < 1:
            raise PolicyError(
                f"the request has {len(request.seeds)} seeds and max_tokens={request.max_tokens}; "
                "pass at least one seed, and max_tokens of at least 1"
            )
        prompt = self.model.encode(request.messages)
        return Job(
            prompt.token_ids,
            prompt.n_shared,
            request.seeds,
            request.temperature,
            request.top_p,
            min(request.max_tokens, prompt.room),
            request.stop,
            bool(request.messages[0].get("tools")),
        )

    def _plan(self, jobs: Sequence[Job]) -> list[list[int]]:
        order = sorted(range(len(jobs)), key=lambda index: -len(jobs[index].token_ids))
        batches: list[list[int]] = []
        rows = width = 0
        for index in order:
            job = jobs[index]
            rows += job.n_rows
            width = max(width, len(job.token_ids) + job.max_tokens)
            if not batches or rows * width > self.max_batch_tokens:
                batches.append([])
                rows = job.n_rows
                width = len(job.token_ids) + job.max_tokens
            batches[-1].append(index)
        return batches

    def _process(self, jobs: Sequence[Job]) -> Sequence[list[Completion] | Exception]:
        try:
            with evaluation_mode(self.model.network):
                return self.model.generate(jobs)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return self._process_halves(jobs, error)

    def _process_halves(
        self, jobs: Sequence[Job], error: Exception
    ) -> list[list[Completion] | Exception]:
        import torch

        self.model.renew()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        if len(jobs) == 1:
            job = jobs[0]
            too_large = PolicyError(
                f"{self.name} ran out of memory on one request ({len(job.token_ids)} prompt "
                f"tokens, {len(job.seeds)} samples of {job.max_tokens} tokens); reduce max_tokens "
                "or the samples per prompt"
            )
            too_large.__cause__ = error
            return [too_large]  # other requests in the batch may still fit
        half = len(jobs) // 2
        self.max_batch_tokens = max(256, self.max_batch_tokens // 2)  # for later batches
        return [*self._process(jobs[:half]), *self._process(jobs[half:])]


def out_of_memory(error: Exception) -> bool:
    """Return whether torch or Python could not allocate memory."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error)
    return "can't allocate memory" in message or "out of memory" in message
