import random
from itertools import islice

from leret.core.types import Document, Passage
from leret.datasets.corpus import Corpus
from leret.programs.adapters import CompactAdapter
from leret.retrieval.engines.bm25 import BM25
from models.pretrain.examples import examples, pseudo_questions
from models.pretrain.heuristics import STYLES, Draft, corpus_idf

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


def test_pseudo_questions_are_sentences_of_the_corpus():
    found = pseudo_questions(DOCUMENTS, 3, seed=0)
    assert found == pseudo_questions(DOCUMENTS, 3, seed=0)
    assert "Anna Bolt is a director who was born in the small city of Port Arden?" in found
    assert "Red Dune is a film?" not in found  # fewer than eight words


QUESTION = "Which city is the birthplace of the director of Silent Harbor?"
HARBOR = Passage("h", "Silent Harbor", "Silent Harbor is a film directed by Anna Bolt. Otto Kern wrote it.", 9.0)
OTHER = Passage("o", "Harbor Lights", "Harbor Lights is a song sung by Milo Vane in Port Arden.", 5.0)
RARE = {"birthplace": 5.0, "director": 3.0, "city": 1.0, "silent": 4.0, "harbor": 2.0}


def written(style, question=QUESTION, passages=(HARBOR, OTHER), words=40):
    def idf(word):
        return RARE.get(word.lower(), 0.5)

    return {STYLES[style](Draft(question, passages, idf, random.Random(seed), words)) for seed in range(60)}


def test_copy_writes_the_content_words_24_at_most():
    assert written("copy") == {"city birthplace director Silent Harbor"}
    long = " ".join(f"Word{i}" for i in range(60))
    assert {len(query.split()) for query in written("copy", long)} == {24}


def test_mentions_are_names_that_the_question_lacks_and_the_prompt_shows():
    starts = {" ".join(query.split()[:2]) for query in written("mention_random")}
    assert starts == {"Anna Bolt", "Otto Kern", "Milo Vane", "Port Arden"}
    # The closest sentence's, with the rarest words that it lacks; and the one that follows a word of the question.
    assert written("mention_matched") == {"Anna Bolt", "Anna Bolt birthplace", "Anna Bolt birthplace director"}
    assert {query[:9] for query in written("mention_near")} == {"Anna Bolt"}
    assert written("mention_random", words=5) == {None}
