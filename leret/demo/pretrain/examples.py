"""Prompts with the queries that demonstrators would write there: what a base policy is trained on.

Half the prompts are zero-shot, and their queries are a mixture of styles: that is what makes the base diverse. The
other half show one to three turns of other questions in one style, and their queries are in that style: that is what
lets the demos of a prompt bank steer the base.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any

import dspy
from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from leret.config.base import Settings
from leret.core.errors import DataError
from leret.core.types import Document, Ranking
from leret.demo.pretrain.heuristics import STYLES, Draft, Idf
from leret.programs.adapters import CompactAdapter
from leret.programs.search import Found
from leret.retrieval.base import Retriever

HOP1_MIXTURE = {"copy": 0.2, "entity": 0.35, "keywords": 0.25, "generic": 0.2}
HOP2_MIXTURE = {
    "copy": 0.12,
    "entity": 0.1,
    "entity_left": 0.12,
    "keywords": 0.1,
    "generic": 0.08,
    "title": 0.12,
    "mention_random": 0.12,
    "mention_matched": 0.14,
    "mention_near": 0.1,
}
"""Weights of the styles; where a style has nothing to say, another one is drawn."""


class WriteQuery(dspy.Signature):
    """Write a search query for the document that is still missing to answer the question."""

    question: str = dspy.InputField()
    context: list[str] = dspy.InputField()
    query: str = dspy.OutputField()


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, ending in a user's turn, and queries that may follow it, each by itself."""

    messages: tuple[dict[str, str], ...]
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prompting:
    """How a program's call becomes messages: a signature of ``question, context -> query`` and an adapter."""

    signature: type[dspy.Signature] = WriteQuery
    adapter: CompactAdapter = field(default_factory=CompactAdapter)

    def messages(self, question: str, passages: Ranking, demos: Sequence[Mapping[str, Any]] = ()) -> tuple[Any, ...]:
        """Messages of one call."""
        inputs = {"question": question, "context": Found((passages,)).passages}
        return tuple(self.adapter.format(self.signature, demos, inputs))


def _some_of(known: Mapping[str, float]) -> AfterValidator:
    def check(weights: dict[str, float]) -> dict[str, float]:
        if not weights.keys() <= known.keys() or not any(weights.values()):
            raise ValueError(f"must weigh some of {', '.join(known)} above 0")
        return weights

    return AfterValidator(check)


Hop1Weights = Annotated[dict[str, NonNegativeFloat], _some_of(HOP1_MIXTURE)]
Hop2Weights = Annotated[dict[str, NonNegativeFloat], _some_of(HOP2_MIXTURE)]


class ExampleSettings(Settings):
    """What the stream is made of."""

    hop1: Hop1Weights = Field(HOP1_MIXTURE, description="weights of the styles before anything is found")
    hop2: Hop2Weights = Field(HOP2_MIXTURE, description="weights of the styles afterwards")
    targets: PositiveInt = Field(10, description="queries a zero-shot prompt; equal ones are left out")
    demo_targets: PositiveInt = Field(4, description="queries a prompt with demos")
    demo_share: float = Field(0.4, ge=0, le=1, description="share of the prompts with demos")
    most_demos: PositiveInt = Field(3, description="demos of a prompt at most")
    k: PositiveInt = Field(3, description="passages a search")
    hop1_first: NonNegativeInt = Field(
        6000, description="examples at the start that are first hops without demos: they teach copying soonest"
    )
    block: PositiveInt = Field(256, description="questions whose searches are done in one batch")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Case:
    question: str
    found: Ranking


def examples(
    questions: Sequence[str],
    retriever: Retriever,
    idf: Idf,
    settings: ExampleSettings,
    prompting: Prompting | None = None,
) -> Iterator[Example]:
    """An endless stream of examples, both hops of a block of questions mixed; the same for the same arguments.

    Each pass over the questions draws new styles, so new queries and new contexts.

    Args:
        questions: their texts, two at least; never the ones that are evaluated.
        retriever: finds the contexts of the second hop.
        idf: rarity of a word in the corpus.
        settings: what to draw.
        prompting: how prompts are written; None for :class:`WriteQuery` under a :class:`CompactAdapter`.
    """
    if len(questions) < 2:
        raise DataError(f"pretraining needs two questions at least, and was given {len(questions)}")
    prompting = prompting or Prompting()
    made = 0
    for epoch in count():
        rng = random.Random(f"examples {settings.seed} {epoch}")
        order = rng.sample(list(questions), len(questions))
        for start in range(0, len(order), settings.block):
            block = order[start : start + settings.block]
            if len(block) < 2:
                block = [*block, order[0]]
            drawn = _Drawing(idf, settings, prompting, rng).block(block, retriever, made >= settings.hop1_first)
            rng.shuffle(drawn)
            made += len(drawn)
            yield from drawn


