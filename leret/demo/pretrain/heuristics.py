"""Ways to write a query without knowing the answer: the demonstrators of a base policy.

A base policy that is to be taught by reward must first write queries at all, of many kinds, good and bad ones. These
styles show it how. Each looks at the question and at the passages found so far, as far as a prompt shows them, and at
nothing else: gold documents, answers and the hidden relations of a generated world are out of its reach.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from leret.core.types import Passage

Idf = Callable[[str], float]
"""Rarity of a word in the corpus, in any case; higher is rarer."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a demonstrator sees."""

    question: str
    passages: tuple[Passage, ...]  # found so far, best first; empty at the first hop
    idf: Idf
    rng: random.Random
    words_per_item: int = 40  # words of ``title | text`` that a prompt shows of a passage


Style = Callable[[Draft], str | None]
"""Writes one query; None where the style has nothing to say."""

_FUNCTION_WORDS = """
a about after all also an and any are as at be been before between both but by can could did do does during each either
first for from had has have he her him his how if in into is it its many more most much name named no not of on one or
other out same she so some such than that the their them then there these they this those to two up was we were what
when where which while who whom whose why will with would you your
"""
_MONTH_NAMES = "january february march april may june july august september october november december"
_INNER_WORDS = "of the for de la le du van von der di da del & el al bin"
_STOP = frozenset(_FUNCTION_WORDS.split())
_MONTHS = frozenset(_MONTH_NAMES.split())
_JOINS = frozenset(_INNER_WORDS.split())
_QUOTED = re.compile(r"[\"“]([^\"“”]{2,60})[\"”]")
_WORD = re.compile(r"\w+(?:['’]\w+)*")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])")
_EDGES = "\"“”'‘’()[]{},.;:?!"
_MAX_WORDS = 24
_LONGEST_NAME = 6


def corpus_idf(texts: Iterable[str]) -> Idf:
    """Inverse document frequency, ``log(1 + N / (1 + n))`` for a word in ``n`` of ``N`` texts.

    >>> idf = corpus_idf(["the cat", "the dog"])
    >>> idf("Cat") > idf("the")
    True
    """
    counts: Counter[str] = Counter()
    n = 0
    for text in texts:
        n += 1
        counts.update({word.lower() for word in _WORD.findall(text)})
    return lambda word: math.log(1 + n / (1 + counts[word.lower()]))


def content_words(text: str) -> list[str]:
    """Words of a text without function and question words, in their order and case.

    >>> content_words("Which city is the birthplace of Anna Bolt?")
    ['city', 'birthplace', 'Anna', 'Bolt']
    """
    return [word for word in _WORD.findall(text) if word.lower() not in _STOP]


def names(text: str) -> list[str]:
    """What looks like a name: what is quoted, whole, and then runs of capitalised words; each in order.

    Function words and months at a run's start fall off, so a sentence's first word is no name; ``of``, ``the``, ``de``
    and their like may stand inside; a run ends at punctuation, but not at the dot of an initial.

    >>> names("Who directed The Battle of Algiers, and did C. J. Hunter see it in Rome?")
    ['Battle of Algiers', 'C. J. Hunter', 'Rome']
    """
    quoted = [span.strip(_EDGES + " ") for span in _QUOTED.findall(text)]
    found = [span for span in quoted if any(word[0].isupper() for word in span.split())]
    run: list[str] = []
    for token in _QUOTED.sub(' "" ', text).split():
        bare = token.strip(_EDGES)
        initial = len(bare) == 1 and bare.isupper() and token.endswith(f"{bare}.")
        opens = token[:1] in '"“‘(['
        capital = bare[:1].isupper() or (bare[:1].isdigit() and bool(run))
        if opens or not (capital or (run and bare in _JOINS)):
            _close(run, found)
        if capital or (run and bare in _JOINS):
            run.append(f"{bare}." if initial else bare)
        if not initial and token[-1:] in _EDGES:
            _close(run, found)
    _close(run, found)
    return found


def _close(run: list[str], found: list[str]) -> None:
    while run and (run[0].lower() in _STOP or run[0].lower() in _MONTHS or run[0][0].isdigit()):
        del run[0]
    while run and run[-1] in _JOINS:
        del run[-1]
    if run and (len(run) > 1 or len(run[0]) > 1):
        found.append(re.sub(r"['’]s$", "", " ".join(run)))
    run.clear()


def copy(draft: Draft) -> str | None:
    """The question's content words."""
    return _query(content_words(draft.question))


def entity(draft: Draft) -> str | None:
    """A name of the question, with up to two of its other words."""
    return _with_question(draft, _pick(draft, names(draft.question)))


