"""What is counted: by a policy, by hop and prompt, in events.jsonl and on the progress line."""

import asyncio
import random
import threading
import time

import pytest

from leret.core.runs import Run
from leret.core.usage import UsageByPrompt, UsageEvents, UsageMeter
from leret.retrieval.batching import SearchBatcher
from tests.sampling.fakes import FakePolicy, FakeRetriever


class Metered(FakePolicy):
    """A policy that knows what its requests took."""

    class meter:  # noqa: N801
        @staticmethod
        def snapshot():
            return {"calls": 3, "retries": 2, "latency_p50_s": 0.25}


def watch(run, policy, ledger, every_s=30.0, during=lambda accounting: None, at_least=0):
    async def main():
        front = SearchBatcher(FakeRetriever())
        async with UsageEvents(run, ledger, policy, front, every_s) as accounting:
            await asyncio.gather(front.search(["alpha"], 2), front.search(["alpha"], 2))
            await front.search(["alpha"], 2)
            until = time.monotonic() + 10
            while len(accounts(run)) < at_least and time.monotonic() < until:
                await asyncio.sleep(0.01)
            during(accounting)
        front.close()

    asyncio.run(main())
    return accounts(run)


def accounts(run):
    return [event for event in run.events() if event["event"] == "accounts"]


def spent():
    ledger = UsageByPrompt(1.0, 1.0)
    ledger.answered(0, "0", 1500, [20, 20], 0.5)
    ledger.answered(1, "1", 500, [20], 0.5)
    ledger.failed(1, "1", 2)
    return ledger


def test_the_last_account_holds_everything(tmp_path):
    [account] = watch(Run.create(tmp_path / "run"), Metered(), spent())
    counts = {"calls": 3, "completions": 3, "failed": 2, "prompt_tokens": 2000, "completion_tokens": 60}
    assert counts.items() <= account.items()
    assert account["cost"] == 0.00206
    assert account["searches"] == {"asked": 3, "searched": 2, "batches": 2}
    assert [(row["hop"], row["prompt"], row["cost"]) for row in account["by_hop_and_prompt"]] == [
        (1, "0", 0.00154),
        (2, "1", 0.00052),
    ]
    assert account["endpoint"] == {"calls": 3, "retries": 2, "latency_p50_s": 0.25}


def test_an_account_is_written_where_sampling_failed(tmp_path):
    run = Run.create(tmp_path / "run")

    def fail(accounting):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watch(run, FakePolicy(), spent(), during=fail)
    assert [event["calls"] for event in accounts(run)] == [3]


def test_the_progress_line_says_it_shortly(tmp_path):
    told = {}
    watch(Run.create(tmp_path / "run"), Metered(), spent(), during=lambda a: told.update(a.facts()))
    assert {"calls": 3, "tokens": "2k+60", "retries": 2, "cost": 0.00206}.items() <= told.items()
    assert told["p90"] == "0.5 s"


def test_prompts_stand_in_the_order_of_their_numbers_and_cost_nothing_without_prices():
    usage = UsageByPrompt()
    for prompt in ("10", "2", "0"):
        usage.answered(0, prompt, 1, [1], 0.1)
    assert [row["prompt"] for row in usage.rows()] == ["0", "2", "10"]
    assert all("cost" not in row for row in usage.rows())


def test_percentiles_are_right_to_five_per_cent():
    rng = random.Random(0)
    values = sorted(rng.lognormvariate(-2, 1) for _ in range(2000))
    meter = UsageMeter()
    for value in rng.sample(values, len(values)):
        meter.answered(value)
    told = meter.snapshot()
    for percent in (50, 90, 99):
        exact = values[min(len(values) - 1, int(len(values) * percent / 100))]
        assert told[f"latency_p{percent}_s"] == pytest.approx(exact, rel=0.06)
    for value in (0.0, -1.0, 1e9):
        meter.answered(value)
    assert meter.snapshot()["calls"] == 2003


def test_counts_of_several_threads_add_up():
    meter = UsageMeter(price_prompt=3.0, price_completion=15.0)
    assert set(meter.snapshot().values()) == {0}

    def work():
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
