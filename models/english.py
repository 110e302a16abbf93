"""Build `english`, a tiny policy that writes what to add to an English question (``python -m models english``).

The model reads a question and numbered names, and writes one of the lines: choosing a number is easy to learn, and
heads that are written into the model copy the name after it. Its tokens are MiniLM's most frequent word pieces, and its
word vectors start from MiniLM's. Its lists are those of `pipelines.expand` for training questions; the first names of a
list are the likeliest targets. Gold documents enter only through `pipelines.expand.WEIGHTS`, which order the names.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import dspy
import torch
from safetensors.torch import load_file, save_model
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from leret.config.load import load_recipe
from leret.config.sampling import SamplingRecipe
from leret.core.bundled import minilm_directory
from leret.core.progress import Progress
from leret.core.types import Ranking
from leret.programs.adapters import CompactAdapter
from leret.programs.search import Found
from leret.retrieval.base import Retriever
from leret.rollouts.environment import Environment
from models.fingerprints import write_fingerprints
from models.pretrain.decoder import ASSISTANT, LINE, POSITIONS, SPECIAL, around, build_tokenizer
from models.pretrain.examples import Example, prompt_ids, pseudo_questions
from models.pretrain.loop import Batch, LoopSettings, Probe, adamw, cross_entropy, hidden_states, interleaved, train
from models.pretrain.stage import copying, distinct, generate, rows, share
from models.scratch import training_facts
from models.words import BASE, CARRIED, HEAD, SHARPNESS, carry
from pipelines.expand import added, likely_names, numbered

_PIECES, _WIDTH, _LAYERS = 12_000, 256, 4
_SCALE = _WIDTH**-0.5
_SPAN = _WIDTH - 2 * CARRIED - 1  # dimensions of the word: between dimension 0 and the two previous words
_NAMES = 12  # names of a list

_TARGETS = 8  # targets of a prompt
_DECAY = 0.5  # the target is the name of rank r with a probability in proportion to exp(-decay r)
_NOTHING = 0.12  # weight of ``0 nothing``
_STEPS = 3  # prompts of a question
_FIELDS = ("question", "question", "question", "claim", "query")
_SIGNATURES = {field: dspy.Signature(f"{field}, names: list[str] -> words") for field in _FIELDS}
_ADAPTER = CompactAdapter(words_per_item=12, items=_NAMES + 1)
_PROBED = 100  # questions kept out of training to measure on


@dataclass(frozen=True)
class EnglishSettings(LoopSettings):
    """Settings of the loop, with Muon for the layers' matrices and a small rate for the word vectors."""

    matrix_lr: float = 1e-3
    norm_lr: float = 1e-2

    def optimizers(self, model: PreTrainedModel) -> list[torch.optim.Optimizer]:
        words = model.get_input_embeddings().weight
        trained = [p for p in model.parameters() if p.requires_grad and p is not words]
        return [
            adamw([p for p in trained if p.ndim < 2], self.norm_lr),
            torch.optim.Muon([p for p in trained if p.ndim == 2], lr=self.matrix_lr, weight_decay=0.0),
            adamw([words], self.lr),
        ]

    def loss(self, model: PreTrainedModel, batch: Batch, step: int) -> torch.Tensor:
        return cross_entropy(model, hidden_states(model, batch), batch.target_at, batch.target_labels)


_TRAINING = EnglishSettings(
    steps=200,
    lr=1e-4,
    batch_tokens=4096,
    pool_rows=512,
    warmup_steps=20,
    decay_from=0.4,
    checkpoint_every=50,
    log_every=25,
    probe_every=50,
)


