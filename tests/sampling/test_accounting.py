"""What a session costs, in events.jsonl and on the progress line."""

import asyncio
import time

import pytest

from leret.core.runs import Run
from leret.core.usage import UsageByPrompt
from leret.retrieval.batching import SearchBatcher
from leret.sampling.accounting import UsageEvents
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
    ledger = UsageByPrompt(price_prompt=1.0)
    ledger.answered(0, "0", 1500, [20, 20], 0.5)
    ledger.answered(1, "1", 500, [20], 0.5)
    return ledger


def test_the_last_account_holds_everything(tmp_path):
    [account] = watch(Run.create(tmp_path / "run"), Metered(), spent())
    assert (account["calls"], account["samples"], account["prompt_tokens"]) == (2, 3, 2000)
    assert account["cost"] == 0.002
    assert account["searches"] == {"asked": 3, "searched": 2, "batches": 2}
    assert [(row["hop"], row["prompt"], row["cost"]) for row in account["by_hop_and_prompt"]] == [
        (1, "0", 0.0015),
        (2, "1", 0.0005),
    ]
    assert account["endpoint"] == {"calls": 3, "retries": 2, "latency_p50_s": 0.25}


def test_an_account_is_written_now_and_then(tmp_path):
    assert len(watch(Run.create(tmp_path / "run"), FakePolicy(), UsageByPrompt(), every_s=0.02, at_least=2)) > 2


def test_an_account_is_written_where_sampling_failed(tmp_path):
    run = Run.create(tmp_path / "run")

    def fail(accounting):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watch(run, FakePolicy(), spent(), during=fail)
    assert [event["calls"] for event in run.events() if event["event"] == "accounts"] == [2]


def test_the_progress_line_says_it_shortly(tmp_path):
    told = {}
    watch(Run.create(tmp_path / "run"), Metered(), spent(), during=lambda a: told.update(a.facts()))
    assert {"calls": 2, "tokens": "2k+60", "retries": 2, "cost": 0.002}.items() <= told.items()
    assert told["p90"] == "0.5 s"
