"""What a base policy is judged by: does it copy, is it diverse, and how often does it write the bridge?

The loss says little: a model that cannot copy an unseen name may have the lower one. These measures are taken in a
world that no training row comes from, at bridge questions whose bridge stands in the context.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from leret.datasets.world.generate import generate
from leret.demo.pretrain.worlds import Scene, StreamSettings, encoded, scenes, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


GATE_SEED = 900_001
"""Seed of the held-out world; training worlds have seeds from 1,000,000 on."""

_SAMPLES = 4


def make_gate(
    tokenizer: PreTrainedTokenizerFast, n: int = 64, seed: int = GATE_SEED
) -> Callable[[PreTrainedModel], Mapping[str, float]]:
    """A probe for the pretraining loop.

    Args:
        tokenizer: of the model.
        n: bridge questions.
        seed: of the held-out world.

    Returns:
        A function of the model. Its figures, all in [0, 1]: ``bridge`` (samples at T=1 that hold the bridge's full
        name), ``bridge_demos`` (the same after two demos of `mention_near`), ``bridge_greedy``, ``bridge_hop1`` (of
        the question's own entity at the first hop), ``copied`` (written words that stand in the prompt),
        ``names_copied`` (written pairs of name parts that stand so in the prompt), ``distinct`` (different ones
        among four samples).
    """
    settings = StreamSettings(questions=6 * n, deep=0.0)
    found = scenes(seed, settings)
    documents, _ = generate(seed, settings.questions, 0, 0)
    titles = {document.doc_id: document.title for document in documents}
    here = [s for s in found if s.question.type == "bridge" and _stands(titles[s.question.gold[1]], s)][:n]
    rng = random.Random(f"gate {seed}")
    demos = [_demos(found, scene, rng) for scene in here]
    bridges = [_ids(tokenizer, titles[scene.question.gold[1]]) for scene in here]
    works = [_ids(tokenizer, titles[scene.question.gold[0]].split(" (")[0].removeprefix("The ")) for scene in here]
    plain = [encoded(tokenizer, scene) for scene in here]
    shown = [encoded(tokenizer, scene, turns) for scene, turns in zip(here, demos, strict=True)]
    first = [encoded(tokenizer, scene.first()) for scene in here]
    parts = _name_parts(tokenizer)

    def gate(model: PreTrainedModel) -> Mapping[str, float]:
        import torch

        torch.manual_seed(seed)
        sampled = _complete(model, plain, _SAMPLES)
        return {
            "bridge": _holding(sampled, bridges),
            "bridge_demos": _holding(_complete(model, shown, _SAMPLES), bridges),
            "bridge_greedy": _holding(_complete(model, plain, 0), bridges),
            "bridge_hop1": _holding(_complete(model, first, _SAMPLES), works),
            "copied": _copied(sampled, plain),
            "names_copied": _names_copied(sampled, plain, parts),
            "distinct": round(sum(len(set(map(tuple, s))) for s in sampled) / (len(sampled) * _SAMPLES), 3),
        }

    return gate


def _stands(name: str, scene: Scene) -> bool:
    return any(name in passage.text for passage in scene.found)


def _demos(found: Sequence[Scene], scene: Scene, rng: random.Random) -> list[dict[str, str]]:
    others = rng.sample([other for other in found if other is not scene], 2)
    return [{"question": other.question.text, "query": write("mention_near", other)} for other in others]


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _name_parts(tokenizer: PreTrainedTokenizerFast) -> dict[int, int]:
    """Class of every part of a person's, a work's or a company's name: 0, 1 people; 2, 3 works; 4, 5 companies."""
    from leret.demo.pretrain.words import NAME_CLASSES

    ids = tokenizer.get_vocab()
    return {ids[word.lower()]: i for i, words in enumerate(NAME_CLASSES[:6]) for word in words}


def _complete(model: PreTrainedModel, prompts: Sequence[Sequence[int]], samples: int) -> list[list[list[int]]]:
    """Completions of each prompt without what follows the end token; 0 samples: the greedy one."""
    import torch

    how: dict[str, Any] = {"do_sample": True, "top_k": 0, "num_return_sequences": samples} if samples else {}
    made: list[list[list[int]]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    end, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    for start in range(0, len(order), 32):
        batch = order[start : start + 32]
        width = max(len(prompts[i]) for i in batch)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + list(prompts[i]) for i in batch])
        generate: Any = model.generate
        written = generate(input_ids=ids, attention_mask=(ids != pad).long(), max_new_tokens=20, **how)
        for j, completion in enumerate(written[:, width:].tolist()):
            stop = completion.index(end) if end in completion else len(completion)
            made[batch[j // max(1, samples)]].append(completion[:stop])
    return made


def _holding(completions: Sequence[Sequence[Sequence[int]]], wanted: Sequence[tuple[int, ...]]) -> float:
    """Share of the completions that hold the name wanted of them, word by word."""
    hits = [
        any(tuple(text[i : i + len(name)]) == name for i in range(len(text)))
        for texts, name in zip(completions, wanted, strict=True)
        for text in texts
    ]
    return round(sum(hits) / len(hits), 3)


def _copied(completions: Sequence[Sequence[Sequence[int]]], prompts: Sequence[Sequence[int]]) -> float:
    inside = [
        token in prompt for texts, prompt in zip(completions, prompts, strict=True) for text in texts for token in text
    ]
    return round(sum(inside) / max(1, len(inside)), 3)


def _names_copied(
    completions: Sequence[Sequence[Sequence[int]]], prompts: Sequence[Sequence[int]], parts: Mapping[int, int]
) -> float:
    inside = []
    for texts, prompt in zip(completions, prompts, strict=True):
        there = set(pairwise(prompt))
        for text in texts:
            for pair in pairwise(text):
                if parts.get(pair[0], -1) % 2 == 0 and parts.get(pair[1]) == parts[pair[0]] + 1:
                    inside.append(pair in there)
    return round(sum(inside) / max(1, len(inside)), 3)
