import asyncio
import random
from types import SimpleNamespace

import pytest

from leret.core.runs import Run
from leret.http.usage import UsageByPrompt, UsageEvents, UsageMeter
from tests.sampling.fakes import events_of

ENDPOINT = {"calls": 3, "retries": 2, "latency_p50_s": 0.25}
METERED = SimpleNamespace(meter=SimpleNamespace(snapshot=lambda: ENDPOINT))
SEARCHES = {"asked": 3, "searched": 2}


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run")


def spend(run, policy, during=lambda events: None):
    async def session():
        usage = UsageByPrompt(1.0, 1.0)
        async with UsageEvents(run, usage, policy, lambda: SEARCHES) as events:
            usage[1, "10"].answered(0.5, 1500, 40, 2)
            usage[1, "2"].answered(0.5, 500, 20, 1)
            usage[0, "0"].lost(2)
            during(events)

    asyncio.run(session())


def test_last_account_has_all_counts(run):
    spend(run, METERED)
    [account] = events_of(run)
    counts = {"calls": 3, "completions": 3, "failed": 2, "prompt_tokens": 2000, "completion_tokens": 60}
    assert (counts | {"cost": 0.00206, "searches": SEARCHES, "endpoint": ENDPOINT}).items() <= account.items()
    rows = [(row["step"], row["prompt"], row["cost"]) for row in account["by_step_and_prompt"]]
    assert rows == [(0, "0", 0), (1, "2", 0.00052), (1, "10", 0.00154)]


def test_account_is_written_after_a_failure(run):
    with pytest.raises(ZeroDivisionError):
        spend(run, None, lambda events: 1 // 0)
    assert [(event["event"], event["calls"]) for event in events_of(run)] == [("accounts", 3)]


def test_percentiles_are_right_to_five_percent():
    rng, meter = random.Random(0), UsageMeter()
    values = [rng.lognormvariate(-2, 1) for _ in range(2000)]
    for value in values:
        meter.answered(value)
    for percent in (50, 90, 99):
        exact = sorted(values)[int(len(values) * percent / 100)]
        assert meter.snapshot()[f"latency_p{percent}_s"] == pytest.approx(exact, rel=0.06)
    for value in (0.0, -1.0, 1e9):
        meter.answered(value)
    assert meter.snapshot()["calls"] == 2003
    assert "cost" not in meter.snapshot(), "no price was given"
