import asyncio
from types import SimpleNamespace

import pytest

from leret.core.runs import Run
from leret.http.usage import Usage, UsageEvents
from tests.sampling.fakes import events_of


def test_last_account_has_all_counts_also_after_a_failure(tmp_path):
    endpoint, searches = {"retries": 2, "fault_timeout": 3}, {"asked": 3, "searched": 2}
    metered = SimpleNamespace(meter=SimpleNamespace(snapshot=lambda: endpoint))
    run, usage = Run.create(tmp_path / "run"), Usage(1.0, 1.0)

    async def session():
        async with UsageEvents(run, usage, metered, lambda: searches):
            usage.answered(0.5, 1500, 40, 2)
            usage.answered(0.5, 500, 20, 1)
            usage.lost(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(session())
    [account] = events_of(run)
    counts = {"event": "accounts", "calls": 3, "completions": 3, "failed": 2}
    counts |= {"prompt_tokens": 2000, "completion_tokens": 60}
    assert (counts | {"cost": 0.00206, "searches": searches, "endpoint": endpoint}).items() <= account.items()
