"""A model of this process, with dynamic batching: what waits together is decoded together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from leret.config.policy import LocalPolicySettings
from leret.core.bundled import policy_directory
from leret.core.errors import PolicyError
from leret.core.types import SharedInstance
from leret.http.usage import UsageMeter
from leret.policies.base import Completion, Messages, Request
from leret.policies.checkpoints import find_model, load_model, model_digest, positions
from leret.policies.local.batching import BatchWorker
from leret.policies.local.chat_template import PromptEncoder

if TYPE_CHECKING:
    from leret.policies.local.decoder import Job


_PREFIX_BYTES = 256 * 2**20
_TINY = 10_000_000
"""Parameters below which more threads than one slow a model down."""


class LocalPolicy(SharedInstance):
    """Implements ``Policy`` over a Hugging Face causal LM in this process.

    Safe to use from several threads and event loops. The model's own ``generation_config`` gives the end tokens and
    the suppressed ones; temperature, top-p and lengths come from each request alone.
    """

    def __init__(self, settings: LocalPolicySettings) -> None:
        path = find_model(settings.model)
        model, tokenizer = load_model(path, device=settings.device, dtype=settings.dtype, template=settings.template)
        tiny = sum(weight.numel() for weight in model.parameters()) < _TINY
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._threads = 1 if tiny and on_cpu else None
        name = settings.model if policy_directory(settings.model) else path.resolve().name
        self._open(model, tokenizer, settings, name, model_digest(path))

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
        """A policy over a model that is in memory, and may be in training: `renew` after each update.

        The model is in evaluation mode while it decodes, and as it was afterwards; an adapter of peft is active. Its
        weights must not change, and no other thread may use it, before the completions that were asked for are there.

        Args:
            model: a causal LM of transformers, or an adapter of peft on one.
            tokenizer: with a chat template.
            name: as reports call it.
            digest: names its weights as they are now.
            enable_thinking: of the chat template; None leaves it to the template.
        """
        self = cls.__new__(cls)
        self._threads = None
        plain = model.get_base_model() if hasattr(model, "peft_config") else model
        settings = LocalPolicySettings(model=name, enable_thinking=enable_thinking)
        self._open(plain, tokenizer, settings, name, digest)
        return self

    def _open(self, model: Any, tokenizer: Any, settings: LocalPolicySettings, name: str, digest: str) -> None:
        self.settings = settings.model_copy(update={"device": "auto"})  # what is saved may be opened elsewhere
        self.name, self.digest = name, digest
        self.meter = UsageMeter(settings.price_prompt, settings.price_completion)
        self.device = str(next(model.parameters()).device)
        self.tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, positions(model), name, settings.enable_thinking)
        self.max_batch_tokens = 16_384 if self.device == "cpu" else 131_072  # of prompts and completions, with padding
        self._decoder = self._make_decoder(model)
        self._worker: BatchWorker[Job, list[Completion]] = BatchWorker(
            self._process, self._plan, name=f"policy {self.name}", start=self._set_threads
        )

    def renew(self, digest: str) -> None:
        """The weights have changed, and this names them now: nothing that was computed with the others is kept."""
        self.digest = digest
        if self._decoder.prefixes is not None:
            self._decoder.prefixes.clear()

    @property
    def n_batches(self) -> int:
        return self._worker.n_batches

    @property
    def closed(self) -> bool:
        return self._worker.closed

    async def complete(self, request: Request) -> list[Completion]:
        return await asyncio.wrap_future(self.submit(request))

    def submit(self, request: Request) -> Future[list[Completion]]:
        """Queue a request from any thread; `PolicyError` where it does not fit the model or the policy is closed."""
        return self._submit([request])[0]

    def complete_many(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """`complete` for code that is not async; what is in a batch follows from the requests, not from the clock."""
        return [future.result() for future in self._submit(requests)]

    def _submit(self, requests: Sequence[Request]) -> list[Future[list[Completion]]]:
        jobs, began = [self._job(request) for request in requests], time.monotonic()
        futures = self._worker.submit(jobs)
        for future in futures:
            future.add_done_callback(lambda done: self._count(done, began))
        return futures

    def prompt_ids(self, messages: Messages) -> tuple[int, ...]:
        """The prompt as it is sampled from; `PromptTooLongError` where it takes all of the model's positions."""
        return self._encoder.encode(messages).token_ids

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
            with _evaluation_mode(self._decoder.model):
                generated = self._decoder.run(jobs)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
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
        config = model.config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or ()
        windows = (getattr(config, name, None) for name in ("sliding_window", "window_size"))  # Mistral's, GPT-Neo's
        sliding = "sliding_attention" in kinds if kinds else any(windows)
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


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    in_training = model.training
    try:
        if in_training:
            model.eval()
        yield
    finally:
        if in_training:
            model.train()


def out_of_memory(error: Exception) -> bool:
    """Tell whether torch or Python could not allocate memory."""
    import torch

    signs = ("can't allocate memory", "out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in signs)
