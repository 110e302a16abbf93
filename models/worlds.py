"""Training rows for the demo's policy: prompts from generated worlds, with queries by demonstrators.

The styles of :mod:`models.pretrain.heuristics` see the question and the passages, never a gold document. When a row
is used again, its names are replaced by other names of their class, so that the model must copy names instead of
memorising them. Some rows are lists of names to repeat, because an exercise without other content teaches copying
fastest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from leret.core.types import merge
from leret.datasets.corpus import Corpus
from leret.datasets.world.generate import generate
from leret.retrieval.engines.bm25 import BM25
from models.pretrain.examples import call_messages, encoded
from models.pretrain.heuristics import STYLES, Draft, corpus_idf, draw, entity
from models.pretrain.loop import Row, interleaved
from models.words import NAME_CLASSES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


HOP1_STYLES = {"copy": 0.2, "entity": 0.4, "keywords": 0.25, "generic": 0.15}
HOP2_STYLES = {
    "copy": 0.12,
    "entity": 0.08,
    "entity_left": 0.05,
    "keywords": 0.1,
    "generic": 0.06,
    "title": 0.12,
    "mention_random": 0.07,
    "mention_matched": 0.18,
    "mention_near": 0.22,
}
"""Sampling weights of the styles; `entity` replaces a style that does not apply."""


def write(style: str, draft: Draft) -> str:
    """Write a query in a style. If the style does not apply, write an entity of the question, or the question."""
    return STYLES[style](draft) or entity(draft) or draft.question


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of the stream of rows."""

    seed: int = 0  # base of all seeds; worlds' seeds are far above a user's
    questions: int = 400  # per world
    uses: int = 3  # passes over the rows of a world; all but the first replace the names
    deep: float = 0.15  # share of questions that have the context of a third hop
    demos: tuple[float, float] = (0.4, 0.8)  # share of questions that add a prompt with demos, at hop 1 and later
    lists: tuple[float, float] = (0.95, 0.1)  # shares of lists of names, at the start and at the end
    constant_after: int = 14_000  # rows after which the share of lists is constant
    hop1: Mapping[str, float] = field(default_factory=lambda: HOP1_STYLES)  # weights at the first hop
    hop2: Mapping[str, float] = field(default_factory=lambda: HOP2_STYLES)  # weights at later hops


def start(seed: int, settings: StreamSettings) -> tuple[list[Draft], BM25]:
    """Return the questions of a new world as drafts without passages, and the world's search index."""
    documents, questions = generate(seed, settings.questions, 0, 0)
    idf = corpus_idf(f"{document.title} {document.text}" for document in documents)
    rng = random.Random(f"scenes {seed}")
    return [Draft(question.text, (), idf, rng) for question in questions], BM25.build(Corpus(documents))


def drafts(seed: int, settings: StreamSettings) -> list[Draft]:
    """Return the questions of a new world with passages for queries in random styles (k=3, no duplicates)."""
    started, retriever = start(seed, settings)
    rng = started[0].rng
    queries = [write(draw(rng, settings.hop1), draft) for draft in started]
    rankings = retriever.search(queries, 3)
    later = [replace(draft, passages=ranking) for draft, ranking in zip(started, rankings, strict=True)]
    deep = [i for i in range(len(later)) if rng.random() < settings.deep]
    queries = [write(draw(rng, settings.hop2), later[i]) for i in deep]
    for i, ranking in zip(deep, retriever.search(queries, 6), strict=True):
        seen = {passage.doc_id for passage in later[i].passages}
        new = [passage for passage in ranking if passage.doc_id not in seen][:3]
        later[i] = replace(later[i], passages=merge([later[i].passages, new]))
    return later


Maker = Callable[["PreTrainedTokenizerFast", int, StreamSettings], list[Row]]
"""Makes the rows of one world from its seed."""


def demo_rows(tokenizer: PreTrainedTokenizerFast, seed: int, settings: StreamSettings) -> list[Row]:
    """Return the rows for policy `demo`, which only writes queries."""
    return query_rows(tokenizer, drafts(seed, settings), settings)


def rows(tokenizer: PreTrainedTokenizerFast, settings: StreamSettings, make: Maker = demo_rows) -> Iterator[Row]:
    """Yield an endless, deterministic stream of rows."""
    names, rng = _Names(tokenizer), random.Random(f"rows {settings.seed}")

    def of_worlds() -> Iterator[Row]:
        for world in count(10**6 * (settings.seed + 1)):
            world_rows = make(tokenizer, world, settings)
            for use in range(settings.uses):
                for row in rng.sample(world_rows, len(world_rows)):
                    yield names.exchanged(row, rng) if use else row

    return interleaved(of_worlds(), lambda: names.listed(rng), settings.lists, settings.constant_after, rng)


def query_rows(tokenizer: PreTrainedTokenizerFast, drafts: Sequence[Draft], settings: StreamSettings) -> list[Row]:
    """Return rows for the first and a later hop: zero-shot in mixed styles, and with demos in one style."""
    result: list[Row] = []
    for draft in drafts:
        rng, first = draft.rng, replace(draft, passages=())
        hops = ((first, settings.hop1, settings.demos[0], 5), (draft, settings.hop2, settings.demos[1], 8))
        for at_hop, styles, with_demos, n in hops:
            mixed = [write(draw(rng, styles), at_hop) for _ in range(n)]
            result.append(encoded(tokenizer, call_messages(at_hop.question, at_hop.passages), mixed))
            if rng.random() < with_demos:
                style = draw(rng, settings.hop2)
                others = rng.sample(drafts, rng.randint(1, 3))
                demos = [{"question": o.question, "query": write(style, o)} for o in others]
                shown = call_messages(at_hop.question, at_hop.passages, demos)
                result.append(encoded(tokenizer, shown, [write(style, at_hop) for _ in range(4)]))
    return result


class _Names:
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        ids = tokenizer.get_vocab()
        self._classes = [[ids[word.lower()] for word in words] for words in NAME_CLASSES]
        self._signs = [ids[word] for word in (",", "and", "by", "|", ".", "is", "was", "\n", "of", "(")]
        self._the, self._user, self._assistant = ids["the"], ids["<|user|>"], ids["<|assistant|>"]
        self._end = ids["<|end|>"]

    def exchanged(self, row: Row, rng: random.Random) -> Row:
        """Replace each name part by another part of its class, consistently within the row."""
        other: dict[int, int] = {}
        for words in self._classes:
            other.update(zip(words, rng.sample(words, len(words)), strict=True))
        prompt = tuple(other.get(token, token) for token in row.prompt)
        return Row(prompt, tuple(tuple(other.get(token, token) for token in target) for target in row.targets))

    def listed(self, rng: random.Random) -> Row:
        """Return a prompt that lists names between signs, with each name as a target."""
        first, last, adjectives, nouns, firms, trades = self._classes[:6]
        kinds = ((first, last), ([self._the], adjectives, nouns), (firms, trades))
        said = [tuple(map(rng.choice, rng.choice(kinds))) for _ in range(rng.randint(4, 14))]
        prompt = [self._user]
        for name in said:
            prompt += [*name, *rng.choices(self._signs, k=rng.randint(1, 3))]
        return Row((*prompt, self._end, self._assistant), tuple((*name, self._end) for name in set(said)))
