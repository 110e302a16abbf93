from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from leret.core.errors import PolicyError
from leret.policies.base import Completion, PromptTooLongError, Request
from leret.policies.local.decoder import Decoder, Job
from leret.policies.local.policy import LocalPolicy
from tests.policies.conftest import ask


def test_requests_of_one_event_loop_are_decoded_together_and_come_back_in_order(policy: LocalPolicy) -> None:
    requests = [ask(f"who wrote book {i}", i, i + 100) for i in range(32)]

    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*[policy.complete(request) for request in requests])

    before = policy.n_batches
    results = asyncio.run(together())
    assert policy.n_batches - before <= 4
    # Not the log-probabilities, whose last bits depend on how the requests fell into batches.
    again = asyncio.run(together())
    assert [[one.token_ids for one in some] for some in again] == [[one.token_ids for one in some] for some in results]
    for request, completions in list(zip(requests, results, strict=True))[::8]:
        alone = [policy.complete_many([Request(request.messages, (seed,), 1.0, 8)])[0][0] for seed in request.seeds]
        assert [one.text for one in alone] == [one.text for one in completions]


def test_a_completion_says_what_it_is(policy: LocalPolicy) -> None:
    [[completion]] = policy.complete_many([ask("the city", temperature=0.0, max_tokens=5)])
    assert completion.token_ids is not None
    assert completion.logprobs is not None
    assert len(completion.token_ids) == len(completion.logprobs) == completion.n_completion_tokens == 5
    assert completion.n_prompt_tokens == 4  # <|user|> the city <|assistant|>
    assert completion.finish_reason == "length"
    assert completion.text == policy.tokenizer.decode(list(completion.token_ids))


def test_text_ends_before_the_stop_string(policy: LocalPolicy) -> None:
    [[free]] = policy.complete_many([ask("the city", 5, max_tokens=5)])
    word = free.text.split()[2]
    [[stopped]] = policy.complete_many([ask("the city", 5, max_tokens=5, stop=("no such text", f" {word}"))])
    assert stopped.text == free.text[: free.text.index(f" {word}")]
    assert stopped.finish_reason == "stop"
    assert stopped.n_completion_tokens == 3


def test_a_prompt_too_long_fails_alone_and_names_the_lengths(policy: LocalPolicy) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(
            policy.complete(ask("book " * 600)), policy.complete(ask("the city")), return_exceptions=True
        )

    long, short = asyncio.run(both())
    assert isinstance(long, PromptTooLongError)
    assert "602 tokens" in str(long)
    assert "512 positions" in str(long)
    assert len(short) == 1


def test_a_completion_ends_where_the_positions_end(policy: LocalPolicy) -> None:
    [[completion]] = policy.complete_many([ask("book " * 507, temperature=0.0, max_tokens=64)])
    assert completion.n_prompt_tokens + completion.n_completion_tokens <= 512
    assert completion.finish_reason == "length"


def test_a_request_for_nothing_and_a_closed_policy_are_refused(llama_dir: Path) -> None:
    policy = LocalPolicy(llama_dir, threads=1, max_batch_tokens=64)
    with pytest.raises(PolicyError, match="0 completions"):
        policy.complete_many([Request(({"role": "user", "content": "the city"},), (), 1.0, 8)])
    policy.complete_many([ask("the city", i) for i in range(16)])  # 4 + 8 tokens a row: 5 rows a batch
    assert policy.n_batches >= 4
    asyncio.run(policy.aclose())
    asyncio.run(policy.aclose())
    with pytest.raises(PolicyError, match="closed"):
        policy.complete_many([ask("the city")])


def test_out_of_memory_halves_the_batch(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = Decoder.run

    def hungry(self: Decoder, jobs: Sequence[Job]) -> Any:
        sizes.append(len(jobs))
        if len(jobs) > 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return run(self, jobs)

    monkeypatch.setattr(Decoder, "run", hungry)
    small = LocalPolicy(llama_dir, threads=1)
    results = small.complete_many([ask(f"book {i}", i) for i in range(8)])
    small.close()
    assert len(results) == 8
    assert sorted(size for size in sizes if size <= 2) == [2, 2, 2, 2]


def test_a_request_too_big_for_memory_fails_alone(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Decoder.run

    def hungry(self: Decoder, jobs: Sequence[Job]) -> Any:
        if any(len(job.seeds) > 4 for job in jobs):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return run(self, jobs)

    monkeypatch.setattr(Decoder, "run", hungry)
    small = LocalPolicy(llama_dir, threads=1)

    async def both() -> list[Any]:
        big, fits = ask("the city", *range(6)), ask("the book", 1)
        return await asyncio.gather(small.complete(big), small.complete(fits), return_exceptions=True)

    failed, done = asyncio.run(both())
    small.close()
    assert isinstance(failed, PolicyError)
    assert "6 samples of 8 tokens" in str(failed)
    assert len(done) == 1
