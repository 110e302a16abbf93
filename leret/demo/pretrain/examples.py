"""Prompts with the queries that demonstrators would write there: what a base policy is trained on.

Half the prompts are zero-shot, and their queries are a mixture of styles: that is what makes the base diverse. The
other half show one to three turns of other questions in one style, and their queries are in that style: that is what
lets the demos of a prompt bank steer the base.
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
from leret.demo.pretrain.heuristics import STYLES, Draft, Idf, draw
from leret.demo.pretrain.loop import Row
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

_TARGETS, _DEMO_TARGETS = 10, 4
"""Queries of a zero-shot prompt, equal ones left out, and of one with demos."""
_DEMO_SHARE, _MOST_DEMOS = 0.4, 3
"""Share of the prompts with demos; demos of a prompt at most."""

COMPACT = CompactAdapter()
"""How the demo's prompts are written."""


class WriteQuery(dspy.Signature):
    """Write a search query for the document that is still missing to answer the question."""

    question: str = dspy.InputField()
    context: list[str] = dspy.InputField()
    query: str = dspy.OutputField()


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, ending in a user's turn, and queries that may follow it, each by itself."""

    messages: Sequence[dict[str, str]]
    targets: tuple[str, ...]


def call_messages(
    question: str,
    passages: Ranking,
    demos: Sequence[Mapping[str, Any]] = (),
    adapter: CompactAdapter = COMPACT,
) -> list[Any]:
    """Messages of a program's call of `WriteQuery`."""
    return adapter.format(WriteQuery, demos, {"question": question, "context": Found((passages,)).passages})


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Token ids of messages that wait for an answer."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def encoded(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], targets: Sequence[str]) -> Row:
    """Messages and what may follow them as token ids."""
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
    """An endless stream of examples, both hops of a block of questions mixed; the same for the same arguments.

    Each pass over the questions draws new styles, so new queries and new contexts.

    Args:
        questions: their texts; never the ones that are evaluated.
        retriever: finds the contexts of the second hop.
        idf: rarity of a word in the corpus.
        adapter: how prompts are written.
        k: passages a search.
        seed: of all that is drawn.
        hop1_first: examples at the start that are first hops without demos: they teach copying soonest.
        block: questions whose searches are done in one batch.
    """
    made = 0
    for epoch in count():
        rng = random.Random(f"examples {seed} {epoch}")
        order = rng.sample(list(questions), len(questions))
        for start in range(0, len(order), block):
            asked = [Draft(one, (), idf, rng, adapter.words_per_item) for one in order[start : start + block]]
            if made < hop1_first:
                drawn = [_zero_shot(draft, HOP1_MIXTURE, adapter) for draft in asked]
            else:
                drawn = _at_hop(asked, HOP1_MIXTURE, adapter)
                rankings = retriever.search([_mixed(draft, HOP1_MIXTURE) for draft in asked], k)
                found = [
                    replace(one, passages=ranking) for one, ranking in zip(asked, rankings, strict=True) if ranking
                ]
                drawn += _at_hop(found, HOP2_MIXTURE, adapter)
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


def _at_hop(drafts: Sequence[Draft], mixture: Mapping[str, float], adapter: CompactAdapter) -> list[Example]:
    """An example of every draft: with demos of the others in one style, or zero-shot."""
    made: list[Example] = []
    for i, draft in enumerate(drafts):
        example = None
        if draft.rng.random() < _DEMO_SHARE:
            example = _with_demos(draft, [*drafts[:i], *drafts[i + 1 :]], draw(draft.rng, mixture), adapter)
        made.append(example or _zero_shot(draft, mixture, adapter))
    return made


def _with_demos(draft: Draft, others: Sequence[Draft], style: str, adapter: CompactAdapter) -> Example | None:
    """None where the style has nothing to say, on the question or on all of the others that are drawn."""
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
    """A query in a style of the mixture; the question itself where no style has anything to say."""
    left = dict(mixture)
    while left:
        style = draw(draft.rng, left)
        query = STYLES[style](draft)
        if query is not None:
            return query
        del left[style]
    return draft.question
