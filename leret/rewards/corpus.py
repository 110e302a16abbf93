"""Measures of a set of answers, from counts that are added up over the answers.

`leret eval` and `leret.extras.score` report these values in place of the mean over answers. A single
answer is scored by the reward of the same name (`leret.rewards.answers`), which is BLEU for a
sentence, for example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leret.core.errors import import_optional

Array = NDArray[np.float64]
Rows = Callable[[Sequence[str], Sequence[Sequence[str]]], Array]

_ORDERS = 4  # n-grams of 1 to 4 words in BLEU


class CorpusMeasure(NamedTuple):
    """``rows`` maps answers and their references to counts, (n_answers, n_counts).

    ``values`` maps sums of rows, (n, n_counts), to values, (n,); NaN if undefined. ``resampled`` is
    False if a row depends on the other answers, so that there are no bootstrap intervals.
    """

    rows: Rows
    values: Callable[[Array], Array]
    resampled: bool = True

    def value(self, rows: Array) -> float:
        sums = rows.sum(axis=0, keepdims=True)
        return float(self.values(sums)[0])


def bleu_rows(answers: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
    """Return sacrebleu's counts: correct and all n-grams (n from 1 to 4), and both lengths."""
    library = import_optional("sacrebleu", "sacrebleu", "answers")
    rows = []
    for answer, texts in zip(answers, references, strict=True):
        score = library.corpus_bleu([answer], [[text] for text in texts])
        rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    return np.array(rows, dtype=float).reshape(len(rows), 2 * _ORDERS + 2)


def bleu_values(sums: Array) -> Array:
    """Return BLEU in [0, 1] with sacrebleu's defaults."""
    library = import_optional("sacrebleu", "sacrebleu", "answers")
    scores = []
    for row in sums.astype(int).tolist():
        correct = row[:_ORDERS]
        total = row[_ORDERS:-2]
        bleu = library.BLEU.compute_bleu(correct, total, *row[-2:], smooth_method="exp")
        scores.append(bleu.score)
    return np.minimum(1.0, np.array(scores) / 100)  # sacrebleu may return 100.00000000000004


def length_rows(answers: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
    """Return numbers of words: of the answer, and of the reference with the closest length."""
    pairs = [word_counts(answer, refs) for answer, refs in zip(answers, references, strict=True)]
    return np.array(pairs, dtype=float).reshape(len(pairs), 2)


def word_counts(answer: str, references: Sequence[str]) -> tuple[int, int]:
    """Return the words of an answer, and of the closest reference (the shorter if two tie)."""
    n = len(answer.split())
    lengths = [len(reference.split()) for reference in references]
    closest = min(lengths, key=lambda length: (abs(length - n), length))
    return n, closest


def distinct_rows(n: int) -> Rows:
    """Return the function that counts an answer's new n-grams, and all its n-grams."""

    def rows(answers: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        earlier: set[tuple[str, ...]] = set()
        counts = []
        for answer in answers:
            grams = ngrams(answer, n)
            new = set(grams) - earlier
            counts.append((len(new), len(grams)))
            earlier |= new
        return np.array(counts, dtype=float).reshape(len(counts), 2)

    return rows


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """Return the tuples of ``n`` successive words."""
    words = text.split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def ratio(sums: Array) -> Array:
    """Return the first sum divided by the second."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: Array = sums[:, 0] / sums[:, 1]
    return quotient


CORPUS: Mapping[str, CorpusMeasure] = {
    "bleu": CorpusMeasure(bleu_rows, bleu_values),
    "corpus_length_ratio": CorpusMeasure(length_rows, ratio),
    "distinct1": CorpusMeasure(distinct_rows(1), ratio, resampled=False),
    "distinct2": CorpusMeasure(distinct_rows(2), ratio, resampled=False),
}
"""Measures of a set of answers by name."""
