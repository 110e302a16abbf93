"""What a base policy is judged by, without gold: does it copy, is it diverse, how often does it write the bridge?

The loss says little: a model that cannot copy an unseen name may have the lower one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from leret.core.types import Ranking
from leret.datasets.world.generate import generate as generate_world
from leret.demo.pretrain.examples import Prompting, prompt_ids
from leret.demo.pretrain.words import NAME_CLASSES
from leret.demo.pretrain.worlds import Scene, StreamSettings, encoded, scenes, write
from leret.retrieval.base import Retriever

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from leret.demo.pretrain.loop import Probe

GATE_SEED = 900_001
"""Seed of the held-out world; training worlds have seeds from 1,000,000 on."""

_SAMPLES = 4
Ids = Sequence[int]


def probe_on(
    questions: Sequence[str], retriever: Retriever, tokenizer: PreTrainedTokenizerFast, prompting: Prompting, k: int
) -> Probe:
    """A probe on held-out questions, zero-shot at both hops; the raw question's passages are the second's context.

    Its figures: ``valid_1`` and ``valid_2``, the share of the word pieces of greedy queries that stand in the prompt;
    ``distinct_1`` and ``distinct_2``, the share of different queries among four samples at temperature 1;
    ``mention_2``, the share of those samples at the second hop with a piece that only the context has.
    """
    contexts: dict[int, Sequence[Ranking]] = {1: [()] * len(questions), 2: retriever.search(questions, k)}
    hops = {
        hop: [prompt_ids(tokenizer, prompting.messages(*one)) for one in zip(questions, found, strict=True)]
        for hop, found in contexts.items()
    }

    def probe(model: PreTrainedModel) -> dict[str, float]:
        import torch

        torch.manual_seed(0)
        figures: dict[str, float] = {}
        for hop, prompts in hops.items():
            greedy = generate(model, prompts, 0)
            samples = generate(model, prompts, _SAMPLES)
            figures[f"valid_{hop}"] = copied(greedy, prompts)
            figures[f"distinct_{hop}"] = distinct(samples)
        # Of the samples at the second hop: with a piece of the context that the question lacks.
        figures["mention_2"] = _share(
            bool((set(one) & set(full)) - set(bare))
            for bare, full, some in zip(hops[1], hops[2], samples, strict=True)
            for one in some
        )
        return figures

    return probe


def make_gate(tokenizer: PreTrainedTokenizerFast, n: int = 64, seed: int = GATE_SEED) -> Probe:
    """A probe on bridge questions of a held-out world whose bridge stands in the context.

    Its figures, all in [0, 1]: ``bridge`` (samples at T=1 that hold the bridge's full name), ``bridge_demos`` (the same
    after two demos of `mention_near`), ``bridge_greedy``, ``bridge_hop1`` (of the question's own entity at the first
    hop), ``copied`` (written words that stand in the prompt), ``names_copied`` (written pairs of name parts that stand
    so in the prompt), ``distinct`` (different ones among four samples).
    """
    settings = StreamSettings(questions=6 * n, deep=0.0)
    found = scenes(seed, settings)
    documents, _ = generate_world(seed, settings.questions, 0, 0)
    titles = {document.doc_id: document.title for document in documents}
    bridge_scenes = [
        s for s in found if s.question.type == "bridge" and any(titles[s.question.gold[1]] in p.text for p in s.found)
    ][:n]
    rng = random.Random(f"gate {seed}")
    demos = [_demos(found, scene, rng) for scene in bridge_scenes]

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    bridges = [ids(titles[scene.question.gold[1]]) for scene in bridge_scenes]
    works = [ids(titles[scene.question.gold[0]].split(" (")[0].removeprefix("The ")) for scene in bridge_scenes]
    plain = [encoded(tokenizer, scene) for scene in bridge_scenes]
    shown = [encoded(tokenizer, scene, turns) for scene, turns in zip(bridge_scenes, demos, strict=True)]
    first = [encoded(tokenizer, scene.first()) for scene in bridge_scenes]
    known = tokenizer.get_vocab()
    # Class of every part of a name: 0, 1 people; 2, 3 works; 4, 5 companies.
    parts = {known[word.lower()]: i for i, words in enumerate(NAME_CLASSES[:6]) for word in words}

    def gate(model: PreTrainedModel) -> Mapping[str, float]:
        import torch

        complete = partial(generate, model, max_new_tokens=20, batch=32)
        torch.manual_seed(seed)
        sampled = complete(plain, _SAMPLES)
        return {
            "bridge": holding(sampled, bridges),
            "bridge_demos": holding(complete(shown, _SAMPLES), bridges),
            "bridge_greedy": holding(complete(plain, 0), bridges),
            "bridge_hop1": holding(complete(first, _SAMPLES), works),
            "copied": copied(sampled, plain),
            "names_copied": names_copied(sampled, plain, parts),
            "distinct": distinct(sampled),
        }

    return gate


def generate(
    model: PreTrainedModel, prompts: Sequence[Ids], n: int, *, max_new_tokens: int = 40, batch: int = 16
) -> list[list[tuple[int, ...]]]:
    """``n`` completions of each prompt at temperature 1, or for 0 the greedy one, without the end token."""
    import torch

    end, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    how: dict[str, Any] = {"do_sample": True, "top_k": 0, "num_return_sequences": n} if n else {"do_sample": False}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: list[list[tuple[int, ...]]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        width = max(len(prompts[i]) for i in chosen)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + list(prompts[i]) for i in chosen], device=model.device)
        complete: Any = model.generate
        with torch.no_grad():
            written = complete(input_ids=ids, attention_mask=(ids != pad).long(), max_new_tokens=max_new_tokens, **how)
        for j, row in enumerate(written[:, width:].tolist()):
            stop = row.index(end) if end in row else len(row)
            found[chosen[j // max(1, n)]].append(tuple(row[:stop]))
    return found


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


def _demos(found: Sequence[Scene], scene: Scene, rng: random.Random) -> list[dict[str, str]]:
    others = rng.sample([other for other in found if other is not scene], 2)
    return [{"question": other.question.text, "query": write("mention_near", other)} for other in others]
