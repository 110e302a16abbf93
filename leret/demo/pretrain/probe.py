"""What a base policy is judged by, without gold: does it copy, is it diverse, how often does it write the bridge?

The loss says little: a model that cannot copy an unseen name may have the lower one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from leret.core.types import Ranking
from leret.datasets.world.generate import generate as generate_world
from leret.demo.pretrain.examples import call_messages, prompt_ids
from leret.demo.pretrain.heuristics import Draft, write
from leret.demo.pretrain.words import NAME_CLASSES
from leret.demo.pretrain.worlds import StreamSettings, drafts
from leret.programs.adapters import CompactAdapter
from leret.retrieval.base import Retriever

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from leret.demo.pretrain.loop import Probe

GATE_SEED = 900_001
"""Seed of the held-out world; training worlds have seeds from 1,000,000 on."""

_SAMPLES, _MAX_TOKENS = 4, 40
Ids = Sequence[int]


def probe_on(
    questions: Sequence[str], retriever: Retriever, tokenizer: PreTrainedTokenizerFast, adapter: CompactAdapter, k: int
) -> Probe:
    """A probe on held-out questions, zero-shot at both hops; the raw question's passages are the second's context.

    Its figures: ``valid_1`` and ``valid_2``, the share of the word pieces of greedy queries that stand in the prompt;
    ``distinct_1`` and ``distinct_2``, the share of different queries among four samples at temperature 1;
    ``mention_2``, the share of those samples at the second hop with a piece that only the context has.
    """
    contexts: dict[int, Sequence[Ranking]] = {1: [()] * len(questions), 2: retriever.search(questions, k)}
    hops = {
        hop: [prompt_ids(tokenizer, call_messages(*one, adapter=adapter)) for one in zip(questions, found, strict=True)]
        for hop, found in contexts.items()
    }

    def probe(model: PreTrainedModel) -> dict[str, float]:
        figures: dict[str, float] = {}
        for hop, prompts in hops.items():
            figures[f"valid_{hop}"] = copied(generate(model, prompts, 0), prompts)
            samples = generate(model, prompts, _SAMPLES)
            figures[f"distinct_{hop}"] = distinct(samples)
        figures["mention_2"] = _share(
            bool((set(one) & set(full)) - set(bare))
            for bare, full, some in zip(hops[1], hops[2], samples, strict=True)
            for one in some
        )
        return figures

    return probe


def make_gate(tokenizer: PreTrainedTokenizerFast, n: int = 64) -> Probe:
    """A probe on bridge questions of a held-out world whose bridge stands in the context.

    Its figures, all in [0, 1]: ``bridge`` (samples at T=1 that hold the bridge's full name), ``bridge_demos`` (the same
    after two demos of `mention_near`), ``bridge_greedy``, ``bridge_hop1`` (of the question's own entity at the first
    hop), ``copied`` (written words that stand in the prompt), ``names_copied`` (written pairs of name parts that stand
    so in the prompt), ``distinct`` (different ones among four samples).
    """
    settings = StreamSettings(questions=6 * n, deep=0.0)
    found = drafts(GATE_SEED, settings)
    documents, questions = generate_world(GATE_SEED, settings.questions, 0, 0)
    titles = {document.doc_id: document.title for document in documents}
    linked = [
        (draft, titles[task.gold[0]], titles[task.gold[1]])
        for draft, task in zip(found, questions, strict=True)
        if task.type == "bridge" and any(titles[task.gold[1]] in passage.text for passage in draft.passages)
    ][:n]
    rng = random.Random(f"gate {GATE_SEED}")

    def demos(draft: Draft) -> list[dict[str, str]]:
        others = rng.sample([other for other in found if other is not draft], 2)
        return [{"question": other.question, "query": write("mention_near", other)} for other in others]

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    bridges = [ids(bridge) for _, _, bridge in linked]
    works = [ids(work.split(" (")[0].removeprefix("The ")) for _, work, _ in linked]
    first = [prompt_ids(tokenizer, call_messages(one.question, ())) for one, *_ in linked]
    plain = [prompt_ids(tokenizer, call_messages(one.question, one.passages)) for one, *_ in linked]
    shown = [prompt_ids(tokenizer, call_messages(one.question, one.passages, demos(one))) for one, *_ in linked]
    known = tokenizer.get_vocab()
    # Class of every part of a name: 0, 1 people; 2, 3 works; 4, 5 companies.
    parts = {known[word.lower()]: i for i, words in enumerate(NAME_CLASSES[:6]) for word in words}

    def gate(model: PreTrainedModel) -> Mapping[str, float]:
        sampled = generate(model, plain, _SAMPLES)
        return {
            "bridge": holding(sampled, bridges),
            "bridge_demos": holding(generate(model, shown, _SAMPLES), bridges),
            "bridge_greedy": holding(generate(model, plain, 0), bridges),
            "bridge_hop1": holding(generate(model, first, _SAMPLES), works),
            "copied": copied(sampled, plain),
            "names_copied": names_copied(sampled, plain, parts),
            "distinct": distinct(sampled),
        }

    return gate


def generate(model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], n: int) -> list[list[Ids]]:
    """``n`` completions of each prompt at temperature 1, or for 0 the greedy one, without the end token."""
    from leret.policies.local.decoder import Decoder, Job

    end, suppressed = model.generation_config.eos_token_id, model.generation_config.suppress_tokens
    seeds = [range(i * _SAMPLES, i * _SAMPLES + max(1, n)) for i in range(len(prompts))]
    jobs = [Job(ids, 0, tuple(own), min(n, 1), 1.0, _MAX_TOKENS) for ids, own in zip(prompts, seeds, strict=True)]
    written = Decoder(model, end_ids=[end], suppressed=suppressed or ()).run(jobs)
    return [[[token for token in one.token_ids if token != end] for one in some] for some in written]


def holding(completions: Sequence[Sequence[Ids]], wanted: Sequence[tuple[int, ...]]) -> float:
    """Share of the completions that hold the name wanted of them, word by word."""
    return _share(
        any(tuple(text[i : i + len(name)]) == name for i in range(len(text)))
        for texts, name in zip(completions, wanted, strict=True)
        for text in texts
    )


def copied(completions: Sequence[Sequence[Ids]], prompts: Sequence[Ids]) -> float:
    """Share of the written words that stand in the prompt."""
    return _share(
        token in prompt
        for texts, prompt in zip(completions, map(set, prompts), strict=True)
        for text in texts
        for token in text
    )


def names_copied(completions: Sequence[Sequence[Ids]], prompts: Sequence[Ids], parts: Mapping[int, int]) -> float:
    """Share of the written pairs of name parts that stand so in the prompt; ``parts`` gives the class of each."""
    return _share(
        pair in there
        for texts, there in zip(completions, (set(pairwise(prompt)) for prompt in prompts), strict=True)
        for text in texts
        for pair in pairwise(text)
        if parts.get(pair[0], -1) % 2 == 0 and parts.get(pair[1]) == parts[pair[0]] + 1
    )


def distinct(completions: Sequence[Sequence[Ids]]) -> float:
    """Share of different ones among the samples of a prompt."""
    return round(sum(len(set(map(tuple, some))) / len(some) for some in completions) / len(completions), 3)


def _share(hits: Iterable[bool]) -> float:
    found = list(hits)
    return round(sum(found) / max(1, len(found)), 3)
