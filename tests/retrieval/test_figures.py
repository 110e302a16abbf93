"""BM25 on real data reproduces the figures that were published with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from leret.retrieval.engines.bm25 import BM25

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from bm25_figures import DEPTH, SETS, figures, read


@pytest.mark.parametrize("name", ["scifact", "musique", "hotpotqa"])
def test_published_figures_to_three_decimals(shared_data: Path, name: str) -> None:
    data = read(shared_data, name)
    rankings = BM25.build(data.corpus, fold_accents=False).search([q.text for q in data.questions], DEPTH)
    # half a unit of the third decimal for rounding, and a little for the order of equal scores
    assert figures(data.questions.items, rankings) == pytest.approx(SETS[name][2:], abs=0.0006)
