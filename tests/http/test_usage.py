import asyncio
import random
from types import SimpleNamespace

import pytest

from leret.core.runs import Run
from leret.http.usage import Usage, UsageEvents
from tests.sampling.fakes import events_of

ENDPOINT = {"retries": 2, "fault_timeout": 3}
METERED = SimpleNamespace(meter=SimpleNamespace(snapshot=lambda: ENDPOINT))
SEARCHES = {"asked": 3, "searched": 2}


def test_last_account_has_all_counts_also_after_a_failure(tmp_path):
    run, usage = Run.create(tmp_path / "run"), Usage(1.0, 1.0)

    async def session():
        async with UsageEvents(run, usage, METERED, lambda: SEARCHES):
            usage.answered(0.5, 1500, 40, 2)
            usage.answered(0.5, 500, 20, 1)
            usage.lost(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(session())
    [account] = events_of(run)
    counts = {"event": "accounts", "calls": 3, "completions": 3, "failed": 2}
    counts |= {"prompt_tokens": 2000, "completion_tokens": 60}
    assert (counts | {"cost": 0.00206, "searches": SEARCHES, "endpoint": ENDPOINT}).items() <= account.items()


def test_percentiles_are_right_to_five_percent():
    rng, usage = random.Random(0), Usage()
    values = [rng.lognormvariate(-2, 1) for _ in range(2000)]
    for value in values:
        usage.answered(value)
    for percent in (50, 90, 99):
        exact = sorted(values)[int(len(values) * percent / 100)]
        assert usage.facts()[f"latency_p{percent}_s"] == pytest.approx(exact, rel=0.06)
    for value in (0.0, -1.0, 1e9):
        usage.answered(value)
    assert usage.facts()["calls"] == 2003
    assert "cost" not in usage.facts(), "no price was given"
