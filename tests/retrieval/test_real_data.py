from functools import partial
from urllib.parse import unquote

import ir_measures
import pytest

from leret.config.data import FileSettings
from leret.datasets.corpus import Corpus
from leret.datasets.load import load
from leret.evaluation.results import write_qrels, write_run
from leret.retrieval.load import load_retriever
from leret.rewards.ranking import ap, ndcg, recall, rr
from tests.retrieval.small import settings

N_DOCUMENTS, N_QUESTIONS, DEPTH = 600, 60, 50

OURS = {
    ir_measures.R @ 10: partial(recall, k=10),
    ir_measures.AP: ap,
    ir_measures.RR: rr,
    ir_measures.nDCG @ 10: partial(ndcg, k=10),
}

LEAST = {"bm25": 0.85, "tantivy": 0.85, "dense": 0.85, "hybrid": 0.9}
"""Recall@10; ColBERT's projection is untrained, so nothing is asked of what it finds."""


@pytest.fixture(scope="module")
def data(shared_data):
    """Return documents that are gold for some question, and the questions with all gold among them."""
    folder = shared_data / "hotpotqa"
    paths = {"questions": str(folder / "queries_all.jsonl.gz"), "corpus": str(folder / "corpus.jsonl.gz")}
    whole = load(FileSettings(**paths, split="all"))
    gold = list(dict.fromkeys(doc_id for question in whole.tasks for doc_id in question.gold))[:N_DOCUMENTS]
    questions = [question for question in whole.tasks if set(gold).issuperset(question.gold)][:N_QUESTIONS]
    return Corpus(whole.corpus[doc_id] for doc_id in gold), questions


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("dense", "colbert", "hybrid")]  # encode the documents


@pytest.mark.parametrize("kind", ["bm25", "tantivy", *SLOW])
def test_ir_measures_of_a_run_file_equal_the_rewards(kind, data, tmp_path):
    corpus, questions = data
    rankings = load_retriever(settings(kind, tmp_path), corpus, tmp_path / "cache").search(
        [question.text for question in questions], DEPTH
    )
    rows = [
        (question.id, [passage.doc_id for passage in ranking], [passage.score for passage in ranking])
        for question, ranking in zip(questions, rankings, strict=True)
    ]
    write_run(tmp_path / "run.trec", kind, rows)
    write_qrels(tmp_path / "qrels.trec", questions)
    qrels = ir_measures.read_trec_qrels(str(tmp_path / "qrels.trec"))
    run = ir_measures.read_trec_run(str(tmp_path / "run.trec"))
    theirs = {(unquote(m.query_id), m.measure): m.value for m in ir_measures.iter_calc(list(OURS), qrels, run)}
    assert theirs == {
        (question.id, measure): pytest.approx(ours(ids, question.gold), abs=1e-12)
        for question, (_, ids, _) in zip(questions, rows, strict=True)
        for measure, ours in OURS.items()
    }
    recalls = [theirs[question.id, ir_measures.R @ 10] for question in questions]
    assert sum(recalls) / len(recalls) >= LEAST.get(kind, 0.0)
