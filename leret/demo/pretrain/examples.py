"""Prompts with the queries that demonstrators would write there: what a base policy is trained on.

Half the prompts are zero-shot, and their queries are a mixture of styles: that is what makes the base diverse. The
other half show one to three turns of other questions in one style, and their queries are in that style: that is what
lets the demos of a prompt bank steer the base.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import dspy

from leret.core.types import Document, Ranking
from leret.demo.pretrain.heuristics import STYLES, Draft, Idf
from leret.programs.adapters import CompactAdapter
from leret.programs.search import Found
from leret.retrieval.base import Retriever

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
    """How a program's call becomes messages: `WriteQuery` and an adapter."""

    adapter: CompactAdapter = field(default_factory=CompactAdapter)

    def messages(self, question: str, passages: Ranking, demos: Sequence[Mapping[str, Any]] = ()) -> tuple[Any, ...]:
        """Messages of one call."""
        inputs = {"question": question, "context": Found((passages,)).passages}
        return tuple(self.adapter.format(WriteQuery, demos, inputs))


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Token ids of messages that wait for an answer."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class ExampleSettings:
    """What the stream is made of."""

    hop1: Mapping[str, float] = field(default_factory=lambda: HOP1_MIXTURE)  # weights before anything is found
    hop2: Mapping[str, float] = field(default_factory=lambda: HOP2_MIXTURE)  # weights afterwards
    targets: int = 10  # queries a zero-shot prompt; equal ones are left out
    demo_targets: int = 4  # queries a prompt with demos
    demo_share: float = 0.4  # share of the prompts with demos
    most_demos: int = 3  # demos of a prompt at most
    k: int = 3  # passages a search
    hop1_first: int = 6000  # examples at the start that are first hops without demos: they teach copying soonest
    block: int = 256  # questions whose searches are done in one batch
    seed: int = 0


def examples(
    questions: Sequence[str], retriever: Retriever, idf: Idf, settings: ExampleSettings, prompting: Prompting
) -> Iterator[Example]:
    """An endless stream of examples, both hops of a block of questions mixed; the same for the same arguments.

    Each pass over the questions draws new styles, so new queries and new contexts.

    Args:
        questions: their texts, two at least; never the ones that are evaluated.
        retriever: finds the contexts of the second hop.
        idf: rarity of a word in the corpus.
        settings: what to draw.
        prompting: how prompts are written.
    """
    made, words = 0, prompting.adapter.words_per_item
    for epoch in count():
        rng = random.Random(f"examples {settings.seed} {epoch}")
        order = rng.sample(list(questions), len(questions))
        for start in range(0, len(order), settings.block):
            block = order[start : start + settings.block]
            if len(block) < 2:
                block = [*block, order[0]]
            asked = [Draft(question, (), idf, rng, words) for question in block]
            drawn = _Drawing(settings, prompting, rng).block(asked, retriever, made >= settings.hop1_first)
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


@dataclass(frozen=True, slots=True)
class _Drawing:
    settings: ExampleSettings
    prompting: Prompting
    rng: random.Random

    def block(self, asked: Sequence[Draft], retriever: Retriever, both_hops: bool) -> list[Example]:
        """Examples of every question, at the first hop or at both."""
        settings = self.settings
        if not both_hops:
            return [self._zero_shot(draft, settings.hop1) for draft in asked]
        drawn = [self._example(draft, settings.hop1, _without(asked, i)) for i, draft in enumerate(asked)]
        rankings = retriever.search([self._mixed(draft, settings.hop1) for draft in asked], settings.k)
        later = [replace(draft, passages=ranking) for draft, ranking in zip(asked, rankings, strict=True) if ranking]
        return drawn + [self._example(draft, settings.hop2, _without(later, i)) for i, draft in enumerate(later)]

    def _example(self, draft: Draft, mixture: Mapping[str, float], others: Sequence[Draft]) -> Example:
        if self.rng.random() < self.settings.demo_share:
            style = self._draw(mixture)
            targets = [STYLES[style](draft) for _ in range(self.settings.demo_targets)]
            demos = self._demos(style, others)
            if demos and all(targets):
                return self._made(draft, [target for target in targets if target], demos)
        return self._zero_shot(draft, mixture)

    def _zero_shot(self, draft: Draft, mixture: Mapping[str, float]) -> Example:
        return self._made(draft, [self._mixed(draft, mixture) for _ in range(self.settings.targets)], [])

    def _made(self, draft: Draft, targets: Sequence[str], demos: Sequence[Mapping[str, str]]) -> Example:
        messages = self.prompting.messages(draft.question, draft.passages, demos)
        return Example(messages, tuple(dict.fromkeys(targets)))

    def _demos(self, style: str, others: Sequence[Draft]) -> list[dict[str, str]]:
        """Turns of other questions in one style; fewer where the style has nothing to say on those drawn."""
        drawn = self.rng.sample(others, min(len(others), self.rng.randint(1, self.settings.most_demos)))
        written = [(draft.question, STYLES[style](draft)) for draft in drawn]
        return [{"question": question, "query": query} for question, query in written if query]

    def _mixed(self, draft: Draft, mixture: Mapping[str, float]) -> str:
        """A query in a style of the mixture; the question itself where no style has anything to say."""
        left = dict(mixture)
        while left:
            style = self._draw(left)
            query = STYLES[style](draft)
            if query is not None:
                return query
            del left[style]
        return draft.question

    def _draw(self, mixture: Mapping[str, float]) -> str:
        return self.rng.choices(list(mixture), list(mixture.values()))[0]


def _without(drafts: Sequence[Draft], i: int) -> Sequence[Draft]:
    return [*drafts[:i], *drafts[i + 1 :]]
