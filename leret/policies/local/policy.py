"""A model of this process, with dynamic batching: what waits together is decoded together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.config.policy import LocalPolicySettings
from leret.core.bundled import policy_directory
from leret.core.errors import PolicyError
from leret.core.usage import UsageMeter
from leret.policies.base import Completion, Request
from leret.policies.checkpoints import find_model, load_model, model_digest
from leret.policies.local.batching import BatchWorker
from leret.policies.local.chat_template import PromptEncoder

if TYPE_CHECKING:
    from leret.policies.local.decoder import Job


_PREFIX_BYTES = 256 * 2**20
_TINY = 10_000_000


class LocalPolicy:
    """Implements ``Policy`` over a Hugging Face causal LM in this process.

    Safe to use from several threads and event loops. The model's own ``generation_config`` gives the end tokens and
    the suppressed ones; temperature, top-p and lengths come from each request alone.

    Args:
        model_dir: model or LoRA adapter directory, or a repository of the Hugging Face hub.
        device: ``auto``, ``cpu``, ``cuda`` ...
        dtype: ``auto`` (float32 on a CPU), ``float32``, ``bfloat16``, ``float16``.
        max_batch_tokens: prompt and completion tokens of a batch, padding included; None chooses by device.
        threads: of torch in the worker; None takes one for a model under 10M parameters, which more threads slow
            down, and torch's own number for others.
        name: as reports call it; None takes the directory's name.
        enable_thinking: of the chat template; None leaves it to the template.
        price_prompt: of a million prompt tokens.
        price_completion: of a million completion tokens.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_batch_tokens: int | None = None,
        threads: int | None = None,
        name: str | None = None,
        enable_thinking: bool | None = None,
        price_prompt: float = 0.0,
        price_completion: float = 0.0,
    ) -> None:
        self.path = find_model(model_dir)
        self.dtype = dtype
        self.name = name or self.path.resolve().name
        self.digest = model_digest(self.path)
        loaded = load_model(self.path, device=device, dtype=dtype)
        self.device = str(next(loaded.model.parameters()).device)
        self.tokenizer = loaded.tokenizer
        self.meter = UsageMeter(price_prompt, price_completion)
        self.enable_thinking = enable_thinking
        self._encoder = PromptEncoder(loaded.tokenizer, _n_positions(loaded.model), self.name, enable_thinking)
        self.max_batch_tokens = max_batch_tokens or (16_384 if self.device == "cpu" else 131_072)
        tiny = sum(weight.numel() for weight in loaded.model.parameters()) < _TINY
        self._threads = threads if threads is not None else 1 if tiny and self.device == "cpu" else None
        self._decoder = self._make_decoder(loaded.model)
        self._worker: BatchWorker[Job, list[Completion]] = BatchWorker(
            self._process, self._plan, name=f"policy {self.name}", start=self._set_threads
        )

    def __deepcopy__(self, memo: dict[int, object]) -> LocalPolicy:
        # Programs are deep-copied by DSPy's optimizers; the model behind them is one.
        return self

    @property
    def settings(self) -> LocalPolicySettings:
        """Of a recipe that loads this model again."""
        model = self.name if policy_directory(self.name) == self.path else str(self.path)
        return LocalPolicySettings.model_validate(
            {"model": model, "dtype": self.dtype, "enable_thinking": self.enable_thinking}
        )

    @property
    def n_batches(self) -> int:
        return self._worker.n_batches

    @property
    def closed(self) -> bool:
        return self._worker.closed

    async def complete(self, request: Request) -> list[Completion]:
        """Complete one prompt, together with whatever else is waiting."""
        return await asyncio.wrap_future(self.submit(request))

    def submit(self, request: Request) -> Future[list[Completion]]:
        """Queue a request from any thread; `PolicyError` where it does not fit the model or the policy is closed."""
        job, began = self._job(request), time.monotonic()
        future = self._worker.submit(job)
        future.add_done_callback(lambda done: self._count(done, began))
        return future

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """`complete` for code that is not async."""
        futures = [self.submit(request) for request in requests]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Finish what is queued and stop the worker. May be called twice."""
        self._worker.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def _count(self, done: Future[list[Completion]], began: float) -> None:
        if done.cancelled():
            return
        if done.exception() is not None:
            self.meter.fault("model")
            return
        completions = done.result()
        self.meter.answered(time.monotonic() - began)
        written = sum(completion.n_completion_tokens for completion in completions)
        self.meter.wrote(completions[0].n_prompt_tokens, written, len(completions))

    def _job(self, request: Request) -> Job:
        from leret.policies.local.decoder import Job

        if not request.seeds or request.max_tokens < 1:
            raise PolicyError(
                f"a request asks for {len(request.seeds)} completions of {request.max_tokens} tokens; "
                "ask for one of each at least"
            )
        prompt = self._encoder.encode(request.messages)
        return Job(
            prompt.token_ids,
            prompt.n_shared,
            request.seeds,
            request.temperature,
            request.top_p,
            min(request.max_tokens, prompt.room),
            request.stop,
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
                rows, width = job.n_rows, len(job.token_ids) + job.max_tokens
            batches[-1].append(index)
        return batches

    def _process(self, jobs: Sequence[Job]) -> list[list[Completion] | Exception]:
        try:
            generated = self._decoder.run(jobs)
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            return self._process_halves(jobs, error)
        return [
            [self._encoder.completion(len(job.token_ids), one, job.stop) for one in own]
            for job, own in zip(jobs, generated, strict=True)
        ]

    def _process_halves(self, jobs: Sequence[Job], error: Exception) -> list[list[Completion] | Exception]:
        import torch

        if self._decoder.prefixes is not None:
            self._decoder.prefixes.clear()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        if len(jobs) == 1:
            job = jobs[0]
            too_large = PolicyError(
                f"{self.name} ran out of memory on one request ({len(job.token_ids)} prompt tokens, "
                f"{len(job.seeds)} samples of {job.max_tokens} tokens); lower max_tokens or the samples a prompt"
            )
            too_large.__cause__ = error
            return [too_large]  # the others of the batch may still fit
        half = len(jobs) // 2
        # Later batches need not meet the same wall.
        self.max_batch_tokens = max(256, self.max_batch_tokens // 2)
        return [*self._process(jobs[:half]), *self._process(jobs[half:])]

    def _make_decoder(self, model: Any) -> Any:
        from leret.policies.local.decoder import Decoder
        from leret.policies.local.kv_cache import PrefixCache

        settings = model.generation_config
        sliding = "sliding_attention" in (
            getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
        )
        return Decoder(
            model,
            end_ids=self._encoder.set_ends(settings.eos_token_id),
            suppressed=settings.suppress_tokens or (),
            to_text=self._encoder.to_text,
            # A shared prefix leaves padding behind it, which a sliding window would count as tokens.
            prefixes=None if sliding else PrefixCache(_PREFIX_BYTES),
        )

    def _set_threads(self) -> None:
        import torch

        if self._threads is not None:
            torch.set_num_threads(self._threads)


def _n_positions(model: Any) -> int | None:
    n = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return n if isinstance(n, int) and n > 0 else None


def _out_of_memory(error: Exception) -> bool:
    import torch

    signs = ("can't allocate memory", "out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in signs)
