"""What a cluster's workers have done, added up: samples as they come, and the cost of shards that have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from leret.core.types import Failure
from leret.core.usage import UsageByPrompt
from leret.sampling.ray.wire import Batch
from leret.sampling.rollouts.scheduler import SamplingStats, refuse_failures
from leret.sampling.store.merge import Rows, column


class Accounts:
    """Of one command.

    Samples are counted in ``live`` as their rows arrive; questions that wait, tokens and calls are known when a shard
    ends. What a worker that died spent on other shards is not known.

    Args:
        ledger: adds up calls and tokens.
        max_error_rate: share of failed samples that stops the run.
        max_unparsed_rate: share of samples outside the adapter's format that stops it as well.

    Attributes:
        total: of the shards that have ended.
    """

    def __init__(self, ledger: UsageByPrompt, max_error_rate: float, max_unparsed_rate: float) -> None:
        self.total = SamplingStats()
        self._ledger = ledger
        self._rates = max_error_rate, max_unparsed_rate
        self._live = SamplingStats()
        self._ended: set[str] = set()
        self._searches: Counter[str] = Counter()

    def take(self, batch: Batch) -> int:
        """Take note of an answer.

        Returns:
            The number of questions that have come to their end, or that wait.
        """
        n_ended = self._count(batch.rows)
        for ended in batch.ended:
            _add(self.total, ended.tally)
            self._ledger.add(ended.ledger)
            n_ended += ended.tally.waiting
        return n_ended

    def searched(self, counts: Mapping[str, int]) -> None:
        """Take note of all searches of a worker that is no more."""
        self._searches.update(counts)

    def refuse_failures(self, last: bool = False) -> None:
        """Stop where too much fails; see `leret.sampling.rollouts.scheduler.refuse_failures`."""
        for tally in (self._live, self.total):
            refuse_failures(tally, *self._rates, last)

    def progress(self) -> dict[str, float]:
        """Facts to tell with the progress."""
        return {
            "mean_reward": self._live.mean_reward,
            "failures": self._live.failures.total(),
            "samples": self._live.samples,
            "calls": self._ledger.total["calls"],
        }

    def facts(self) -> dict[str, Any]:
        """All of it, for an event."""
        return {
            **self._ledger.total,
            "searches": dict(self._searches),
            "by_hop_and_prompt": list(self._ledger.rows()),
        }

    def _count(self, rows: Rows) -> int:
        kind, message, reward = (column("samples", name) for name in ("failure_kind", "failure_message", "reward"))
        for row in rows.samples:
            self._live.samples += 1
            if row[kind] is not None:
                self._live.fail(Failure(row[kind], row[message]))
            elif row[reward] is not None:
                self._live.reward_sum += row[reward]
                self._live.n_rewarded += 1
        name, outcome = column("visits", "question_id"), column("visits", "outcome")
        ended = {row[name] for row in rows.visits if row[outcome] != "next"} - self._ended
        self._ended |= ended
        return len(ended)


def _add(total: SamplingStats, part: SamplingStats) -> None:
    """Field by field."""
    for own in fields(SamplingStats):
        before, more = getattr(total, own.name), getattr(part, own.name)
        if isinstance(before, Counter):
            before.update(more)
        elif isinstance(before, (int, float)):
            setattr(total, own.name, before + more)
        elif more is not None:
            setattr(total, own.name, more)
