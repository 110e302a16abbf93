"""Counts by hop and prompt."""

import random

import pytest

from leret.core.usage import Latencies, UsageByPrompt


def test_a_prompt_counts_once_for_all_its_samples_and_costs_by_the_million():
    ledger = UsageByPrompt(price_prompt=2.0, price_completion=10.0)
    ledger.answered(0, "0", 100, [5, 7], 0.5)
    ledger.answered(1, "0", 300, [5], 1.0)
    ledger.failed(1, "0", 2)
    first, second = ledger.rows()
    # 100 prompt tokens at 2 and 12 completion tokens at 10 a million
    assert (first["hop"], first["prompt"], first["calls"], first["samples"]) == (1, "0", 1, 2)
    assert first["cost"] == pytest.approx((100 * 2 + 12 * 10) / 1e6)
    assert (second["calls"], second["samples"], second["failed"]) == (2, 1, 2)
    total = ledger.facts(ledger.total)
    assert (total["calls"], total["prompt_tokens"], total["completion_tokens"]) == (3, 400, 17)


def test_without_prices_there_is_no_cost():
    ledger = UsageByPrompt()
    ledger.answered(0, "0", 100, [5], 0.5)
    assert all("cost" not in row for row in ledger.rows())


def test_prompts_stand_in_the_order_of_their_numbers():
    ledger = UsageByPrompt()
    for prompt in ("10", "2", "0"):
        ledger.answered(0, prompt, 1, [1], 0.1)
    assert [row["prompt"] for row in ledger.rows()] == ["0", "2", "10"]


def test_percentiles_are_right_to_five_per_cent():
    rng = random.Random(0)
    values = sorted(rng.lognormvariate(-2, 1) for _ in range(2000))
    seen = Latencies()
    for value in rng.sample(values, len(values)):
        seen.add(value)
    for percent in (1, 50, 90, 99):
        exact = values[min(len(values) - 1, int(len(values) * percent / 100))]
        assert seen.percentile(percent) == pytest.approx(exact, rel=0.06)
    assert Latencies().percentile(50) == 0
