from leret.evaluation.report.plots import bars_by_step


def test_a_histogram_shows_every_value():
    assert bars_by_step("x", "reward", {0: [0.0, 0.5, 1.0]}).count("fill: var(--s-") >= 10
    wide = bars_by_step("x", "reward", {0: [-3.5, 0.5, 2.0], 1: [-1.0]})
    assert "−2" in wide or "-2" in wide
    assert "step 0: mean -0.333" in wide
