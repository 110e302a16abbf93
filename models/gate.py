"""Measures of the shipped policies on a held-out world, where each question's bridge entity is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from leret.datasets.world.generate import generate as generate_world
from models.pretrain.examples import call_messages, prompt_ids
from models.pretrain.heuristics import Draft
from models.pretrain.stage import SAMPLES, Ids, copied, distinct, generate, share
from models.words import NAME_CLASSES
from models.worlds import StreamSettings, drafts, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from models.pretrain.loop import Probe

GATE_SEED = 900_001
"""Seed of the held-out world; training worlds have seeds from 1,000,000 on."""


def make_gate(tokenizer: PreTrainedTokenizerFast, n: int = 64) -> Probe:
    """Return a probe on held-out bridge questions with the bridge entity's name in the context.

    It measures shares in [0, 1]. ``bridge`` is the share of samples at temperature 1 with the bridge's full name;
    ``bridge_demos`` is the same with two demos by `mention_near`, and ``bridge_greedy`` with greedy decoding.
    ``bridge_hop1`` is the share of first-hop samples with the question's entity. ``copied`` (words) and
    ``names_copied`` (pairs of name parts) are in the prompt. ``distinct`` is the share of distinct samples among four.
    """
    settings = StreamSettings(questions=6 * n, deep=0.0)
    world = drafts(GATE_SEED, settings)
    documents, questions = generate_world(GATE_SEED, settings.questions, 0, 0)
    titles = {document.doc_id: document.title for document in documents}
    linked = [
        (draft, titles[task.gold[0]], titles[task.gold[1]])
        for draft, task in zip(world, questions, strict=True)
        if task.type == "bridge" and any(titles[task.gold[1]] in passage.text for passage in draft.passages)
    ][:n]
    rng = random.Random(f"gate {GATE_SEED}")

    def demos(draft: Draft) -> list[dict[str, str]]:
        others = rng.sample([other for other in world if other is not draft], 2)
        return [{"question": other.question, "query": write("mention_near", other)} for other in others]

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    bridges = [ids(bridge) for _, _, bridge in linked]
    works = [ids(work.split(" (")[0].removeprefix("The ")) for _, work, _ in linked]
    first = [prompt_ids(tokenizer, call_messages(one.question, ())) for one, *_ in linked]
    plain = [prompt_ids(tokenizer, call_messages(one.question, one.passages)) for one, *_ in linked]
    shown = [prompt_ids(tokenizer, call_messages(one.question, one.passages, demos(one))) for one, *_ in linked]
    known = tokenizer.get_vocab()
    # Class of each name part: 0 and 1 for people, 2 and 3 for works, 4 and 5 for companies.
    parts = {known[word.lower()]: i for i, words in enumerate(NAME_CLASSES[:6]) for word in words}

    def gate(model: PreTrainedModel) -> Mapping[str, float]:
        sampled = generate(model, plain, SAMPLES)
        return {
            "bridge": holding(sampled, bridges),
            "bridge_demos": holding(generate(model, shown, SAMPLES), bridges),
            "bridge_greedy": holding(generate(model, plain, 0), bridges),
            "bridge_hop1": holding(generate(model, first, SAMPLES), works),
            "copied": copied(sampled, plain),
            "names_copied": names_copied(sampled, plain, parts),
            "distinct": distinct(sampled),
        }

    return gate


def holding(completions: Sequence[Sequence[Ids]], wanted: Sequence[tuple[int, ...]]) -> float:
    """Return the share of completions that contain the wanted name of their prompt."""
    return share(
        any(tuple(text[i : i + len(name)]) == name for i in range(len(text)))
        for texts, name in zip(completions, wanted, strict=True)
        for text in texts
    )


def names_copied(completions: Sequence[Sequence[Ids]], prompts: Sequence[Ids], parts: Mapping[int, int]) -> float:
    """Return the share of completions' pairs of name parts that are in the prompt. ``parts`` maps tokens to classes."""
    return share(
        pair in prompt_pairs
        for texts, prompt_pairs in zip(completions, (set(pairwise(prompt)) for prompt in prompts), strict=True)
        for text in texts
        for pair in pairwise(text)
        if parts.get(pair[0], -1) % 2 == 0 and parts.get(pair[1]) == parts[pair[0]] + 1
    )
