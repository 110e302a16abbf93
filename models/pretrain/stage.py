"""`python -m models pretrain`: build a sampling recipe's small policy by imitating rules that never see gold documents.

MiniLM (6 layers, width 384, 22.7M parameters) knows words and attends to occurrences of the same word. Its layers
become a causal decoder. The rest is learned from the demonstrators' queries and from copying exercises.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from leret.config.base import Settings
from leret.config.messages import validated
from leret.config.sampling import SamplingRecipe
from leret.core.bundled import POLICIES, minilm_directory
from leret.core.errors import ConfigError, TrainingError
from leret.core.files import require_writable
from leret.core.progress import Progress
from leret.core.types import Ranking, digest
from leret.policies.local.decoder import Decoder, Job
from leret.programs.adapters import CompactAdapter, adapter_record, make_adapter
from leret.retrieval.base import Retriever
from leret.rollouts.environment import Environment
from models.fingerprints import write_fingerprints
from models.pretrain.decoder import POSITIONS, around, build_model, build_tokenizer
from models.pretrain.examples import Example, call_messages, encoded, examples, prompt_ids, pseudo_questions
from models.pretrain.heuristics import corpus_idf
from models.pretrain.loop import LoopSettings, Probe, Row, interleaved, is_finished, train


def _has_bfloat16() -> bool:
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # missing in old versions
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


class PretrainSettings(Settings):
    """Keys of a recipe's section ``pretrain``."""

    kind: Literal["minilm"] = Field(description="a decoder on MiniLM's weights, trained on your corpus")
    steps: PositiveInt | None = None
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)


class MiniLMSettings(Settings):
    """Keys of ``pretrain.options``."""

    steps: PositiveInt = 1600
    lr: float = Field(7e-4, gt=0, description="peak rate of AdamW")
    batch_tokens: PositiveInt = Field(2048, description="tokens per step")
    warmup_steps: NonNegativeInt = 30
    decay_from: float = Field(0.3, ge=0, lt=1, description="after this share of the steps, the rate falls to 0")
    pseudo_questions: NonNegativeInt = Field(3000, description="sentences of the corpus to add to the questions")
    bf16: bool = Field(default_factory=_has_bfloat16, description="multiply matrices in bfloat16")
    negatives: NonNegativeInt = Field(2000, description="random tokens in the softmax of the loss")
    exercises: tuple[float, float] = Field(
        (0.5, 0.1), description="shares of copying exercises at the start and after `constant_after` rows"
    )
    constant_after: PositiveInt = Field(12_000, description="rows after which the share of exercises is constant")
    probe_questions: PositiveInt = Field(48, description="questions held out from training for measurements")
    probe_every: PositiveInt = 400
    checkpoint_every: PositiveInt = 100
    seed: int = 0


