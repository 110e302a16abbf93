from collections import Counter

import pytest

from leret.datasets.splits import split_of


def test_splits_are_fixed_for_good_and_have_their_shares():
    names = [split_of(f"question-{i}") for i in range(12)]
    expected = ["train", "train", "test", "test", "train", "test", "train", "train", "train", "test", "train", "test"]
    assert names == expected, "a change here moves questions between training and evaluation in every run"
    assert split_of("\ud800 is half a pair") in {"train", "dev", "test"}
    counts = Counter(split_of(f"q{i}") for i in range(20_000))
    # standard deviations of the shares at n = 20,000: .0028 for .2 and .0021 for .1
    assert counts["test"] / 20_000 == pytest.approx(0.2, abs=0.012)
    assert counts["dev"] / 20_000 == pytest.approx(0.1, abs=0.009)
