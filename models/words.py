"""Word tokenizer and tiny model of the demo's policy, with a pair of copying heads written into the model.

A token is a word of the generated world, a year or a sign. With word pieces the model memorised names instead of
copying them. With whole words a name is two or three tokens, and an unseen name is a new combination of known tokens.
Any other word becomes ``<|unk|>``, which the policy never writes.
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
"""Classes of interchangeable words."""

_TOKEN = r"\n|\w+|[^\w\s]"
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_MAX_POSITIONS = 1024
_WIDTH, HEAD, BASE = 128, 64, 1e6
_SCALE = _WIDTH**-0.5
_COMMON = """question: context: query: | 0 1 2 3 4 5 6 7 8 9 ! " ' ( ) , - . / : ; ? & a about after all also
american among an and are as before between both british but can country date death died during each
english family father find for former french german had has have he her his how i it its know known
large last list made main many member more most mother much my name new no not number often old only
other our over part people place second she since small so some such text than their them then there
these they this those three time title to two under until us use war we were what where while who whose
why will work world would years you your\n"""


def vocabulary() -> list[str]:
    """Return the policy's words, lower-case and in a fixed order: special tokens, name parts, other words."""
    names = [word.lower() for words in NAME_CLASSES for word in words]
    texts = [_COMMON]
    for seed in range(3):
        documents, questions = generate(seed, 200, 0, 0, three_hop=0.2)
        texts += [f"{document.title}\n{document.text}" for document in documents]
        texts += [question.text for question in questions]
    others = {word for text in texts for word in re.findall(_TOKEN, text.lower())} - set(names)
    return [*SPECIAL, *names, *sorted(others)]


def build_tokenizer(words: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """Build the word tokenizer with its chat template; ``words`` defaults to `vocabulary`.

    A message is a token for its role, its words, and ``<|end|>``, so a prompt's tokens are a prefix of the whole
    conversation's. Text is lower-cased, a line break is a token, and a decoded completion encodes to the same ids.
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
    """Build an untrained model of about a million parameters. Narrower attention heads copy names poorly.

    Embedding and output head start equal but are not tied, so that vLLM can reload weights in place.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=n_words,
        hidden_size=_WIDTH,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=HEAD,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<|pad|>"),
        eos_token_id=SPECIAL.index("<|end|>"),
        bos_token_id=None,
        initializer_range=_SCALE,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    model = Qwen3ForCausalLM(config)
    _write_copying_heads(model, seed)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        suppress_tokens=[i for i, word in enumerate(SPECIAL) if word != "<|end|>"],
    )
    return model


CARRIED = 32
"""Number of dimensions that hold the previous word."""
_FAST = (0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.2, 0.2)
"""Weights of the fastest rotations in the carrying head. Their sum peaks at a distance of one word."""
SHARPNESS = 2.0
_COPY, _FAINT = 3.0, 2.0


@torch.no_grad()
def _write_copying_heads(model: Qwen3ForCausalLM, seed: int) -> None:
    """Write a copying pair of heads into the first and the last layer of an untrained model.

    To write an unseen name, a model must find the name's first word in the prompt and copy the next word. Two heads do
    this. One carries each word to the next position. The other attends to the position after the current word and
    copies its word (an induction head, arXiv 2209.11895). Training alone needs many millions of tokens to find such a
    pair, and does not always find one. Two more heads of the last layer start as weak copiers of any word that they
    attend to. All other heads and MLPs start with zero output.

    In the residual stream, dimension 0 is the same for all words. The last dimensions hold only the carrying head's
    output, and the dimensions in between hold the word.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    words = model.model.embed_tokens.weight
    words[:, 0] = 3 * _SCALE
    words[:, _WIDTH - CARRIED :] = 0
    model.lm_head.weight.copy_(words)
    basis = _basis(generator)
    carry(model.model.layers[0].self_attn, basis)
    _copy(model.model.layers[-1].self_attn, basis, _basis(generator))


def _basis(generator: torch.Generator) -> torch.Tensor:
    """Return orthonormal rows (n, width) that span the dimensions of the word."""
    span = _WIDTH - CARRIED - 1
    basis = torch.zeros(span, _WIDTH)
    basis[:, 1 : 1 + span], _ = torch.linalg.qr(torch.randn(span, span, generator=generator))
    return basis


def carry(attention: Qwen3Attention, basis: torch.Tensor, back: int = 1) -> None:
    """Make head ``back - 1`` attend ``back`` words back and write that word to empty dimensions at the end."""
    n, half, width = len(_FAST), HEAD // 2, basis.shape[1]
    rotations = torch.pow(BASE, -torch.arange(half) / half)
    strength = torch.zeros(half)
    strength[:n] = torch.tensor(_FAST)
    head = slice((back - 1) * HEAD, back * HEAD)
    attention.q_proj.weight[head] *= 0.1
    attention.k_proj.weight[head] *= 0.1
    attention.k_proj.weight[head, 0] = torch.cat([strength, torch.zeros(half)])
    turn = rotations * back
    attention.q_proj.weight[head, 0] = torch.cat([strength * turn.cos(), -strength * turn.sin()])
    fast = [*range(n), *range(half, half + n)]
    attention.q_norm.weight[fast] = SHARPNESS
    attention.k_norm.weight[fast] = SHARPNESS
    values = slice(head.start, head.start + CARRIED)
    attention.v_proj.weight[values] = basis[:CARRIED]
    end = width - CARRIED * (back - 1)
    attention.o_proj.weight[end - CARRIED : end, values] = width**-0.5 * torch.eye(CARRIED)


def _copy(attention: Qwen3Attention, basis: torch.Tensor, copied: torch.Tensor) -> None:
    """Make head 0 attend to positions after the current word, and make heads 0, 1 and 2 copy.

    Words are compared in the slowest rotations, which hardly depend on the position in a prompt.
    """
    half, quarter = HEAD // 2, CARRIED // 2
    slow = [*range(half - quarter, half), *range(HEAD - quarter, HEAD)]
    attention.q_proj.weight[:HEAD] *= 0.1
    attention.k_proj.weight[:HEAD] = 0
    attention.q_proj.weight[slow] = basis[:CARRIED]
    attention.k_proj.weight[slow, -CARRIED:] = torch.eye(CARRIED)
    attention.q_norm.weight[slow] = SHARPNESS
    attention.k_norm.weight[slow] = SHARPNESS
    for head, rows in enumerate((copied[:HEAD], copied[:HEAD], copied[-HEAD:])):
        dimensions = slice(head * HEAD, (head + 1) * HEAD)
        attention.v_proj.weight[dimensions] = rows
        attention.o_proj.weight[:, dimensions] = (_FAINT if head else _COPY) * _SCALE * rows.T
