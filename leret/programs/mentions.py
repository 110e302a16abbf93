"""Candidates for query expansion with `leret.Pick`: names in the question and retrieved passages, with features."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from leret.core.types import Candidate, Passage
from leret.programs.search import Found

_FUNCTION_WORDS = """
a about after all also an and any are as at be been before between both but by can could did do does during each either
first for from had has have he her him his how if in into is it its many more most much name named no not of on one or
other out same she so some such than that the their them then there these they this those to two up was we were what
when where which while who whom whose why will with would you your
"""
_MONTH_NAMES = (
    "january february march april may june july august september october november december"
)
_INNER_WORDS = "of the for de la le du van von der di da del & el al bin"
_STOP = frozenset(_FUNCTION_WORDS.split())
_MONTHS = frozenset(_MONTH_NAMES.split())
_JOINS = frozenset(_INNER_WORDS.split())
_QUOTED = re.compile(r"[\"“]([^\"“”]{2,60})[\"”]")
_EDGES = "\"“”'‘’()[]{},.;:?!"

WORD = re.compile(r"\w+(?:['’]\w+)*")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])")
LONGEST_NAME = 6

QUESTION = Candidate("[question]", "", data={"question": 1.0})

_ADJECTIVES = ("an", "ans", "ish", "ese", "ic", "ch")
"""Endings of adjectives for peoples and languages, such as "Italian". Such words appear on many pages."""
_BEFORE = 4  # words before a name that are compared with the question
_STEM = 5  # letters of each such word


class _Mention(NamedTuple):
    """A name in a passage, its sentence's number and words, and the stems before the name."""

    text: str
    words: frozenset[str]
    sentence: int
    around: frozenset[str]
    before: frozenset[str]


@lru_cache(maxsize=1024)
def mentions(question: str, results: Found) -> Sequence[Candidate]:
    """Return candidates for expanding the question: `QUESTION`, which adds nothing, and names.

    Names from the question come first, then other names from the retrieved passages, in order.
    Names that occur in a retrieved title are left out. The features in ``data`` need no corpus.
    """
    question_words = words_of(question)
    content = words_of(" ".join(content_words(question)))
    passages = list(chain.from_iterable(results.searches))
    title_words = words_of(" ".join(passage.title for passage in passages))
    page_words = frozenset().union(*map(_page_words, passages))
    rows: dict[str, tuple[str, dict[str, float]]] = {}
    for place, name in enumerate(names(question)):
        words = words_of(name)
        if words and not words <= title_words:
            data = {
                "own": 1.0,
                "own_place": place / 3,
                "own_read": float(words <= page_words),
                **_form(name, words, content),
            }
            rows.setdefault(name.lower(), (name, data))
    best = max((passage.score for passage in passages), default=1.0) or 1.0
    n_first = len(results.searches[0]) if results.searches else 0
    for rank, passage in enumerate(passages):
        page = _of_page(rank, n_first, passage, content, best)
        for mention in _mentions_in(passage.text):
            if mention.words <= question_words or mention.words <= title_words:
                continue
            key = mention.text.lower()
            if key in rows:
                data = rows[key][1]
                data["count"] = data.get("count", 0.0) + 1
                continue
            starts = (word[:_STEM] for word in content)
            data = {
                **page,
                "first_sentence": float(mention.sentence == 0),
                "sentence": min(mention.sentence, 5) / 5,
                "sentence_overlap": len(content & mention.around) / max(1, len(content)),
                "after_question_word": float(not mention.before.isdisjoint(starts)),
                "count": 1.0,
                "titled": len(mention.words & title_words) / len(mention.words),
                **_form(mention.text, mention.words, content),
            }
            rows[key] = mention.text, data
    return (QUESTION, *(Candidate(name, name, data=data) for name, data in rows.values()))


def _of_page(
    rank: int, n_first: int, passage: Passage, content: frozenset[str], best: float
) -> dict[str, float]:
    shared = content & (words_of(passage.title) | words_of(passage.text))
    page_overlap = len(shared) / max(1, len(content))
    if rank >= n_first:
        return {"later": 1.0, "page_overlap": page_overlap}
    return {
        f"rank_{min(rank, 2)}": 1.0,
        "score": passage.score / best,
        "later": 0.0,
        "page_overlap": page_overlap,
    }


def _page_words(passage: Passage) -> frozenset[str]:
    return words_of(f"{passage.title} {passage.text}")


def _form(name: str, words: frozenset[str], content: frozenset[str]) -> dict[str, float]:
    return {
        "several_words": float(len(words) > 1),
        "adjective": float(len(words) <= 2 and name.lower().endswith(_ADJECTIVES)),
        "overlap": len(words & content) / len(words),
    }


@lru_cache(maxsize=8192)
def _mentions_in(text: str) -> tuple[_Mention, ...]:
    first: dict[str, _Mention] = {}
    for number, sentence in enumerate(SENTENCE_END.split(text)):
        around = words_of(sentence)
        for name in names(sentence):
            words = words_of(name)
            key = name.lower()
            if key in first or not words or len(name.split()) > LONGEST_NAME:
                continue
            start = max(sentence.find(name), 0)
            ahead = WORD.findall(sentence[:start])[-_BEFORE:]
            before = frozenset(word.lower()[:_STEM] for word in ahead)
            first[key] = _Mention(name, words, number, around, before)
    return tuple(first.values())


@lru_cache(maxsize=8192)
def words_of(text: str) -> frozenset[str]:
    """Return the set of lowercase words in a text."""
    return frozenset(word.lower() for word in WORD.findall(text))


def content_words(text: str) -> list[str]:
    """Return the words of a text in order, without function and question words. Case is preserved.

    >>> content_words("Which city is the birthplace of Anna Bolt?")
    ['city', 'birthplace', 'Anna', 'Bolt']
    """
    return [word for word in WORD.findall(text) if word.lower() not in _STOP]


def names(text: str) -> list[str]:
    """Return likely names: quoted texts, then runs of capitalised words.

    Leading function words and months are left out.

    >>> names("Who directed The Battle of Algiers, and did C. J. Hunter see it in Rome?")
    ['Battle of Algiers', 'C. J. Hunter', 'Rome']
    """
    spans = []
    for quoted in _QUOTED.findall(text):
        span = quoted.strip(_EDGES + " ")
        if any(word[0].isupper() for word in span.split()):
            spans.append(span)
    run: list[str] = []
    for token in _QUOTED.sub(' "" ', text).split():
        bare = token.strip(_EDGES)
        initial = len(bare) == 1 and bare.isupper() and token.endswith(f"{bare}.")
        opens = token[:1] in '"“‘(['
        capital = bare[:1].isupper() or (bare[:1].isdigit() and bool(run))
        belongs = capital or (run and bare in _JOINS)
        if opens or not belongs:
            _close(run, spans)
        if capital or (run and bare in _JOINS):
            run.append(f"{bare}." if initial else bare)
        if not initial and token[-1:] in _EDGES:
            _close(run, spans)
    _close(run, spans)
    return spans


def _close(run: list[str], spans: list[str]) -> None:
    while run:
        word = run[0].lower()
        if word not in _STOP and word not in _MONTHS and not word[0].isdigit():
            break
        del run[0]
    while run and run[-1] in _JOINS:
        del run[-1]
    if len("".join(run)) > 1:
        spans.append(re.sub(r"['’]s$", "", " ".join(run)))
    run.clear()
