"""What a preference data set says of itself."""

import pytest

from leret.core.runs import Run
from leret.core.types import State
from leret.sampling.preferences.dataset import build_preferences
from leret.sampling.store.schema import PathStep
from leret.sampling.store.store import Store
from tests.sampling.preferences.conftest import ORIGIN, made, rows_of


def test_the_report_counts_what_was_left_out(run):
    report = build_preferences(run)
    assert (report.pairs, report.questions, report.states, report.states_with_pairs, report.no_spread) == (
        3,
        2,
        3,
        2,
        1,
    )
    assert (report.samples, report.rewarded, report.duplicates) == (9, 8, 1)
    assert report.mean_reward == pytest.approx((0.5 + 0 + 0.5 + 1 + 0.25 + 0.75 + 0 + 0) / 8)
    assert report.mean_margin == pytest.approx((0.5 + 0.5 + 0.5) / 3)
    assert report.histogram == [3, 0, 1, 0, 0, 2, 0, 1, 0, 1]
    assert (dict(report.pairs_per_step), dict(report.failures)) == ({0: 2, 1: 1}, {"parse": 1})


def test_rewards_may_be_any_real_numbers(tmp_path):
    run = Run.create(tmp_path / "negative")
    with Store(run.store) as store:
        store.put_state(State("s", "q", 0, "write", {}, ({"role": "user", "content": "?"},)))
        store.put_samples([made("s", "q", 0, i, "0", f"{r}", r) for i, r in enumerate((-3.5, -1.0, 6.5))], ORIGIN)
        store.put_visit(PathStep("q", 0, "P", "s", None, None, "solved"))
    report = build_preferences(run)
    assert [(r["score_chosen"], r["score_rejected"]) for r in rows_of(run)] == [(6.5, -1.0), (-1.0, -3.5)]
    assert (report.reward_range, report.histogram) == ((-3.5, 6.5), [1, 0, 1, 0, 0, 0, 0, 0, 0, 1])
    assert "-3.5--2.5        1 ####" in (run.preferences / "README.md").read_text()