def entity_left(draft: Draft) -> str | None:
    """A name of the question that no title found so far contains, with up to two other words."""
    if not draft.passages:
        return None
    titles = " ".join(p.title for p in draft.passages)
    return _with_question(draft, _pick(draft, [n for n in names(draft.question) if not _lower(n) <= _lower(titles)]))


def keywords(draft: Draft) -> str | None:
    """The two to five rarest words of the question, in its order."""
    return _extreme(draft, draft.rng.randint(2, 5), rarest=True)


def generic(draft: Draft) -> str | None:
    """The two to four most common content words of the question: a bad query, on purpose."""
    return _extreme(draft, draft.rng.randint(2, 4), rarest=False)


def title(draft: Draft) -> str | None:
    """The title of a passage, with up to two words of the question that are not in it."""
    return _with_question(draft, _pick(draft, [p.title for p in draft.passages if p.title]))


def mention_random(draft: Draft) -> str | None:
    """A name of several words from the passages that is not in the question, with up to two words of the question."""
    found = [name for passage in draft.passages for name in _mentions(draft, passage, _shown(draft, passage))]
    return _with_question(draft, _pick(draft, found))


def mention_matched(draft: Draft) -> str | None:
    """A name from the passage sentence closest to the question, with rare words of the question not in it."""
    asked = _lower(" ".join(content_words(draft.question)))
    best: tuple[float, list[str], str] | None = None
    for passage in draft.passages:
        for sentence in _SENTENCE.split(_shown(draft, passage)):
            found = _mentions(draft, passage, sentence)
            score = sum(draft.idf(word) for word in sorted(asked & _lower(sentence)))
            if found and (best is None or score > best[0]):
                best = (score, found, sentence)
    if best is None:
        return None
    return _with_question(draft, _pick(draft, best[1]), known=best[2], rarest=True)


def mention_near(draft: Draft) -> str | None:
    """A name of the closest passage that follows a word of the question (``directed by``: ``director``)."""
    if not draft.passages:
        return None
    asked = content_words(draft.question)
    stems = {word.lower()[:5] for word in asked if word[0].islower()}
    terms = _lower(" ".join(asked))

    def closeness(passage: Passage) -> float:
        return sum(draft.idf(word) for word in sorted(terms & _lower(f"{passage.title} {_shown(draft, passage)}")))

    passage = max(draft.passages, key=closeness)
    shown = _shown(draft, passage)
    found = []
    for name in _mentions(draft, passage, shown):
        before = _WORD.findall(shown.split(name)[0])[-3:]
        if any(word.lower()[:5] in stems for word in before):
            found.append(name)
    return _with_question(draft, _pick(draft, found), known=shown, rarest=True)


STYLES: dict[str, Style] = {
    "copy": copy,
    "entity": entity,
    "keywords": keywords,
    "generic": generic,
    # The others need passages.
    "entity_left": entity_left,
    "title": title,
    "mention_random": mention_random,
    "mention_matched": mention_matched,
    "mention_near": mention_near,
}


def _shown(draft: Draft, passage: Passage) -> str:
    room = draft.words_per_item - (len(passage.title.split()) + 1 if passage.title else 0)
    return " ".join(passage.text.split()[: max(0, room)])


def _mentions(draft: Draft, passage: Passage, text: str) -> list[str]:
    """Names in a text, of several words or quoted, neither in the question nor in the passage's own title."""
    asked, own = _lower(draft.question), _lower(passage.title)
    return [
        name
        for name in names(text)
        if (len(name.split()) > 1 or f'"{name}' in text)
        and len(name.split()) <= _LONGEST_NAME
        and not _lower(name) <= asked
        and not _lower(name) <= own
    ]


def _lower(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _pick(draft: Draft, choices: Sequence[str]) -> str | None:
    return draft.rng.choice(choices) if choices else None


def _with_question(draft: Draft, start: str | None, known: str = "", rarest: bool = False) -> str | None:
    """A name and up to two words of the question that neither it nor ``known`` has."""
    if start is None:
        return None
    seen = _lower(start) | _lower(known)
    rest = [word for word in dict.fromkeys(content_words(draft.question)) if word.lower() not in seen]
    n = min(len(rest), draft.rng.choice((0, 0, 1, 1, 2)))
    chosen = sorted(rest, key=draft.idf, reverse=True)[:n] if rarest else draft.rng.sample(rest, n)
    return _query([start, *(word for word in rest if word in chosen)])


def _extreme(draft: Draft, n: int, rarest: bool) -> str | None:
    words = list(dict.fromkeys(content_words(draft.question)))
    chosen = set(sorted(words, key=draft.idf, reverse=rarest)[:n])
    return _query([word for word in words if word in chosen])


def _query(parts: Sequence[str]) -> str | None:
    return " ".join(" ".join(parts).split()[:_MAX_WORDS]) or None
