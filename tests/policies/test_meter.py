from __future__ import annotations

import threading

import numpy as np
import pytest

from leret.core.usage import UsageMeter
from leret.policies.base import Request
from leret.policies.local.policy import LocalPolicy


def test_a_meter_starts_at_nothing() -> None:
    assert set(UsageMeter().snapshot().values()) == {0}


def test_percentiles_are_those_of_the_latencies_to_a_twentieth() -> None:
    latencies = np.random.default_rng(0).lognormal(-2.0, 1.0, 5000)
    meter = UsageMeter()
    for latency in latencies:
        meter.answered(float(latency))
    told = meter.snapshot()
    for percent in (50, 90, 99):
        assert told[f"latency_p{percent}_s"] == pytest.approx(np.percentile(latencies, percent), rel=0.06)
    assert told["calls"] == 5000


def test_latencies_out_of_range_are_kept_at_its_ends() -> None:
    meter = UsageMeter()
    for latency in (0.0, -1.0, 1e9):
        meter.answered(latency)
    assert meter.snapshot()["calls"] == 3


def test_counts_of_several_threads_add_up() -> None:
    meter = UsageMeter(price_prompt=3.0, price_completion=15.0)

    def work() -> None:
        for _ in range(1000):
            meter.answered(0.1)
            meter.wrote(10, 2, 1)
            meter.fault("timeout")
            meter.retried()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = meter.snapshot()
    assert (told["calls"], told["prompt_tokens"], told["completion_tokens"]) == (4000, 40_000, 8000)
    assert (told["completions"], told["fault_timeout"], told["retries"]) == (4000, 4000, 4000)
    assert told["cost"] == pytest.approx((40_000 * 3 + 8000 * 15) / 1e6)


def test_gauges_are_read_at_every_snapshot() -> None:
    meter, now = UsageMeter(), [1.0]
    meter.watch(lambda: {"concurrency": now[0]})
    now[0] = 7.0
    assert meter.snapshot()["concurrency"] == 7.0


def test_the_local_policy_counts_too(llama_dir) -> None:
    policy = LocalPolicy(llama_dir, threads=1, price_completion=1e6)
    request = Request(({"role": "user", "content": "the city"},), (1, 2), 1.0, 4)
    [own] = policy.complete_many([request])
    policy.close()
    told = policy.meter.snapshot()
    written = sum(completion.n_completion_tokens for completion in own)
    assert (told["calls"], told["completions"], told["completion_tokens"]) == (1, 2, written)
    assert told["prompt_tokens"] == own[0].n_prompt_tokens
    assert told["cost"] == written
    assert told["latency_p50_s"] > 0
