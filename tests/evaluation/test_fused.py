"""Baselines without an LM of their own, in `leret eval`."""

from __future__ import annotations

import pytest

from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError
from leret.core.types import Passage, Task
from leret.evaluation.fused import expanding, fuse
from leret.evaluation.results import ScoredHop, read_rows
from leret.evaluation.stage import evaluate
from leret.retrieval.fusion import reciprocal_rank_fusion
from tests.evaluation import test_stage

base, run = test_stage.base, test_stage.run


def row(question, hop, *doc_ids, sample=0, failure=None, query="q"):
    return ScoredHop(question, None, sample, hop, query, None, doc_ids, (1.0,) * len(doc_ids), {}, failure=failure)


def test_each_hop_fuses_the_rankings_of_that_hop():
    a = [row("1", 1, "x", "y"), row("1", 2, "x", "y", "z"), row("1", 1, "other sample", sample=1)]
    b = [row("1", 1, "y", "w", query="rewrite")]
    (trace,) = fuse([a, b], [Task.question("1", "t")])
    # hop 1: y 1/62 + 1/61, x 1/61, w 1/62; hop 2: the ranking of b stays what it was
    assert [[p.doc_id for p in hop.ranking] for hop in trace.hops] == [["y", "x", "w"], ["y", "x", "w", "z"]]
    assert trace.hops[0].ranking[0].score == pytest.approx(1 / 62 + 1 / 61)
    assert trace.hops[0].query == "q + rewrite"
    assert trace.hops[0].completion is None


def test_a_part_that_failed_fails_the_fusion_and_is_not_scored():
    ok, bad = [row("1", 1, "x")], [row("1", 1, failure="policy: away")]
    assert next(iter(fuse([ok, bad], [Task.question("1", "t")]))).error == "policy: away"
    assert next(iter(fuse([ok, []], [Task.question("1", "t")]))).error


def test_rm3_and_a_fusion_are_rows_of_the_summary(run):
    recipe = EvalRecipe(resamples=100, systems=("fused:base", "rm3"), limit=6)
    report = evaluate(recipe, run)
    rows = {row["system"]: row for row in report.summary["rows"]}
    assert list(rows) == ["raw-question", "rm3", "base", "fused:base"]
    assert rows["fused:base"]["lm_calls"] == rows["rm3"]["lm_calls"] == 0
    assert rows["fused:base"]["failed"] == rows["rm3"]["failed"] == 0
    kept = {name: {(r.question_id, r.hop): r for r in read_rows(run.eval / name / "per_question.parquet")}
            for name in rows}  # fmt: skip
    for key, fused in kept["fused:base"].items():
        parts = [tuple(Passage(i, "", "", 0.0) for i in kept[name][key].doc_ids) for name in ("raw-question", "base")]
        assert list(fused.doc_ids) == [p.doc_id for p in reciprocal_rank_fusion(parts, (1, 1))]
    assert evaluate(recipe, run).already


def test_rm3_needs_bm25():
    class Other:
        digest = "x"

        def search(self, queries, k):
            return []

    with pytest.raises(ConfigError, match=r"rm3 cannot be evaluated.*leave it out"):
        expanding(Other())
