import math
import random

import pytest

from leret.core.types import Passage
from models.pretrain.heuristics import STYLES, Draft, corpus_idf

QUESTION = "Which city is the birthplace of the director of Silent Harbor?"
HARBOR = Passage("h", "Silent Harbor", "Silent Harbor is a film directed by Anna Bolt. Otto Kern wrote it.", 9.0)
OTHER = Passage("o", "Harbor Lights", "Harbor Lights is a song sung by Milo Vane in Port Arden.", 5.0)
RARE = {"birthplace": 5.0, "director": 3.0, "city": 1.0, "silent": 4.0, "harbor": 2.0}


def written(style, question=QUESTION, passages=(HARBOR, OTHER), words=40):
    def idf(word):
        return RARE.get(word.lower(), 0.5)

    return {STYLES[style](Draft(question, passages, idf, random.Random(seed), words)) for seed in range(60)}


def test_idf_follows_its_formula_in_any_case():
    rarity = corpus_idf(["The cat", "the dog", "the the cow"])
    found = [rarity(word) for word in ("THE", "cat", "absent")]
    assert found == pytest.approx([math.log(1 + 3 / 4), math.log(1 + 3 / 2), math.log(1 + 3 / 1)])


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


def test_first_hop_styles_need_no_passages():
    assert [s for s in STYLES if None not in written(s, passages=())] == ["copy", "entity", "keywords", "generic"]
