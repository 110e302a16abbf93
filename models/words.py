"""The word tokenizer and the tiny model of the demo's policy, with a pair of heads that copies from the start.

A token is a word: the closed lexicon of the world, the words of its documents and questions, years and signs. Pieces of
words were tried first and were memorised instead of copied; with whole words a name is two or three tokens, and an
unseen name is an unseen pair of seen tokens. Any other word becomes ``<|unk|>``, which the policy never writes: on text
of another kind it can only copy what it knows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from leret.datasets.world import cast as lexicon
from leret.datasets.world.generate import generate

SPECIAL = ("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
NAME_CLASSES: tuple[tuple[str, ...], ...] = (
    *(lexicon.FIRST_NAMES, lexicon.LAST_NAMES, lexicon.ADJECTIVES, lexicon.NOUNS, lexicon.FIRMS, lexicon.TRADES),
    *(lexicon.CITIES, lexicon.AWARDS, lexicon.INSTRUMENTS),
    tuple(str(year) for year in range(1930, 2000)),
)
"""Words that may stand for one another: within a class, which word it is tells nothing."""

_TOKEN = r"\n|\w+|[^\w\s]"
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_MAX_POSITIONS = 1024
_WIDTH, _HEAD, _BASE = 128, 64, 1e6
_SCALE = _WIDTH**-0.5
_COMMON = """question: context: query: | 0 1 2 3 4 5 6 7 8 9 ! " ' ( ) , - . / : ; ? & a about after all also
american among an and are as before between both british but can country date death died during each
english family father find for former french german had has have he her his how i it its know known
large last list made main many member more most mother much my name new no not number often old only
other our over part people place second she since small so some such text than their them then there
these they this those three time title to two under until us use war we were what where while who whose
why will work world would years you your\n"""


def vocabulary() -> list[str]:
    """All words the policy knows, lower-cased, in a fixed order: special tokens, name parts, other words."""
    names = [word.lower() for words in NAME_CLASSES for word in words]
    texts = [_COMMON]
    for seed in range(3):
        documents, questions = generate(seed, 200, 0, 0, three_hop=0.2)
        texts += [f"{document.title}\n{document.text}" for document in documents]
        texts += [question.text for question in questions]
    others = {word for text in texts for word in re.findall(_TOKEN, text.lower())} - set(names)
    return [*SPECIAL, *names, *sorted(others)]


def build_tokenizer(words: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """The word tokenizer of a vocabulary, by default `vocabulary`, with its chat template.

    Every message is its role's token, its words and ``<|end|>``, so that a prompt's tokens are a prefix of the
    conversation's. Case is dropped, a line's end is a token, and decoding a completion and encoding it again gives the
    same ids.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    known = {word: i for i, word in enumerate(words or vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<|unk|>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), behavior="removed", invert=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL[3:]),
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=_MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = _TEMPLATE
    return fast


def build_model(n_words: int, seed: int) -> Qwen3ForCausalLM:
    """A fresh model of about a million parameters; heads that are too narrow copy names only dimly.

    Embedding and head are apart (vLLM can then reload weights in place) but start equal.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=n_words,
        hidden_size=_WIDTH,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=_HEAD,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<|pad|>"),
        eos_token_id=SPECIAL.index("<|end|>"),
        bos_token_id=None,
        initializer_range=_SCALE,
        rope_parameters={"rope_type": "default", "rope_theta": _BASE},
    )
    model = Qwen3ForCausalLM(config)
    _give_copying(model, seed)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        suppress_tokens=[i for i, word in enumerate(SPECIAL) if word != "<|end|>"],
    )
    return model


_CARRIED = 32
"""Dimensions for the word before."""
_FAST = (0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.2, 0.2)
"""Weights of the fastest rotations in the carrying head: their sum peaks at a distance of one word."""
_SHARPNESS = 2.0
_COPY, _FAINT = 3.0, 2.0


@torch.no_grad()
def _give_copying(model: Qwen3ForCausalLM, seed: int) -> None:
    """Write a copying pair of heads into the first and the last layer of a fresh model.

    To write an unseen name a model must look up what followed its first word in the prompt. Two heads do that together:
    one carries each word on to its successor, another one looks for the place whose predecessor is the present word and
    copies what stands there (an induction head, arXiv 2209.11895). A model of a million parameters finds the pair only
    after many millions of tokens, and whether it does so depends on luck. Two more heads of the last layer start as
    faint copiers of whatever they attend to. All else starts by adding nothing.

    The residual stream is laid out for it: dimension 0 is the same for every word, the last ones are empty but for what
    the carrying head writes, and those in between hold the word.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    words = model.model.embed_tokens.weight
    words[:, 0] = 3 * _SCALE
    words[:, _WIDTH - _CARRIED :] = 0
    model.lm_head.weight.copy_(words)
    basis = _basis(generator)
    _carry(model.model.layers[0].self_attn, basis)
    _copy(model.model.layers[-1].self_attn, basis, _basis(generator))


def _basis(generator: torch.Generator) -> torch.Tensor:
    """(n, width) orthonormal rows that span the dimensions of the word."""
    span = _WIDTH - _CARRIED - 1
    made = torch.zeros(span, _WIDTH)
    made[:, 1 : 1 + span], _ = torch.linalg.qr(torch.randn(span, span, generator=generator))
    return made


def _carry(attention: Qwen3Attention, basis: torch.Tensor) -> None:
    """Head 0 attends one word back and writes what it finds there to the empty dimensions."""
    n, half = len(_FAST), _HEAD // 2
    rotations = torch.pow(_BASE, -torch.arange(half) / half)
    strength = torch.zeros(half)
    strength[:n] = torch.tensor(_FAST)
    attention.q_proj.weight[:_HEAD] *= 0.1
    attention.k_proj.weight[:_HEAD] *= 0.1
    attention.k_proj.weight[:_HEAD, 0] = torch.cat([strength, torch.zeros(half)])
    attention.q_proj.weight[:_HEAD, 0] = torch.cat([strength * rotations.cos(), -strength * rotations.sin()])
    fast = [*range(n), *range(half, half + n)]
    attention.q_norm.weight[fast] = _SHARPNESS
    attention.k_norm.weight[fast] = _SHARPNESS
    attention.v_proj.weight[:_CARRIED] = basis[:_CARRIED]
    attention.o_proj.weight[-_CARRIED:, :_CARRIED] = _SCALE * torch.eye(_CARRIED)


def _copy(attention: Qwen3Attention, basis: torch.Tensor, copied: torch.Tensor) -> None:
    """Head 0 looks for the place whose predecessor is the present word; heads 0, 1 and 2 copy what they attend to.

    The comparison stands in the slowest rotations, which turn little over a prompt and so compare words, not places.
    """
    half, quarter = _HEAD // 2, _CARRIED // 2
    slow = [*range(half - quarter, half), *range(_HEAD - quarter, _HEAD)]
    attention.q_proj.weight[:_HEAD] *= 0.1
    attention.k_proj.weight[:_HEAD] = 0
    attention.q_proj.weight[slow] = basis[:_CARRIED]
    attention.k_proj.weight[slow, -_CARRIED:] = torch.eye(_CARRIED)
    attention.q_norm.weight[slow] = _SHARPNESS
    attention.k_norm.weight[slow] = _SHARPNESS
    for head, rows in enumerate((copied[:_HEAD], copied[:_HEAD], copied[-_HEAD:])):
        here = slice(head * _HEAD, (head + 1) * _HEAD)
        attention.v_proj.weight[here] = rows
        attention.o_proj.weight[:, here] = (_FAINT if head else _COPY) * _SCALE * rows.T
