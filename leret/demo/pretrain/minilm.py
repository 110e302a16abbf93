"""A small policy from MiniLM's weights: an encoder's layers as a causal decoder.

MiniLM (6 layers, 384 wide, 22.7M parameters with its word pieces) knows words and attends to equal ones, which is most
of what it takes to copy a query out of a prompt. What it lacks is taught by the demonstrators' queries, and by
exercises in copying between them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.core.errors import TrainingError
from leret.core.types import Document, Task, digest
from leret.demo.pretrain.decoder import POSITIONS, around, build_model, build_tokenizer
from leret.demo.pretrain.examples import Example, ExampleSettings, Prompting, examples, pseudo_questions
from leret.demo.pretrain.exercises import copying, interleaved
from leret.demo.pretrain.heuristics import corpus_idf
from leret.retrieval.base import Retriever

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from leret.demo.pretrain.batch import Row
    from leret.demo.pretrain.loop import LoopSettings


def _has_bfloat16() -> bool:
    import torch

    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions lack it
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@dataclass(frozen=True, slots=True)
class MiniLMSettings:
    """How the base is trained.

    Attributes:
        examples: what the stream of prompts and queries is made of.
        steps: optimizer steps.
        lr: peak rate of AdamW.
        batch_tokens: tokens a step.
        warmup_steps: steps of linear warm-up.
        decay_from: share of the steps after which the rate falls linearly to 0.
        pseudo_questions: sentences of the corpus that stand beside the questions.
        bf16: multiply matrices in bfloat16; as it is, where the processor has instructions for it.
        negatives: of the loss, as in the loop's settings.
        exercises: shares of rows that only teach copying, at the start and after ``settled`` rows.
        settled: rows.
        probe_questions: questions kept out of training to measure on.
        probe_every: steps between measurements.
        checkpoint_every: steps between checkpoints.
        seed: of the batches.
    """

    examples: ExampleSettings = field(default_factory=ExampleSettings)
    steps: int = 1600
    lr: float = 7e-4
    batch_tokens: int = 2048
    warmup_steps: int = 30
    decay_from: float = 0.3
    pseudo_questions: int = 3000
    bf16: bool = field(default_factory=_has_bfloat16)
    negatives: int = 2000
    exercises: tuple[float, float] = (0.5, 0.1)
    settled: int = 12_000
    probe_questions: int = 48
    probe_every: int = 400
    checkpoint_every: int = 100
    seed: int = 0


def pretrain_minilm(
    questions: Sequence[Task],
    corpus: Iterable[Document],
    retriever: Retriever,
    settings: MiniLMSettings,
    out: Path,
    progress: Callable[[int, Mapping[str, float]], None] | None = None,
    prompting: Prompting | None = None,
) -> Path:
    """Make the base policy, or go on with making it.

    Args:
        questions: of the training split; only their texts are read.
        corpus: for the rarity of words and for pseudo-questions.
        retriever: over ``corpus``.
        settings: how.
        out: the model directory; its log is ``pretrain.jsonl``.
        progress: called at every line of the log.
        prompting: how prompts are written; None for ``question, context -> query`` under the compact adapter.

    Returns:
        ``out``.

    Raises:
        MissingDependency: MiniLM's weights are not installed.
        TrainingError: ``out`` holds a run with other settings, or training failed.
    """
    import torch

    from leret.demo.pretrain.checkpoint import finished
    from leret.demo.pretrain.loop import train
    from leret.demo.pretrain.probe import probe_on

    if finished(out, settings.steps):
        return out
    if len(questions) <= settings.probe_questions + 1:
        raise TrainingError(
            f"pretraining: {len(questions)} questions are too few to keep {settings.probe_questions} out; "
            "give more of them, or lower probe_questions"
        )
    documents = list(corpus)
    prompting = prompting or Prompting()
    texts = [question.text for question in questions]
    held, used = texts[: settings.probe_questions], texts[settings.probe_questions :]
    used += pseudo_questions(documents, settings.pseudo_questions, settings.seed)
    idf = corpus_idf(f"{document.title} {document.text}" for document in documents)
    tokenizer, model = build_tokenizer(), build_model()
    stream = interleaved(
        rows(examples(used, retriever, idf, settings.examples, prompting), tokenizer),
        _exercises(tokenizer, settings.seed),
        settings.exercises,
        settings.settled,
        random.Random(f"interleaved {settings.seed}"),
    )
    probe = probe_on(held, retriever, tokenizer, prompting, settings.examples.k)
    data = data_names(settings, [*held, *used], retriever, prompting)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    # Without cache_enabled=False the copies made at the first step would serve at all later ones.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if settings.bf16 else nullcontext():
        return train(model, stream, _loop(settings), out, probe=probe, progress=progress, data=data)


def data_names(
    settings: MiniLMSettings, texts: Sequence[str], retriever: Retriever, prompting: Prompting
) -> dict[str, str]:
    """Names what the rows are made of, by the keys of a recipe."""
    own = {name: getattr(settings, name) for name in ("pseudo_questions", "exercises", "settled", "bf16")}
    examples = {f"examples.{field.name}": getattr(settings.examples, field.name) for field in fields(settings.examples)}
    content = {"questions": digest(list(texts)), "retriever": retriever.digest, "adapter": prompting.adapter.settings()}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in (own | examples).items()}
    return {name: repr(value) for name, value in (plain | content).items()}


def _loop(settings: MiniLMSettings) -> LoopSettings:
    from leret.demo.pretrain.loop import LoopSettings

    return LoopSettings(
        steps=settings.steps,
        lr=settings.lr,
        batch_tokens=settings.batch_tokens,
        warmup_steps=settings.warmup_steps,
        decay_from=settings.decay_from,
        pool_rows=512,
        checkpoint_every=settings.checkpoint_every,
        probe_every=settings.probe_every,
        log_every=gcd(settings.checkpoint_every, 25),
        negatives=settings.negatives,
        seed=settings.seed,
    )


def rows(stream: Iterable[Example], tokenizer: PreTrainedTokenizerFast, longest: int = POSITIONS) -> Iterator[Row]:
    """Examples as token ids; one that does not fit the positions is left out.

    Args:
        stream: examples.
        tokenizer: with a chat template.
        longest: tokens of a prompt and one target.
    """
    from leret.demo.pretrain.batch import Row

    for example in stream:
        prompt = tuple(_prompt_ids(tokenizer, example.messages))
        endings = [f"{target}{tokenizer.eos_token}" for target in example.targets]
        targets = tuple(tuple(ids) for ids in tokenizer(endings, add_special_tokens=False)["input_ids"])
        if len(prompt) + max(map(len, targets)) <= longest:
            yield Row(prompt, targets)


def _exercises(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Row]:
    """Random pieces in a prompt that is built like a first hop's."""
    rng = random.Random(f"exercises {seed}")
    vocabulary = tokenizer.get_vocab()
    pieces = sorted(i for piece, i in vocabulary.items() if piece.removeprefix("##").isalnum())
    before_after, end = around(tokenizer), tokenizer.eos_token_id
    while True:
        yield copying(rng, pieces, before_after, end)


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    encoded: Any = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
    )
    ids: list[int] = list(encoded["input_ids"])
    return ids