def pseudo_questions(documents: Iterable[Document], n: int, seed: int) -> list[str]:
    """Sentences of a corpus in the place of questions, at most ``n``, one a document: more words and names."""
    rng = random.Random(f"pseudo-questions {seed}")
    found = []
    for document in rng.sample(chosen := list(documents), min(len(chosen), 2 * n)):
        sentences = [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", document.text) if 8 <= len(s.split()) <= 28]
        if sentences:
            found.append(rng.choice(sentences).rstrip(".!?") + "?")
    return found[:n]


class _Drawing:
    def __init__(self, idf: Idf, settings: ExampleSettings, prompting: Prompting, rng: random.Random) -> None:
        self._idf, self._settings, self._prompting, self._rng = idf, settings, prompting, rng

    def block(self, questions: Sequence[str], retriever: Retriever, both_hops: bool) -> list[Example]:
        """Examples of every question, at the first hop or at both."""
        settings = self._settings
        cases = [_Case(question, ()) for question in questions]
        if not both_hops:
            return [self._zero_shot(case, settings.hop1) for case in cases]
        drawn = [self._example(case, settings.hop1, _without(cases, i)) for i, case in enumerate(cases)]
        queries = [self._mixed(case, settings.hop1) for case in cases]
        rankings = retriever.search(queries, settings.k)
        later = [_Case(question, ranking) for question, ranking in zip(questions, rankings, strict=True) if ranking]
        return drawn + [self._example(case, settings.hop2, _without(later, i)) for i, case in enumerate(later)]

    def _example(self, case: _Case, mixture: Mapping[str, float], others: Sequence[_Case]) -> Example:
        if self._rng.random() < self._settings.demo_share:
            style = self._draw(mixture)
            targets = [self._write(style, case) for _ in range(self._settings.demo_targets)]
            demos = self._demos(style, others)
            if demos and all(targets):
                return self._made(case, [target for target in targets if target], demos)
        return self._zero_shot(case, mixture)

    def _zero_shot(self, case: _Case, mixture: Mapping[str, float]) -> Example:
        return self._made(case, [self._mixed(case, mixture) for _ in range(self._settings.targets)], [])

    def _made(self, case: _Case, targets: Sequence[str], demos: Sequence[Mapping[str, str]]) -> Example:
        messages = self._prompting.messages(case.question, case.found, demos)
        return Example(messages, tuple(dict.fromkeys(targets)))

    def _demos(self, style: str, others: Sequence[_Case]) -> list[dict[str, str]]:
        """Turns of other questions in one style; fewer where the style has nothing to say on those drawn."""
        rng = self._rng
        drawn = rng.sample(others, min(len(others), rng.randint(1, self._settings.most_demos)))
        written = [(case.question, self._write(style, case)) for case in drawn]
        return [{"question": question, "query": query} for question, query in written if query]

    def _mixed(self, case: _Case, mixture: Mapping[str, float]) -> str:
        """A query in a style of the mixture; the question itself where no style has anything to say."""
        left = dict(mixture)
        while left:
            style = self._draw(left)
            query = self._write(style, case)
            if query is not None:
                return query
            del left[style]
        return case.question

    def _draw(self, mixture: Mapping[str, float]) -> str:
        return self._rng.choices(list(mixture), list(mixture.values()))[0]

    def _write(self, style: str, case: _Case) -> str | None:
        words = self._prompting.adapter.words_per_item
        return STYLES[style](Draft(case.question, case.found, self._idf, self._rng, words))


def _without(cases: Sequence[_Case], i: int) -> Sequence[_Case]:
    return [*cases[:i], *cases[i + 1 :]]
