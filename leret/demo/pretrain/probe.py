"""What a base policy writes on questions it never saw: measured without gold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leret.core.types import Ranking
from leret.demo.pretrain.examples import Prompting
from leret.retrieval.base import Retriever

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from leret.demo.pretrain.loop import Probe


_SAMPLES = 4
_NEW_TOKENS = 40


def probe_on(
    questions: Sequence[str], retriever: Retriever, tokenizer: PreTrainedTokenizerFast, prompting: Prompting, k: int
) -> Probe:
    """A probe on held-out questions, zero-shot at both hops; the raw question's passages are the second's context.

    Its figures: ``valid_1`` and ``valid_2``, the share of the word pieces of greedy queries that stand in the prompt;
    ``distinct_1`` and ``distinct_2``, the share of different queries among four samples at temperature 1;
    ``mention_2``, the share of those samples at the second hop with a piece that only the context has.

    Args:
        questions: their texts.
        retriever: finds the contexts.
        tokenizer: with a chat template.
        prompting: how prompts are written.
        k: passages a search.
    """
    contexts = retriever.search(questions, k)

    def prompt(question: str, found: Ranking) -> list[int]:
        messages = list(prompting.messages(question, found))
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(encoded["input_ids"])

    hops = {
        1: [prompt(question, ()) for question in questions],
        2: [prompt(question, found) for question, found in zip(questions, contexts, strict=True)],
    }

    def probe(model: PreTrainedModel) -> dict[str, float]:
        import torch

        torch.manual_seed(0)
        figures: dict[str, float] = {}
        for hop, prompts in hops.items():
            greedy = generate(model, prompts, 1, 0.0)
            samples = generate(model, prompts, _SAMPLES, 1.0)
            figures[f"valid_{hop}"] = _valid(prompts, greedy)
            figures[f"distinct_{hop}"] = sum(len(set(some)) / len(some) for some in samples) / len(samples)
        figures["mention_2"] = _mention(hops[1], hops[2], samples)
        return {name: round(value, 3) for name, value in figures.items()}

    return probe


def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], n: int, temperature: float, batch: int = 16
) -> list[list[tuple[int, ...]]]:
    """Complete prompts.

    Args:
        model: in evaluation mode, with pad and end token in its generation configuration.
        prompts: token ids each.
        n: completions a prompt.
        temperature: 0 is greedy, and then ``n`` is 1.
        batch: prompts at once; those of like length go together.

    Returns:
        ``n`` completions a prompt, in the order of the prompts, without the end token.
    """
    import torch

    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: list[list[tuple[int, ...]]] = [[] for _ in prompts]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        ids, mask = _left_padded([prompts[i] for i in chosen], model)
        with torch.no_grad():
            written = model.generate(
                input_ids=ids, attention_mask=mask, num_return_sequences=n, max_new_tokens=_NEW_TOKENS, **sampling
            )
        for j, row in enumerate(written[:, ids.shape[1] :].tolist()):
            found[chosen[j // n]].append(_until_end(row, model.generation_config.eos_token_id))
    return found


def _left_padded(prompts: Sequence[Sequence[int]], model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    width, pad = max(map(len, prompts)), model.generation_config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    return ids, mask


def _until_end(row: list[int], end: int) -> tuple[int, ...]:
    return tuple(row[: row.index(end)] if end in row else row)


def _valid(prompts: Sequence[Sequence[int]], written: Sequence[Sequence[tuple[int, ...]]]) -> float:
    hits = [
        piece in set(prompt) for prompt, some in zip(prompts, written, strict=True) for one in some for piece in one
    ]
    return sum(hits) / max(1, len(hits))


def _mention(
    bare: Sequence[Sequence[int]], full: Sequence[Sequence[int]], written: Sequence[Sequence[tuple[int, ...]]]
) -> float:
    """Share of the samples with a piece of the context that the question lacks."""
    hits = [
        bool((set(one) & set(with_context)) - set(without))
        for without, with_context, some in zip(bare, full, written, strict=True)
        for one in some
    ]
    return sum(hits) / max(1, len(hits))
