"""Measure how often `leret eval` and `leret compare` call a difference significant where there is none.

Command: python benchmarks/correctness/null_comparison.py [--repetitions 400] [--seed 0]

Each repetition draws a table of a baseline and five systems of equal quality: average precision on 200 questions of
different difficulty, with two gold documents among the first six ranks. The functions that fill summary.json compare
the systems, with their default resamples. Single tests should be significant in 5 % of the cases, and at most 5 % of
the tables should have an adjusted p-value below 5 %.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from leret.evaluation.statistics import Array, Resampling, compare, pairs_of, with_holm
from leret.evaluation.summary import LEVEL
from leret.rewards.ranking import ap

BASELINE, SYSTEMS, QUESTIONS = "base", tuple("abcde"), 200


def scores(rng: np.random.Generator) -> dict[str, Array]:
    """Draw average precision; arrays are by question, hop (one) and measure (one)."""
    chance = rng.beta(1, 1, size=QUESTIONS)  # probability of finding a gold document, by question
    ranks = np.argsort(rng.random((1 + len(SYSTEMS), QUESTIONS, 6)), axis=2)[:, :, :2]  # two gold documents
    is_found = rng.random(ranks.shape) < chance[:, None]
    table = {}
    for i, system in enumerate((BASELINE, *SYSTEMS)):
        values = [
            ap([f"d{rank}" if rank in gold[found] else "other" for rank in range(6)], [f"d{rank}" for rank in gold])
            for gold, found in zip(ranks[i], is_found[i], strict=True)
        ]
        table[system] = np.array(values)[:, None, None]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, began = np.random.default_rng(options.seed), time.process_time()
    pairs = pairs_of({BASELINE: (), **dict.fromkeys(SYSTEMS, ())}, BASELINE)
    p, adjusted, covered = [], [], []
    for repetition in range(options.repetitions):
        rows = with_holm(compare(pairs, scores(rng), ["ap"], Resampling(seed=repetition)))
        p.append([row["p"] for row in rows])
        adjusted.append([row["p_holm"] for row in rows])
        covered.append([row["ci"][0] <= 0 <= row["ci"][1] for row in rows])
    first, every = (np.mean(np.array(p)[:, :n] < LEVEL) for n in (1, len(SYSTEMS)))
    tables, unadjusted = ((np.array(one) < LEVEL).any(axis=1).mean() for one in (adjusted, p))
    print(f"{options.repetitions} repetitions, {time.process_time() - began:.0f} CPU seconds")
    print(f"first comparison of a table significant        {first:.1%}")
    print(f"all comparisons significant                    {every:.1%}")
    print(f"95 % intervals that contain 0                  {np.mean(covered):.1%}")
    print(f"tables with a significant p, unadjusted        {unadjusted:.1%}")
    print(f"tables with a significant p, adjusted by Holm  {tables:.1%}")


if __name__ == "__main__":
    main()
