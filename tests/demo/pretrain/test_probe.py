"""The measures of a base policy, on completions written by hand."""

from __future__ import annotations

from leret.demo.pretrain.probe import copied, generate, holding, names_copied
from leret.demo.pretrain.words import build_model


def test_measures_are_shares_of_names_words_and_pairs_of_name_parts() -> None:
    assert holding([[[1, 2, 3], [2, 1]], [[7, 8]]], [(1, 2), (8,)]) == round(2 / 3, 3)
    assert copied([[[1, 2], [9, 1]]], [[1, 2, 3]]) == 0.75
    parts = {10: 0, 11: 1, 12: 1, 20: 2, 21: 3}
    written = [[[10, 11, 5], [10, 12], [20, 21], [5, 6]]]
    assert names_copied(written, [[10, 11, 9, 20, 21]], parts) == round(2 / 3, 3)


def test_completions_end_before_the_end_token_and_do_not_depend_on_their_neighbours() -> None:
    model = build_model(40, 0)
    prompts = [(6, 7, 8), (9, 10, 11, 12, 13, 14)]
    together = generate(model, prompts, 0)
    alone = [generate(model, [prompt], 0)[0] for prompt in prompts]
    assert together == alone
    assert all(2 not in text for some in generate(model, prompts, 4) for text in some)
