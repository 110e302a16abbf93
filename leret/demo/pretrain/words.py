"""The word tokenizer and the tiny model of the demo's policy.

A token is a word: the closed lexicon of the world, the words of its documents and questions, years and signs. Pieces of
words were tried first and were memorised instead of copied; with whole words a name is two or three tokens, and an
unseen name is an unseen pair of seen tokens. Any other word becomes ``<|unk|>``, which the policy never writes: on text
of another kind it can only copy what it knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from leret.datasets.world import cast as lexicon
from leret.datasets.world.generate import generate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


SPECIAL = ("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
NAME_CLASSES: tuple[tuple[str, ...], ...] = (
    lexicon.FIRST_NAMES,
    lexicon.LAST_NAMES,
    lexicon.ADJECTIVES,
    lexicon.NOUNS,
    lexicon.FIRMS,
    lexicon.TRADES,
    lexicon.CITIES,
    lexicon.AWARDS,
    lexicon.INSTRUMENTS,
    tuple(str(year) for year in range(1930, 2000)),
)
"""Words that may stand for one another: within a class, which word it is tells nothing."""

_TOKEN = r"\n|\w+|[^\w\s]"
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_MAX_POSITIONS = 1024
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
    texts: list[str] = [_COMMON]
    for seed in range(3):
        documents, questions = generate(seed, 200, 0, 0, three_hop=0.2)
        texts += [f"{document.title}\n{document.text}" for document in documents]
        texts += [question.text for question in questions]
    others = sorted(set(_words(texts)) - set(names))
    return [*SPECIAL, *names, *others]


def _words(texts: Iterable[str]) -> Iterable[str]:
    return (word for text in texts for word in re.findall(_TOKEN, text.lower()))


def build_tokenizer(words: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """The word tokenizer with its chat template.

    Every message is its role's token, its words and ``<|end|>``, so that a prompt's tokens are a prefix of the
    conversation's. Case is dropped, a line's end is a token, and decoding a completion and encoding it again gives the
    same ids.

    Args:
        words: the vocabulary, special tokens first; None for :func:`vocabulary`.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = list(words) if words is not None else vocabulary()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<|unk|>"))
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


def build_model(
    n_words: int, seed: int, width: int = 128, layers: int = 4, heads: int = 4, head_dim: int = 64, inner: int = 256
) -> Qwen3ForCausalLM:
    """A fresh model of about a million parameters.

    Embedding and head are apart (vLLM can then reload weights in place) but start equal, and two of its heads copy from
    the start (:mod:`leret.demo.pretrain.circuit`).

    Args:
        n_words: size of the vocabulary.
        seed: of the weights.
        width: of the residual stream.
        layers: decoder layers.
        heads: attention heads, three at least.
        head_dim: of a head: one that is too narrow copies names only dimly.
        inner: of the feed-forward layers.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from leret.demo.pretrain.circuit import give_copying

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=n_words,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<|pad|>"),
        eos_token_id=SPECIAL.index("<|end|>"),
        bos_token_id=None,
        initializer_range=width**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = Qwen3ForCausalLM(config)
    give_copying(model, seed)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        suppress_tokens=[i for i, word in enumerate(SPECIAL) if word != "<|end|>"],
    )
    return model
