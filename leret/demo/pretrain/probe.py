"""Measures of a base policy without gold documents: copying from the prompt, and diversity.

The loss shows neither: a model that cannot copy an unseen name may have a lower loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from leret.core.types import Ranking
from leret.demo.pretrain.examples import call_messages, prompt_ids
from leret.programs.adapters import CompactAdapter
from leret.retrieval.base import Retriever

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from leret.demo.pretrain.loop import Probe

SAMPLES = 4
"""Samples of each prompt, at temperature 1."""

_MAX_TOKENS = 40
Ids = Sequence[int]


def probe_on(
    questions: Sequence[str], retriever: Retriever, tokenizer: PreTrainedTokenizerFast, adapter: CompactAdapter, k: int
) -> Probe:
    """Make a probe on held-out questions, zero-shot at both hops; the raw question's passages are the second context.

    It measures ``valid_1`` and ``valid_2``, the share of word pieces of greedy queries that are in the prompt;
    ``distinct_1`` and ``distinct_2``, the share of different queries among four samples at temperature 1; and
    ``mention_2``, the share of samples at the second hop with a piece that only the context has.
    """
    contexts: dict[int, Sequence[Ranking]] = {1: [()] * len(questions), 2: retriever.search(questions, k)}
    hops = {
        hop: [
            prompt_ids(tokenizer, call_messages(*one, adapter=adapter)) for one in zip(questions, context, strict=True)
        ]
        for hop, context in contexts.items()
    }

    def probe(model: PreTrainedModel) -> dict[str, float]:
        figures: dict[str, float] = {}
        for hop, prompts in hops.items():
            figures[f"valid_{hop}"] = copied(generate(model, prompts, 0), prompts)
            samples = generate(model, prompts, SAMPLES)
            figures[f"distinct_{hop}"] = distinct(samples)
        figures["mention_2"] = share(
            bool((set(one) & set(full)) - set(bare))
            for bare, full, some in zip(hops[1], hops[2], samples, strict=True)
            for one in some
        )
        return figures

    return probe


def generate(model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], n: int) -> list[list[Ids]]:
    """Return ``n`` completions of each prompt at temperature 1, or for 0 the greedy one, without the end token."""
    from leret.policies.local.decoder import Decoder, Job

    end, suppressed = model.generation_config.eos_token_id, model.generation_config.suppress_tokens
    seeds = [range(i * SAMPLES, i * SAMPLES + max(1, n)) for i in range(len(prompts))]
    jobs = [Job(ids, 0, tuple(draws), min(n, 1), 1.0, _MAX_TOKENS) for ids, draws in zip(prompts, seeds, strict=True)]
    written = Decoder(model, end_ids=[end], suppressed=suppressed or ()).run(jobs)
    return [[[token for token in one.token_ids if token != end] for one in some] for some in written]


def copied(completions: Sequence[Sequence[Ids]], prompts: Sequence[Ids]) -> float:
    """Return the share of tokens that are in the prompt."""
    return share(
        token in prompt
        for texts, prompt in zip(completions, map(set, prompts), strict=True)
        for text in texts
        for token in text
    )


def distinct(completions: Sequence[Sequence[Ids]]) -> float:
    """Return the share of different samples of a prompt."""
    return round(sum(len(set(map(tuple, some))) / len(some) for some in completions) / len(completions), 3)


def share(hits: Iterable[bool]) -> float:
    """Return the share of True."""
    values = list(hits)
    return round(sum(values) / max(1, len(values)), 3)
