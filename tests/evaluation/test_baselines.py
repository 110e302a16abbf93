"""Systems without an LM: rules, RM3 and fusion."""

from __future__ import annotations

import asyncio
from pathlib import Path

import dspy
import pytest

from leret.config.evaluation import EvalRecipe
from leret.core.errors import ConfigError
from leret.core.types import Document, Passage, Task
from leret.evaluation.baselines import ScriptedPolicy, answer_fields, expanding, fuse, oracle_titles, raw_question
from leret.evaluation.results import ScoredHop, read_rows
from leret.evaluation.stage import evaluate
from leret.programs.adapters import CompactAdapter
from leret.programs.load import load_program
from leret.programs.prompts import Formatter
from leret.programs.replay import Replay
from leret.programs.runner import ProgramRunner
from leret.retrieval.batching import SearchBatcher
from leret.retrieval.fusion import reciprocal_rank_fusion
from leret.sampling.rollouts.rollout import RolloutRunner
from tests.evaluation import test_stage

ROOT = Path(__file__).parents[2]
CORPUS = {i: Document(i, title, "text") for i, title in [("d1", "Ann"), ("d2", "Bob"), ("d3", "Cid"), ("d4", "")]}


class Words:
    """Ranks the documents whose title stands in the query, longest first; remembers its batches."""

    digest = "words"

    def __init__(self):
        self.batches = []

    def search(self, queries, k):
        self.batches.append((tuple(queries), k))
        return [
            tuple(
                Passage(d.doc_id, d.title, d.text, float(10 - i))
                for i, d in enumerate(CORPUS.values())
                if d.title and d.title in query
            )[:k]
            for query in queries
        ]


def multihop(hops=2, reason=False, **more):
    return load_program(ROOT / "pipelines/multihop.py", "MultiHop", {"hops": hops, "reason": reason}, k=1, **more)


def run_scripted(program, retriever, tasks, script):
    async def main():
        searches, formatter = SearchBatcher(retriever), Formatter(program, CompactAdapter())
        runner = ProgramRunner(Replay(program), formatter, searches)
        try:
            return await RolloutRunner(runner, ScriptedPolicy(formatter, script)).run(tasks)
        finally:
            searches.close()

    return asyncio.run(main())


QUESTIONS = [
    Task.question("q1", "Who knew Ann and Bob?", gold=("d1", "d2")),
    Task.question("q2", "Bob?", gold=("d2", "d3")),
]


def found(trace):
    return [[p.doc_id for p in hop.ranking] for hop in trace.hops]


def test_the_raw_question_is_asked_at_every_hop():
    traces = run_scripted(multihop(), Words(), QUESTIONS, raw_question)
    assert [hop.query for hop in traces[0].hops] == ["Who knew Ann and Bob?"] * 2
    assert found(traces[0]) == [["d1"], ["d1"]]


def test_exclude_seen_is_the_programs():
    traces = run_scripted(multihop(exclude_seen=True), Words(), QUESTIONS, raw_question)
    assert found(traces[0]) == [["d1"], ["d1", "d2"]]


def test_questions_share_their_searches():
    retriever = Words()
    run_scripted(multihop(), retriever, [*QUESTIONS, QUESTIONS[0]], raw_question)
    assert retriever.batches == [(("Who knew Ann and Bob?", "Bob?"), 1)]


def test_the_oracle_asks_for_one_title_a_hop():
    traces = run_scripted(multihop(), Words(), QUESTIONS, oracle_titles(CORPUS, {"q1": 2, "q2": 2}))
    assert [[hop.query for hop in t.hops] for t in traces] == [["Ann", "Bob"], ["Bob", "Cid"]]
    assert found(traces[1]) == [["d2"], ["d2", "d3"]]


def test_the_last_hop_of_the_oracle_asks_for_all_that_remain():
    question = Task.question("q", "?", gold=("d1", "d2", "d3"))
    script = oracle_titles(CORPUS, {"q": 2})
    assert [script(question, 0), script(question, 1)] == [("Ann",), ["Bob", "Cid"]]


def test_an_oracle_with_hops_to_spare_asks_for_its_last_title_again():
    script = oracle_titles(CORPUS, {"q": 3})
    assert [list(script(Task.question("q", "?", gold=("d1",)), step)) for step in range(3)] == [["Ann"]] * 3


def test_a_document_without_a_title_is_asked_for_by_its_first_words():
    assert list(oracle_titles(CORPUS, {"q": 1})(Task.question("q", "?", gold=("d4",)), 0)) == ["text"]


def test_a_chain_of_thought_says_it_in_every_text_field():
    assert found(run_scripted(multihop(1, reason=True), Words(), QUESTIONS, raw_question)[0]) == [["d1"]]


def test_a_list_of_queries_gets_a_list():
    signature = dspy.Signature("question -> queries: list[str], note: str")
    assert answer_fields(signature, ["a", "b"]) == {"queries": ["a", "b"], "note": "a b"}


def test_other_outputs_are_refused():
    with pytest.raises(ConfigError, match=r"leave them out of `systems`"):
        answer_fields(dspy.Signature("question -> ok: bool"), ["a"])


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


def test_rm3_and_a_fusion_are_rows_of_the_summary(run, tmp_path):
    sampled = run.section("sampling", "")  # RM3 reads the index behind the cache
    sampled["retriever"]["cache"] = {"use": "on", "path": str(tmp_path / "rankings")}
    run.update(sampling=sampled)
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
