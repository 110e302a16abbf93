"""Every engine on HotpotQA's own documents: what it finds, and that its run file is measured as leret rewards it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import ir_measures
import pytest

from leret.config.data import DataSettings
from leret.core.types import Task
from leret.datasets.corpus import Corpus
from leret.datasets.load import load
from leret.evaluation.results import write_qrels, write_run
from leret.retrieval.load import load_retriever
from leret.rewards.ranking import ap, ndcg, recall, rr
from tests.retrieval.small import settings

KINDS = ("bm25", "tantivy", "dense", pytest.param("colbert", marks=pytest.mark.slow), "hybrid")
N_DOCUMENTS, N_QUESTIONS, DEPTH = 600, 60, 50

LEAST = {"bm25": 0.85, "tantivy": 0.85, "dense": 0.85, "hybrid": 0.9}
"""Recall@10; ColBERT's projection is untrained, so nothing is asked of what it finds."""


@pytest.fixture(scope="module")
def data(shared_data: Path) -> tuple[Corpus, list[Task]]:
    """Questions whose gold is among the first documents that are gold for any."""
    folder = shared_data / "hotpotqa"
    whole = load(
        DataSettings(
            questions=str(folder / "queries_all.jsonl.gz"), corpus=str(folder / "corpus.jsonl.gz"), split="all"
        )
    )
    gold = list(dict.fromkeys(doc_id for question in whole.tasks for doc_id in question.gold))[:N_DOCUMENTS]
    kept = set(gold)
    questions = [question for question in whole.tasks if kept.issuperset(question.gold)][:N_QUESTIONS]
    return Corpus(whole.corpus[doc_id] for doc_id in gold), questions


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_file_is_measured_as_it_is_rewarded(kind: str, data: tuple[Corpus, list[Task]], tmp_path: Path) -> None:
    corpus, questions = data
    retriever = load_retriever(settings(kind, tmp_path), corpus, tmp_path / "cache")
    rankings = retriever.search([question.text for question in questions], DEPTH)
    rows = [
        (question.id, [found.doc_id for found in ranking], [found.score for found in ranking])
        for question, ranking in zip(questions, rankings, strict=True)
    ]
    write_run(tmp_path / "run.trec", kind, rows)
    write_qrels(tmp_path / "qrels.trec", questions)
    ours = {
        ir_measures.R @ 10: lambda ids, gold: recall(ids, gold, 10),
        ir_measures.AP: lambda ids, gold: ap(ids, gold),
        ir_measures.RR: lambda ids, gold: rr(ids, gold),
        ir_measures.nDCG @ 10: lambda ids, gold: ndcg(ids, gold, 10),
    }
    theirs = ir_measures.iter_calc(
        list(ours),
        ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec")),
        ir_measures.read_trec_run(str(tmp_path / "run.trec")),
    )
    ids = {qid: doc_ids for qid, doc_ids, _ in rows}
    gold = {question.id: question.gold for question in questions}
    measured = 0
    for metric in theirs:
        qid = unquote(metric.query_id)
        assert metric.value == pytest.approx(ours[metric.measure](ids[qid], gold[qid]), abs=1e-12)
        measured += 1
    assert measured == len(ours) * len(questions)
    if kind in LEAST:
        found = [recall(ids[question.id], question.gold, 10) for question in questions]
        assert sum(found) / len(found) >= LEAST[kind]
