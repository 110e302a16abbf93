import re
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from leret.core.errors import DataError
from leret.datasets.corpus import Corpus
from leret.datasets.world.generate import generate
from leret.retrieval.engines.bm25 import BM25

SPLITS = ("train", "dev", "test")


@cache
def world(seed):
    documents, questions = generate(seed)
    known = {document.doc_id: document for document in documents}
    assert len(known) == len(documents)
    return known, questions


def of_split(questions, split):
    return [question for question in questions if question.split == split]


def test_sizes_types_splits_and_seed_are_as_asked_for():
    assert generate(3, 20, 5, 20) == generate(3, 20, 5, 20)
    assert generate(3, 20, 5, 20)[1] != generate(4, 20, 5, 20)[1]
    documents, questions = world(1)
    assert Counter(question.split for question in questions) == {"train": 600, "dev": 150, "test": 550}
    n_compare = round(550 * 0.25)
    types = Counter(question.type for question in of_split(questions, "test"))
    assert types == {"comparison": n_compare, "bridge": 550 - n_compare}
    assert len({question.id for question in questions}) == len({question.text for question in questions}) == 1300
    assert all(question.hops == 2 == len(set(question.gold) & documents.keys()) for question in questions)


def test_splits_share_no_gold_documents_or_names():
    documents, questions = world(1)

    def met(question):
        titles = {documents[doc_id].title.split(" (")[0] for doc_id in question.gold}
        return {*question.gold, *titles, *re.findall(r"[A-Z]\w+(?: [A-Z]\w+)+", question.text.split(" ", 1)[1])}

    train, dev, test = (set().union(*map(met, of_split(questions, split))) for split in SPLITS)
    assert not (train & dev | train & test | dev & test)


def test_each_document_of_a_bridge_names_the_next():
    documents, questions = generate(5, 200, 0, 200, three_hop=0.5)
    known = {document.doc_id: document for document in documents}
    bridges = [question for question in questions if question.type == "bridge"]
    assert {question.hops for question in bridges} == {2, 3}
    for question in bridges:
        first, *later = (known[doc_id] for doc_id in question.gold)
        assert first.title.split(" (")[0] in question.text
        assert all(two.title in one.text for one, two in pairwise([first, *later]))
        assert not any(document.title in question.text for document in later)
        assert question.answers[0] in [first, *later][-1].text


def test_invalid_sizes_are_refused_with_the_value():
    for name, value, told in (("comparison", 1.5, "comparison is 1.5"), ("three_hop", -0.1, "three_hop is -0.1"),
                              ("n_test", 5000, "1 to 2000"), ("n_train", -1, "1 to 2000")):  # fmt: skip
        with pytest.raises(DataError, match=told):
            generate(0, **{name: value})


def test_search_needs_two_good_queries():
    """BM25, k=3 a hop, hop 2 skips what hop 1 found: the bands that the demo's bars stand on."""
    documents, questions = world(1)
    engine = BM25.build(Corpus(documents.values()))

    def recall(asked, first, second):
        one, two = ([[p.doc_id for p in found] for found in engine.search(q, k)] for q, k in ((first, 3), (second, 6)))
        both = [[*a, *[id for id in b if id not in a][:3]] for a, b in zip(one, two, strict=True)]
        hits = [[len({*q.gold} & {*ids}) / 2 for q, ids in zip(asked, hop, strict=True)] for hop in (one, both)]
        return sum(hits[0]) / len(asked), sum(hits[1]) / len(asked)

    def titles(asked, hop):
        return [documents[question.gold[hop]].title for question in asked]

    test = of_split(questions, "test")
    texts = [question.text for question in test]
    raw, oracle = recall(test, texts, texts), recall(test, titles(test, 0), titles(test, 1))
    assert (raw[0] <= 0.45, 0.40 <= raw[1] <= 0.60, oracle[1] >= 0.97) == (True, True, True), (raw, oracle)
