"""Demonstrators for a base policy: rules that write queries in several styles without knowing the answer.

A base policy must write queries of many kinds, good and bad. A style only sees the question and the part of the
passages that a prompt shows. It never sees gold documents, answers or the relations of the generated world.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from leret.core.types import Passage
from leret.programs.mentions import LONGEST_NAME, SENTENCE_END, WORD, content_words, names, words_of

Idf = Callable[[str], float]
"""Inverse document frequency of a word, ignoring case; higher is rarer."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Input of a demonstrator."""

    question: str
    passages: tuple[Passage, ...]  # retrieved so far, best first; empty at the first hop
    idf: Idf
    rng: random.Random
    words_per_item: int = 40  # maximum words of ``title | text`` per passage in a prompt


Style = Callable[[Draft], str | None]
"""Writes one query, or returns None if the style does not apply."""

_MAX_WORDS = 24


def corpus_idf(texts: Iterable[str]) -> Idf:
    """Compute inverse document frequencies, ``log(1 + N / (1 + n))`` for a word that occurs in ``n`` of ``N`` texts.

    >>> idf = corpus_idf(["the cat", "the dog"])
    >>> idf("Cat") > idf("the")
    True
    """
    counts: Counter[str] = Counter()
    n = 0
    for text in texts:
        n += 1
        counts.update({word.lower() for word in WORD.findall(text)})
    return lambda word: math.log(1 + n / (1 + counts[word.lower()]))


def copy(draft: Draft) -> str | None:
    """Copy the question's content words."""
    return _query(content_words(draft.question))


def entity(draft: Draft) -> str | None:
    """Write a name and up to two other words from the question."""
    return _with_question(draft, _pick(draft, names(draft.question)))


def entity_left(draft: Draft) -> str | None:
    """Write a name from the question that is in no retrieved title, and up to two other words from the question."""
    if not draft.passages:
        return None
    titles = " ".join(p.title for p in draft.passages)
    left = [name for name in names(draft.question) if not words_of(name) <= words_of(titles)]
    return _with_question(draft, _pick(draft, left))


def keywords(draft: Draft) -> str | None:
    """Write the two to five rarest content words in the question, in the question's order."""
    return _extreme(draft, draft.rng.randint(2, 5), rarest=True)


def generic(draft: Draft) -> str | None:
    """Write the two to four most common content words in the question. The query is bad on purpose."""
    return _extreme(draft, draft.rng.randint(2, 4), rarest=False)


def title(draft: Draft) -> str | None:
    """Write the title of a passage and up to two words from the question that are not in the title."""
    return _with_question(draft, _pick(draft, [p.title for p in draft.passages if p.title]))


def mention_random(draft: Draft) -> str | None:
    """Write a name from the passages that is not in the question, and up to two words from the question."""
    mentions = [name for passage in draft.passages for name in _mentions(draft, passage, _shown(draft, passage))]
    return _with_question(draft, _pick(draft, mentions))


def mention_matched(draft: Draft) -> str | None:
    """Write a name from the sentence closest to the question, and rare question words that the sentence lacks."""
    asked = words_of(" ".join(content_words(draft.question)))
    best: tuple[float, list[str], str] | None = None
    for passage in draft.passages:
        for sentence in SENTENCE_END.split(_shown(draft, passage)):
            mentions = _mentions(draft, passage, sentence)
            score = sum(draft.idf(word) for word in sorted(asked & words_of(sentence)))
            if mentions and (best is None or score > best[0]):
                best = (score, mentions, sentence)
    if best is None:
        return None
    return _with_question(draft, _pick(draft, best[1]), known=best[2], rarest=True)


def mention_near(draft: Draft) -> str | None:
    """Write a name after a word of the question (``directed by NAME`` for ``director``), from the closest passage."""
    if not draft.passages:
        return None
    asked = content_words(draft.question)
    stems = {word.lower()[:5] for word in asked if word[0].islower()}
    terms = words_of(" ".join(asked))

    def closeness(passage: Passage) -> float:
        return sum(draft.idf(word) for word in sorted(terms & words_of(f"{passage.title} {_shown(draft, passage)}")))

    passage = max(draft.passages, key=closeness)
    shown = _shown(draft, passage)
    matches = []
    for name in _mentions(draft, passage, shown):
        before = WORD.findall(shown.split(name)[0])[-3:]
        if any(word.lower()[:5] in stems for word in before):
            matches.append(name)
    return _with_question(draft, _pick(draft, matches), known=shown, rarest=True)


_FIRST_HOP = (copy, entity, keywords, generic)
_WITH_PASSAGES = (entity_left, title, mention_random, mention_matched, mention_near)
STYLES: dict[str, Style] = {style.__name__: style for style in (*_FIRST_HOP, *_WITH_PASSAGES)}


def draw(rng: random.Random, styles: Mapping[str, float]) -> str:
    """Draw a style's name in proportion to its weight."""
    return rng.choices(list(styles), list(styles.values()))[0]


def _shown(draft: Draft, passage: Passage) -> str:
    room = draft.words_per_item - (len(passage.title.split()) + 1 if passage.title else 0)
    return " ".join(passage.text.split()[: max(0, room)])


def _mentions(draft: Draft, passage: Passage, text: str) -> list[str]:
    """Return the text's names that are quoted or have several words, and are neither in the question nor the title."""
    asked, title_words = words_of(draft.question), words_of(passage.title)
    return [
        name
        for name in names(text)
        if (len(name.split()) > 1 or f'"{name}' in text)
        and len(name.split()) <= LONGEST_NAME
        and not words_of(name) <= asked
        and not words_of(name) <= title_words
    ]


def _pick(draft: Draft, choices: Sequence[str]) -> str | None:
    return draft.rng.choice(choices) if choices else None


def _with_question(draft: Draft, start: str | None, known: str = "", rarest: bool = False) -> str | None:
    """Append up to two words from the question that are neither in ``start`` nor in ``known``."""
    if start is None:
        return None
    seen = words_of(start) | words_of(known)
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
