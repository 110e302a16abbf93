"""A small encoder from nothing, as a sentence-transformers model: whole words, one layer of attention, the mean."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from leret.config.policy import EncoderSettings

_POSITIONS = 256
"""Tokens of a text at most."""
_SPECIALS = ("[PAD]", "[UNK]", "[SEP]")
_HEAD = 32
"""Dimensions of a head of attention."""


def scratch_encoder(texts: Iterable[str], settings: EncoderSettings, seed: int) -> Any:
    """A sentence-transformers model with random weights for the words of some texts, in lower case.

    A word that stands only once in them is unknown, and so are those beyond the ``vocab_size`` commonest.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
    from transformers import DistilBertConfig, DistilBertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer(texts, settings.vocab_size)
    size = settings.hidden_size
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=size, n_layers=settings.num_hidden_layers, n_heads=max(1, size // _HEAD),
        hidden_dim=2 * size, dropout=0.0, attention_dropout=0.0, max_position_embeddings=_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        DistilBertModel(config).save_pretrained(folder)  # the library makes its modules of directories alone
        tokenizer.save_pretrained(folder)
        parts = [Transformer(folder), Pooling(size, "mean"), Dense(size, size, activation_function=nn.Identity())]
        return SentenceTransformer(modules=parts, device="cpu")


def _tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+"), behavior="removed", invert=True)
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=list(_SPECIALS), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    # Also a text without words is a token long.
    backend.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=_POSITIONS,
    )
