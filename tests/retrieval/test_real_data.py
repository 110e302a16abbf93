import pytest

from leret.config.data import FileSettings
from leret.datasets.corpus import Corpus
from leret.datasets.load import load
from leret.retrieval.load import load_retriever
from leret.rewards.ranking import recall
from tests.retrieval.small import settings

N_DOCUMENTS, N_QUESTIONS = 600, 60


@pytest.fixture(scope="module")
def data(shared_data):
    """Return documents that are gold for some question, and the questions with all gold among them."""
    folder = shared_data / "hotpotqa"
    paths = {"questions": str(folder / "queries_all.jsonl.gz"), "corpus": str(folder / "corpus.jsonl.gz")}
    whole = load(FileSettings(**paths, split="all"))
    gold = list(dict.fromkeys(doc_id for question in whole.tasks for doc_id in question.gold))[:N_DOCUMENTS]
    questions = [question for question in whole.tasks if set(gold).issuperset(question.gold)][:N_QUESTIONS]
    return Corpus(whole.corpus[doc_id] for doc_id in gold), questions


SLOW = [pytest.param(kind, least, marks=pytest.mark.slow) for kind, least in (("dense", 0.85), ("hybrid", 0.9))]
"""Encode the documents."""


@pytest.mark.parametrize(("kind", "least"), [("bm25", 0.85), ("tantivy", 0.85), *SLOW])
def test_the_gold_documents_are_among_the_first_ten(kind, least, data, tmp_path):
    corpus, questions = data
    engine = load_retriever(settings(kind, tmp_path), corpus, tmp_path / "cache")
    rankings = engine.search([question.text for question in questions], 10)
    ids = [[passage.doc_id for passage in ranking] for ranking in rankings]
    recalls = [recall(found, question.gold) for found, question in zip(ids, questions, strict=True)]
    assert sum(recalls) / len(recalls) >= least