def pretrain(recipe: SamplingRecipe, out: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Build a recipe's policy from the train split of its data, or continue a stopped build.

    ``out`` defaults to ``policy.model``, or to ``policies/NAME`` if ``policy.model`` names the shipped policy NAME.
    """
    section, model = recipe.pretrain, recipe.policy.model
    if section is None:
        raise ConfigError(
            "pretrain: the recipe lacks this section; add `pretrain: {kind: minilm}` (see `leret init --policy minilm`)"
        )
    if out is None and recipe.policy.kind != "local":
        raise ConfigError(
            f"pretrain: policy.model {model} is on a server ({recipe.policy.kind}); choose a directory with --out"
        )
    out = out or Path(f"policies/{model}" if model in POLICIES else model)
    settings, adapter = minilm_settings(section), make_adapter(recipe.program.adapter)
    if not isinstance(adapter, CompactAdapter):
        raise ConfigError("program.adapter.kind: pretrain.kind minilm reads at most 512 tokens; set kind: compact")
    minilm_directory()  # fail before reading the data if the weights are missing
    if is_finished(out, settings.steps):
        return out
    require_writable(out, "policy directory")
    progress = progress or Progress()
    progress.start(f"pretraining {out.name}", settings.steps)
    try:
        return _train(Environment(recipe, out / ".cache"), settings, adapter, out, progress)
    finally:
        progress.finish()


def _train(
    environment: Environment, settings: MiniLMSettings, adapter: CompactAdapter, out: Path, progress: Progress
) -> Path:
    texts = [question.text for question in environment.tasks("train")]
    if len(texts) <= settings.probe_questions + 1:
        raise TrainingError(
            f"pretraining: {len(texts)} questions are too few to hold out {settings.probe_questions}; add "
            "questions, or reduce probe_questions"
        )
    documents, k, retriever = list(environment.corpus.values()), environment.recipe.retriever.k, environment.retriever
    held, used = texts[: settings.probe_questions], texts[settings.probe_questions :]
    used += pseudo_questions(documents, settings.pseudo_questions, settings.seed)
    idf = corpus_idf(f"{document.title} {document.text}" for document in documents)
    tokenizer, model = build_tokenizer(), build_model()
    pieces = sorted(i for piece, i in tokenizer.get_vocab().items() if piece.removeprefix("##").isalnum())
    rng, rng_mix = (random.Random(f"{name} {settings.seed}") for name in ("exercises", "interleaved"))
    exercise = partial(copying, rng, pieces, around(tokenizer), tokenizer.eos_token_id)
    stream = rows(examples(used, retriever, idf, adapter, k=k, seed=settings.seed), tokenizer)
    stream = interleaved(stream, exercise, settings.exercises, settings.constant_after, rng_mix)
    probe = probe_on(held, retriever, tokenizer, adapter, k)
    data = data_names(settings, k, [*held, *used], retriever, adapter)
    out.mkdir(parents=True, exist_ok=True)
    write_fingerprints(out, [*held, *used])
    tokenizer.save_pretrained(out)
    shared = {field.name for field in fields(LoopSettings)} & set(MiniLMSettings.model_fields)
    log_every = gcd(settings.checkpoint_every, 25)
    loop = LoopSettings(pool_rows=512, log_every=log_every, **settings.model_dump(include=shared))
    # Autocast's cache would reuse the bfloat16 weights of the first step.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if settings.bf16 else nullcontext():
        return train(model, stream, loop, out, progress, probe=probe, data=data)


def minilm_settings(section: Mapping[str, Any]) -> MiniLMSettings:
    """Return the settings of a recipe's ``pretrain`` section. ``options`` override the other keys."""
    settings = validated(PretrainSettings, section, "pretrain")
    keys: dict[str, Any] = {"seed": settings.seed}
    if settings.steps is not None:
        keys["steps"] = settings.steps
    try:
        return MiniLMSettings.model_validate({**keys, **settings.options})
    except ValidationError as error:
        faults = ((".".join(map(str, fault["loc"])), fault["msg"], fault["input"]) for fault in error.errors())
        raise ConfigError([f"pretrain.options.{key} is {value!r}: {text}" for key, text, value in faults]) from None


def data_names(
    settings: MiniLMSettings, k: int, texts: Sequence[str], retriever: Retriever, adapter: CompactAdapter
) -> dict[str, str]:
    """Describe the training rows; the description is saved with the checkpoint."""
    options = settings.model_dump(include={"pseudo_questions", "exercises", "constant_after", "bf16"})
    settings_of_adapter = adapter_record(adapter)["settings"]
    content = {"k": k, "questions": digest(list(texts)), "retriever": retriever.digest, "adapter": settings_of_adapter}
    return {name: repr(value) for name, value in (options | content).items()}


def rows(stream: Iterable[Example], tokenizer: PreTrainedTokenizerFast, longest: int = POSITIONS) -> Iterator[Row]:
    """Encode examples as token ids, and drop examples of more than ``longest`` tokens."""
    for example in stream:
        row = encoded(tokenizer, example.messages, example.targets)
        if len(row.prompt) + max(map(len, row.targets)) <= longest:
            yield row


_SPANS = 6


def copying(rng: random.Random, pieces: Sequence[int], around: tuple[Sequence[int], Sequence[int]], end: int) -> Row:
    """Return a prompt of random word pieces, with spans from it as targets, so that only copying reduces the loss."""
    text = rng.choices(pieces, k=rng.randint(6, 40))
    before, after = around
    targets = set()
    for _ in range(_SPANS):
        length = rng.randint(2, min(14, len(text)))
        start = rng.randint(0, len(text) - length)
        targets.add((*text[start : start + length], end))
    return Row((*before, *text, *after), tuple(sorted(targets)))


SAMPLES = 4
"""Samples per prompt at temperature 1."""

_MAX_TOKENS = 40
Ids = Sequence[int]


def probe_on(
    questions: Sequence[str], retriever: Retriever, tokenizer: PreTrainedTokenizerFast, adapter: CompactAdapter, k: int
) -> Probe:
    """Return a probe that measures copying and diversity, which the loss does not show, on held-out questions.

    Prompts are zero-shot; at hop 2, they contain the passages that a search for the question returned. ``valid_1`` (hop
    1) and ``valid_2`` (hop 2) are the share of a greedy query's word pieces that also occur in the prompt.
    ``distinct_1`` and ``distinct_2`` are the share of distinct queries among four samples at temperature 1.
    ``mention_2`` is the share of samples at hop 2 with a word piece that only occurs in the passages.
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
    """Return ``n`` completions per prompt at temperature 1, or a greedy one if ``n`` is 0, without end tokens."""
    end, suppressed = model.generation_config.eos_token_id, model.generation_config.suppress_tokens
    seeds = [range(i * SAMPLES, i * SAMPLES + max(1, n)) for i in range(len(prompts))]
    jobs = [Job(ids, 0, tuple(draws), min(n, 1), 1.0, _MAX_TOKENS) for ids, draws in zip(prompts, seeds, strict=True)]
    written = Decoder(model, end_ids=[end], suppressed=suppressed or ()).run(jobs)
    return [[[token for token in one.token_ids if token != end] for one in some] for some in written]


def copied(completions: Sequence[Sequence[Ids]], prompts: Sequence[Ids]) -> float:
    """Return the share of the completions' tokens that are in their prompt."""
    return share(
        token in prompt
        for texts, prompt in zip(completions, map(set, prompts), strict=True)
        for text in texts
        for token in text
    )


def distinct(completions: Sequence[Sequence[Ids]]) -> float:
    """Return the share of a prompt's completions that are distinct, as the mean over all prompts."""
    return round(sum(len(set(map(tuple, some))) / len(some) for some in completions) / len(completions), 3)


def share(hits: Iterable[bool]) -> float:
    """Return the share of True values."""
    values = list(hits)
    return round(sum(values) / max(1, len(values)), 3)
