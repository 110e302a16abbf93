"""Training examples for a base policy: prompts, with queries by simple demonstrators as targets.

Zero-shot prompts have targets in a mixture of styles, so that the base policy's queries are diverse. Prompts with demos
have targets in the style of the demos, so that a prompt bank can steer the base policy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import dspy

from leret.core.types import Document, Ranking
from leret.programs.adapters import CompactAdapter
from leret.programs.search import Found
from leret.retrieval.base import Retriever
from models.pretrain.heuristics import STYLES, Draft, Idf, draw
from models.pretrain.loop import Row

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
"""Sampling weights of styles. If the drawn style returns no query, another style is drawn."""

_TARGETS, _DEMO_TARGETS = 10, 4  # queries drawn per zero-shot prompt, and per prompt with demos
_DEMO_SHARE, _MOST_DEMOS = 0.4, 3  # share of prompts with demos; maximum demos per prompt


class WriteQuery(dspy.Signature):
    """Write a search query for the document that is still missing to answer the question."""

    question: str = dspy.InputField()
    context: list[str] = dspy.InputField()
    query: str = dspy.OutputField()


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt that ends in a user's turn, and alternative queries as completions."""

    messages: Sequence[dict[str, str]]
    targets: tuple[str, ...]


def call_messages(
    question: str, passages: Ranking, demos: Sequence[Mapping[str, Any]] = (), adapter: CompactAdapter | None = None
) -> list[Any]:
    """Return the messages that a program sends to call `WriteQuery`."""
    inputs = {"question": question, "context": Found((passages,)).passages}
    return (adapter or CompactAdapter()).format(WriteQuery, demos, inputs)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the token ids of the messages, followed by the generation prompt."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def encoded(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], targets: Sequence[str]) -> Row:
    """Encode messages and their targets as token ids."""
    ids = tokenizer(list(targets), add_special_tokens=False)["input_ids"]
    return Row(prompt_ids(tokenizer, messages), tuple((*one, tokenizer.eos_token_id) for one in ids))


def examples(
    questions: Sequence[str],
    retriever: Retriever,
    idf: Idf,
    adapter: CompactAdapter,
    *,
    k: int = 3,
    seed: int = 0,
    hop1_first: int = 6000,
    block: int = 256,
) -> Iterator[Example]:
    """Yield an endless, deterministic stream of examples; a block of questions gives first and second hops, shuffled.

    Each pass over the questions draws new styles. The first ``hop1_first`` examples are first hops without demos, which
    teaches copying fastest. A search returns ``k`` passages, and ``block`` questions are searched in one batch.
    """
    n = 0
    for epoch in count():
        rng = random.Random(f"examples {seed} {epoch}")
        order = rng.sample(list(questions), len(questions))
        for start in range(0, len(order), block):
            drafts = [Draft(text, (), idf, rng, adapter.words_per_item) for text in order[start : start + block]]
            if n < hop1_first:
                drawn = [_zero_shot(draft, HOP1_MIXTURE, adapter) for draft in drafts]
            else:
                drawn = _at_hop(drafts, HOP1_MIXTURE, adapter)
                rankings = retriever.search([_mixed(draft, HOP1_MIXTURE) for draft in drafts], k)
                pairs = zip(drafts, rankings, strict=True)
                second = [replace(draft, passages=ranking) for draft, ranking in pairs if ranking]
                drawn += _at_hop(second, HOP2_MIXTURE, adapter)
            rng.shuffle(drawn)
            n += len(drawn)
            yield from drawn


def pseudo_questions(documents: Iterable[Document], n: int, seed: int) -> list[str]:
    """Turn sentences from a corpus into at most ``n`` questions, one per document, to train on more words and names."""
    rng = random.Random(f"pseudo-questions {seed}")
    questions = []
    for document in rng.sample(population := list(documents), min(len(population), 2 * n)):
        sentences = [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", document.text) if 8 <= len(s.split()) <= 28]
        if sentences:
            questions.append(rng.choice(sentences).rstrip(".!?") + "?")
    return questions[:n]


def _at_hop(drafts: Sequence[Draft], mixture: Mapping[str, float], adapter: CompactAdapter) -> list[Example]:
    """Return one example per draft: zero-shot in mixed styles, or in one style with some other drafts as demos."""
    examples: list[Example] = []
    for i, draft in enumerate(drafts):
        example = None
        if draft.rng.random() < _DEMO_SHARE:
            example = _with_demos(draft, [*drafts[:i], *drafts[i + 1 :]], draw(draft.rng, mixture), adapter)
        examples.append(example or _zero_shot(draft, mixture, adapter))
    return examples


def _with_demos(draft: Draft, others: Sequence[Draft], style: str, adapter: CompactAdapter) -> Example | None:
    """Return an example with demos; None if the style does not apply to the draft, or applies to no demo."""
    targets = [query for _ in range(_DEMO_TARGETS) if (query := STYLES[style](draft))]
    drawn = draft.rng.sample(others, min(len(others), draft.rng.randint(1, _MOST_DEMOS)))
    demos = [{"question": other.question, "query": query} for other in drawn if (query := STYLES[style](other))]
    if not demos or len(targets) < _DEMO_TARGETS:
        return None
    return Example(call_messages(draft.question, draft.passages, demos, adapter), tuple(dict.fromkeys(targets)))


def _zero_shot(draft: Draft, mixture: Mapping[str, float], adapter: CompactAdapter) -> Example:
    targets = dict.fromkeys(_mixed(draft, mixture) for _ in range(_TARGETS))
    return Example(call_messages(draft.question, draft.passages, (), adapter), tuple(targets))


def _mixed(draft: Draft, mixture: Mapping[str, float]) -> str:
    """Write a query in a style drawn from the mixture, or copy the question if no style returns a query."""
    styles = dict(mixture)
    while styles:
        style = draw(draft.rng, styles)
        query = STYLES[style](draft)
        if query is not None:
            return query
        del styles[style]
    return draft.question
