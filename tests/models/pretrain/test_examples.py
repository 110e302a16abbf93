from itertools import islice

from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.programs.adapters import CompactAdapter
from leret.retrieval.engines.bm25 import BM25
from models.pretrain.examples import examples
from models.pretrain.heuristics import corpus_idf

DOCUMENTS = [
    Document("a", "Silent Harbor", "Silent Harbor is a film directed by Anna Bolt and released in the year 1990."),
    Document("b", "Anna Bolt", "Anna Bolt is a director who was born in the small city of Port Arden."),
    Document("c", "Red Dune", "Red Dune is a film. Milo Vane made it for the studio of Otto Kern in 1995."),
]
QUESTIONS = [
    "Where was the director of Silent Harbor born?",
    "Who made Red Dune for Otto Kern?",
    "Which film came first, Red Dune or Silent Harbor?",
    "In which city was Anna Bolt born?",
]
IDF = corpus_idf(f"{d.title} {d.text}" for d in DOCUMENTS)
ENGINE = BM25.build(Corpus(DOCUMENTS))


def stream(n, retriever=ENGINE, **changes):
    settings = {"hop1_first": 0, "block": 4, **changes}
    return list(islice(examples(QUESTIONS, retriever, IDF, CompactAdapter(), **settings), n))


def test_both_hops_come_with_demos_and_without_by_the_seed():
    first = stream(200)
    assert stream(200) == first != stream(200, seed=1)
    kinds = [(len(example.messages) > 1, "context:" in example.messages[-1]["content"]) for example in first]
    assert set(kinds) == {(False, False), (False, True), (True, False), (True, True)}
    assert 50 <= sum(with_demos for with_demos, _ in kinds) <= 100  # four in ten, less those without a query
    for example in first:  # demos show other questions and no context, and targets differ
        assert example.targets
        assert len({target for target in example.targets if target.strip()}) == len(example.targets)
        *turns, last = example.messages
        shown = [turn["content"] for turn in turns if turn["role"] == "user"]
        assert last["content"].split("\n")[0] not in shown
        assert not any("context" in text for text in shown)