def pretrain_english(
    out: Path, progress: Progress, *, seed: int = 0, steps: int | None = None, overrides: Sequence[str] = ()
) -> Path:
    """Build the policy in ``out``, or continue; ``overrides`` name questions and corpus for the recipe expand-write."""
    recipe = load_recipe("sampling/expand-write.yaml", SamplingRecipe, overrides)
    out.mkdir(parents=True, exist_ok=True)
    environment = Environment(recipe, out / ".cache")
    documents = list(environment.corpus.values())
    questions = [task.text for task in environment.tasks("train")]
    pieces = frequent_pieces([*(f"{one.title} {one.text}" for one in documents), *questions * 5], _PIECES)
    tokenizer = build_tokenizer(pieces)
    tokenizer.save_pretrained(out)
    model = build_model(tokenizer, pieces, seed)
    held, used = questions[:_PROBED], questions[_PROBED:]
    used += pseudo_questions(documents, len(used) // 2, seed)
    write_fingerprints(out, [*held, *used])
    stream = rows(examples(used, environment.retriever, seed), tokenizer)
    words = sorted(i for piece, i in tokenizer.get_vocab().items() if piece.removeprefix("##").isalnum())
    exercise = partial(copying, random.Random(f"copy {seed}"), words, around(tokenizer), tokenizer.eos_token_id)
    stream = interleaved(stream, exercise, (0.1, 0.05), 20_000, random.Random(f"mix {seed}"))
    settings = EnglishSettings(**{**vars(_TRAINING), "seed": seed, "steps": steps or _TRAINING.steps})
    probe = probe_on(held, environment.retriever, tokenizer)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        train(model, stream, settings, out, progress, probe=probe)
    save_model(model.bfloat16(), str(out / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2), encoding="utf-8")
    shutil.rmtree(out / ".cache")
    (out / "README.md").write_text(_card(out, model, settings, len(used)), encoding="utf-8")
    return out


def _card(out: Path, model: Qwen3ForCausalLM, settings: EnglishSettings, n_questions: int) -> str:
    cost, measures = training_facts(out / "pretrain.jsonl", measure="listed", every=settings.log_every)
    return f"""# leret-english-6m: a tiny policy that adds words to a search

A causal language model (Qwen3, {sum(p.numel() for p in model.parameters()):,} parameters, bfloat16) for
`pipelines/expand.py:ExpandWrite` without passages. It reads a question and numbered names, and writes one of the lines.
It prefers the first names: it imitates the order of the list, whose weights were fitted to the recall of names on
HotpotQA's training questions (`pipelines/expand.py:WEIGHTS`).

Built by `python -m models english` (seed {settings.seed}, {settings.steps} steps) from {n_questions:,} texts: training
questions, and sentences from the corpus turned into questions. Cost: {cost}.
Heads that copy from the prompt are written into the untrained model (`models/english.py`).

Word pieces and word vectors come from all-MiniLM-L6-v2 (Apache License 2.0). The licences of the questions and the
passages apply to these weights too; HotpotQA's is CC BY-SA 4.0.

Measured at the first step on {_PROBED} questions kept out of training (`models.english.probe_on`):

{measures}
"""


def frequent_pieces(texts: Iterable[str], n: int) -> list[str]:
    """Return the ``n`` most frequent of MiniLM's word pieces in MiniLM's order, with all single characters."""
    from tokenizers import Tokenizer

    full = Tokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    full.no_padding()
    full.no_truncation()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(full.encode(text, add_special_tokens=False).tokens)
    order = full.get_vocab()
    single = [piece for piece in order if len(piece.removeprefix("##")) == 1 and (piece.isascii() or counts[piece])]
    pieces = dict.fromkeys([*SPECIAL, "[SEP]", LINE, *single, *(piece for piece, _ in counts.most_common()), *order])
    return sorted(list(pieces)[:n], key=order.__getitem__)


def examples(questions: Sequence[str], retriever: Retriever, seed: int) -> Iterator[Example]:
    """Yield an endless stream of prompts; a question's later prompts follow searches for drawn targets."""
    for epoch in count():
        rng = random.Random(f"english {seed} {epoch}")
        order = rng.sample(questions, len(questions))
        for start in range(0, len(order), 256):
            block = _block(order[start : start + 256], retriever, rng)
            rng.shuffle(block)
            yield from block


def _block(questions: Sequence[str], retriever: Retriever, rng: random.Random) -> list[Example]:
    block: list[Example] = []
    searches: list[list[Ranking]] = [[first[: rng.randint(2, 4)]] for first in retriever.search(questions, 4)]
    tried: list[list[str]] = [[] for _ in questions]
    for step in range(_STEPS):
        for question, found, words in zip(questions, searches, tried, strict=True):
            lines = numbered(likely_names(question, Found(tuple(found)), words, _NAMES))
            weights = [*(math.exp(-_DECAY * rank) for rank in range(len(lines) - 1)), _NOTHING]
            targets = rng.choices(lines, weights, k=_TARGETS)
            block.append(Example(_prompt(question, lines, rng.choice(_FIELDS)), tuple(targets)))
            words.append(added(targets[0]))
        if step == _STEPS - 1:
            break
        queries = [f"{question} {words[-1]}" for question, words in zip(questions, tried, strict=True)]
        for found, ranking in zip(searches, retriever.search(queries, 8), strict=True):
            seen = {passage.doc_id for before in found for passage in before}
            found.append(tuple(passage for passage in ranking if passage.doc_id not in seen)[:1])
    return block


def _prompt(question: str, lines: Sequence[str], field: str = "question") -> list[dict[str, str]]:
    return _ADAPTER.format(_SIGNATURES[field], (), {field: question, "names": list(lines)})


def probe_on(questions: Sequence[str], retriever: Retriever, tokenizer: PreTrainedTokenizerFast) -> Probe:
    """Make a probe of the first step: the shares of greedy and sampled completions that are a line of the prompt.

    ``first`` is the share of greedy completions that are the first line, ``distinct`` the share of different samples.
    """
    found = [Found((ranking,)) for ranking in retriever.search(questions, 3)]
    lists = [numbered(likely_names(*pair, (), _NAMES)) for pair in zip(questions, found, strict=True)]
    prompts = [prompt_ids(tokenizer, _prompt(*pair)) for pair in zip(questions, lists, strict=True)]
    lines = [[tokenizer(line, add_special_tokens=False)["input_ids"] for line in some] for some in lists]

    def probe(model: PreTrainedModel) -> dict[str, float]:
        greedy, samples = generate(model, prompts, 0), generate(model, prompts, 4)
        return {
            "listed": share(one[0] in some for one, some in zip(greedy, lines, strict=True)),
            "first": share(one[0] == some[0] for one, some in zip(greedy, lines, strict=True)),
            "listed_sampled": share(ids in some for drawn, some in zip(samples, lines, strict=True) for ids in drawn),
            "distinct": distinct(samples),
        }

    return probe


def build_model(tokenizer: PreTrainedTokenizerFast, pieces: Sequence[str], seed: int) -> Qwen3ForCausalLM:
    """Build a model that copies names from the start; see `_write_copying_heads`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=640,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_WIDTH // HEAD,
        num_key_value_heads=_WIDTH // HEAD,
        head_dim=HEAD,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=_SCALE,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        _write_words(model.model.embed_tokens.weight, tokenizer, pieces)
        _write_copying_heads(model, torch.Generator().manual_seed(seed))
        model.model.norm.weight.fill_(1.5)
    _freeze_heads(model)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        suppress_tokens=sorted(tokenizer.convert_tokens_to_ids([*SPECIAL, LINE])),
    )
    return model


def _write_words(words: torch.Tensor, tokenizer: PreTrainedTokenizerFast, pieces: Sequence[str]) -> None:
    """Write MiniLM's word vectors, reduced to the span of the word, whitened in part, and all of one length.

    The end of a message and the start of an answer get the vector of a line break, so that the copying heads start and
    end an answer like a line of the prompt.
    """
    order = build_tokenizer().convert_tokens_to_ids(list(pieces))
    table = load_file(minilm_directory() / "model.safetensors")["embeddings.word_embeddings.weight"].float()[order]
    table = table - table.mean(0)
    table = table @ torch.linalg.svd(table, full_matrices=False).Vh[:_SPAN].T
    table = table / table.std(0).pow(0.7)
    words[:, 0] = 3 * _SCALE
    words[:, 1 : 1 + _SPAN] = table / table.norm(dim=1, keepdim=True) * _SPAN**0.5 * _SCALE
    words[:, 1 + _SPAN :] = 0
    assistant, line = tokenizer.convert_tokens_to_ids([ASSISTANT, LINE])
    words[[assistant, tokenizer.eos_token_id]] = words[line].clone()


def _write_copying_heads(model: Qwen3ForCausalLM, generator: torch.Generator) -> None:
    """Write heads that copy the word after an earlier occurrence of the last two words.

    Two heads of the first layer carry each word one and two positions on. All heads of the last layer attend to the
    positions whose two previous words are the current word and the one before it, and together copy the whole vector.
    Compare `models.words`, where one head compares one word. Everything else starts with zero output.
    """
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    first, last = model.model.layers[0].self_attn, model.model.layers[-1].self_attn
    word, copied = _basis(generator), _basis(generator)
    carry(first, word, back=1)
    carry(first, word, back=2)
    half, quarter = HEAD // 2, CARRIED // 2
    slow = torch.tensor([*range(half - quarter, half), *range(HEAD - quarter, HEAD)])
    second, _ = torch.linalg.qr(torch.randn(CARRIED, CARRIED, generator=generator))
    last.q_proj.weight *= 0.1
    last.k_proj.weight.zero_()
    last.v_proj.weight.zero_()
    for head in range(_WIDTH // HEAD):
        at = slow + head * HEAD
        last.q_proj.weight[at] = word[:CARRIED]
        last.q_proj.weight[at, -CARRIED:] = 0.5 * second
        last.k_proj.weight[at, -CARRIED:] = torch.eye(CARRIED)
        last.k_proj.weight[at, -2 * CARRIED : -CARRIED] = 0.5 * second
        rows = copied[head * HEAD : (head + 1) * HEAD]
        values = slice(head * HEAD, head * HEAD + len(rows))
        last.v_proj.weight[values] = rows
        last.o_proj.weight[:, values] = 30 * _SCALE * rows.T
    last.q_norm.weight[slow] = SHARPNESS
    last.k_norm.weight[slow] = SHARPNESS


def _basis(generator: torch.Generator) -> torch.Tensor:
    """Return orthonormal rows (n, width) that span the dimensions of the word."""
    basis = torch.zeros(_SPAN, _WIDTH)
    basis[:, 1 : 1 + _SPAN], _ = torch.linalg.qr(torch.randn(_SPAN, _SPAN, generator=generator))
    return basis


def _freeze_heads(model: Qwen3ForCausalLM) -> None:
    """Keep the carrying heads, and the dimensions that they alone may write, out of training."""
    ends, carrying = slice(-2 * CARRIED, None), slice(0, 2 * HEAD)

    def freeze(weight: torch.Tensor, *places: Any) -> None:
        def mask(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            for place in places:
                gradient[place] = 0
            return gradient

        weight.register_hook(mask)

    freeze(model.model.embed_tokens.weight, (slice(None), ends), (slice(None), 0))
    for layer in model.model.layers:
        freeze(
            layer.self_attn.o_proj.weight, ends, *([(slice(None), carrying)] if layer is model.model.layers[0] else [])
        )
        freeze(layer.mlp.down_proj.weight, ends)
    for attention in (model.model.layers[0].self_attn, model.model.layers[-1].self_attn):
        attention.q_norm.weight.requires_grad_(False)
        attention.k_norm.weight.requires_grad_(False)
    first = model.model.layers[0].self_attn
    for projection in (first.q_proj, first.k_proj, first.v_proj):
        freeze(projection.weight, carrying)
