"""What sampling costs, told while it runs: now and then in events.jsonl, in a few words on the progress line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from leret.core.runs import Run
from leret.core.usage import UsageByPrompt

if TYPE_CHECKING:
    from leret.policies.base import Policy
    from leret.retrieval.batching import SearchBatcher


_EVENT_S = 30.0
_FACTS_S = 1.0


class UsageEvents:
    """Watches one session of sampling. An async context: an ``accounts`` event every half a minute, and one at its end.

    Args:
        run: whose events.jsonl is written.
        ledger: calls and tokens by hop and prompt.
        policy: its ``meter``, where it has one, knows the retries and latencies of single requests.
        front: counts searches.
        every_s: seconds between two events.
    """

    def __init__(
        self, run: Run, ledger: UsageByPrompt, policy: Policy, front: SearchBatcher, every_s: float = _EVENT_S
    ) -> None:
        self._run = run
        self._ledger = ledger
        self._snapshot: Callable[[], Mapping[str, float]] | None = getattr(
            getattr(policy, "meter", None), "snapshot", None
        )
        self._front = front
        self._every_s = every_s
        self._began = time.monotonic()
        self._facts: dict[str, float | int | str] = {}
        self._facts_at = -_FACTS_S
        self._watch: asyncio.Task[None] | None = None

    def account(self) -> dict[str, Any]:
        """All that was counted since the session began."""
        account: dict[str, Any] = {
            "seconds": round(time.monotonic() - self._began, 3),
            **self._ledger.facts(self._ledger.total),
            "searches": self._front.counts(),
            "by_hop_and_prompt": list(self._ledger.rows()),
        }
        if self._snapshot is not None:
            account["endpoint"] = {name: round(value, 6) for name, value in self._snapshot().items()}
        return account

    def facts(self) -> dict[str, float | int | str]:
        """For the progress line; looked up once a second, since it is asked for at every question."""
        now = time.monotonic()
        if now - self._facts_at >= _FACTS_S:
            self._facts_at = now
            self._facts = self._brief()
        return self._facts

    def _brief(self) -> dict[str, float | int | str]:
        total = self._ledger.total
        facts: dict[str, float | int | str] = {
            "calls": total.calls,
            "tokens": f"{_short(total.prompt_tokens)}+{_short(total.completion_tokens)}",
        }
        if total.calls:
            facts["p90"] = f"{total.latencies.percentile(90):.2g} s"
        retries = self._snapshot().get("retries", 0) if self._snapshot is not None else 0
        if retries:
            facts["retries"] = int(retries)
        cost = self._ledger.cost(total)
        if cost:
            facts["cost"] = cost
        return facts

    async def _write_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self._run.event("sample", "accounts", **self.account())

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        self._watch = asyncio.create_task(self._write_now_and_then())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch = self._watch
        if watch is not None:
            watch.cancel()
            with suppress(asyncio.CancelledError, Exception):  # what it could not write, the last event says as well
                await watch
        self._run.event("sample", "accounts", **self.account())


def _short(n: int) -> str:
    """``950``, ``12k``, ``3.4M``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.2g}{unit}" if n < 10 * size else f"{n / size:.0f}{unit}"
    return str(n)
