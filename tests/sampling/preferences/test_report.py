import pytest

from leret.sampling.preferences.dataset import build_preferences


def test_the_report_counts_what_was_left_out(run):
    report = build_preferences(run)
    assert (report.questions, report.states, report.states_with_pairs, report.no_spread) == (2, 3, 2, 1)
    assert (report.pairs, report.samples, report.rewarded, report.duplicates) == (3, 9, 8, 1)
    assert report.mean_reward == pytest.approx((0.5 + 0 + 0.5 + 1 + 0.25 + 0.75 + 0 + 0) / 8)
    assert report.mean_margin == pytest.approx((0.5 + 0.5 + 0.5) / 3)
    assert report.histogram == [3, 0, 1, 0, 0, 2, 0, 1, 0, 1]
    assert (dict(report.pairs_per_step), dict(report.failures)) == ({0: 2, 1: 1}, {"parse": 1})
    card = (run.preferences / "README.md").read_text()
    rows = "| duplicates dropped | 1 |", "| parse | 1 |", "| 0 | 2 |", "no spread (all rewards equal) | 1 (33.3%)"
    assert [row for row in rows if row not in card] == []
