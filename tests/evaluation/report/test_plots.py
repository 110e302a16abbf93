"""Plots of values that are no shares."""

import re

from leret.evaluation.report.plots import bars_by_hop


def bars(svg):
    """Paths of the bars in their colours."""
    return len(re.findall(r"fill: var\(--s-", svg))


def test_a_histogram_shows_every_value():
    plain = bars_by_hop("x", "reward", {1: [0.0, 0.5, 1.0]})
    wide = bars_by_hop("x", "reward", {1: [-3.5, 0.5, 2.0], 2: [-1.0]})
    assert bars(plain) >= 10
    assert "−2" in wide or "-2" in wide
    assert "hop 1: mean -0.333" in wide
