"""The measures that know the names of a generated world, on completions written by hand."""

from __future__ import annotations

from models.gate import holding, names_copied


def test_measures_are_shares_of_names_and_of_pairs_of_name_parts() -> None:
    assert holding([[[1, 2, 3], [2, 1]], [[7, 8]]], [(1, 2), (8,)]) == round(2 / 3, 3)
    parts = {10: 0, 11: 1, 12: 1, 20: 2, 21: 3}
    written = [[[10, 11, 5], [10, 12], [20, 21], [5, 6]]]
    assert names_copied(written, [[10, 11, 9, 20, 21]], parts) == round(2 / 3, 3)
