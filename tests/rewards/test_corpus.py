import random

import numpy as np
import pytest

from leret.rewards.corpus import CORPUS

sacrebleu = pytest.importorskip("sacrebleu")
WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "red", ",", ".", "It's", "well-known"]


def value(name, answers, references=None):
    measure = CORPUS[name]
    return measure.value(measure.rows(answers, references or [("x",)] * len(answers)))


def texts(rng, n, least):
    return [" ".join(rng.choices(WORDS, k=rng.randint(least, 9))) for _ in range(n)]


@pytest.mark.parametrize("seed", range(6))
def test_bleu_of_a_corpus_and_of_its_resamples_equals_sacrebleu(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 8)  # empty answers, and corpora without 4-grams or without matches
    answers, streams = texts(rng, n, 0), [texts(rng, n, 1) for _ in range(rng.randint(1, 3))]
    rows = CORPUS["bleu"].rows(answers, list(zip(*streams, strict=True)))
    drawn = [list(range(n)), *(rng.choices(range(n), k=n) for _ in range(5))]
    expected = [
        sacrebleu.corpus_bleu([answers[i] for i in places], [[stream[i] for i in places] for stream in streams]).score
        for places in drawn
    ]
    sums = np.array([rows[places].sum(axis=0) for places in drawn])
    assert 100 * CORPUS["bleu"].values(sums) == pytest.approx(expected, abs=1e-7)
    assert 100 * CORPUS["bleu"].value(rows) == pytest.approx(expected[0], abs=1e-7)


def test_lengths_are_added_up_with_the_reference_of_the_closest_length():
    answers, references = ["one two three", "", "one"], [("a b", "a b c d e"), ("a",), ("a b c", "")]
    assert value("corpus_length_ratio", answers, references) == pytest.approx((3 + 0 + 1) / (2 + 1 + 0))


def test_distinct_words_and_pairs_are_counted_over_all_answers():
    answers = ["a b a", "b c", ""]
    assert value("distinct1", answers) == pytest.approx(3 / 5)
    assert value("distinct2", answers) == pytest.approx(3 / 3)  # a b, b a, b c
    assert value("distinct1", ["a b"] * 4) == pytest.approx(2 / 8)
    assert np.isnan(value("distinct1", ["", ""]))
