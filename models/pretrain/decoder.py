"""Turn MiniLM's encoder into a causal decoder, and build its tokenizer.

OPT with layer norms after the blocks equals BERT except for the causal mask, so the layers are copied. The embeddings
are approximate: BERT normalises the sum of word and position embeddings and OPT does not, so the mean effect of the
norm is folded into both embedding tables. The output head is tied to the word embeddings, as TRL's DPO requires.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from leret.core.bundled import minilm_directory

if TYPE_CHECKING:
    import torch
    from transformers import OPTForCausalLM, PreTrainedTokenizerFast


_USER, ASSISTANT, _SYSTEM, _END, LINE = "[unused1]", "[unused2]", "[unused3]", "[SEP]", "¶"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[MASK]", _USER, ASSISTANT, _SYSTEM)
_TEMPLATE = (
    "{{ '[CLS]' }}{% for message in messages %}"
    "{{ {'user': '[unused1]', 'assistant': '[unused2]', 'system': '[unused3]'}[message['role']] }}"
    "{{ message['content'] + '[SEP]' }}{% endfor %}{% if add_generation_prompt %}{{ '[unused2]' }}{% endif %}"
)
POSITIONS = 512  # maximum tokens of a prompt with its completion


def build_tokenizer(vocabulary: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """Build MiniLM's word-piece tokenizer with a chat template; ``vocabulary``, if given, replaces its word pieces.

    A message is a token for its role, the word pieces of its text, and ``[SEP]``. The piece ``¶`` is a line break and
    never occurs in a query. Decoding separates pieces by spaces, so completions of whole words encode to the same ids.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    if vocabulary is not None:
        pieces.model = models.WordPiece({piece: i for i, piece in enumerate(vocabulary)}, unk_token="[UNK]")
    pieces.no_padding()
    pieces.no_truncation()
    pieces.normalizer = normalizers.Sequence(
        [normalizers.Replace("\n", f" {LINE} "), normalizers.BertNormalizer(lowercase=True)]
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
        additional_special_tokens=[_USER, ASSISTANT, _SYSTEM],
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def build_model() -> OPTForCausalLM:
    """Build a decoder from MiniLM's weights, to be pretrained."""
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
        max_position_embeddings=POSITIONS,
        do_layer_norm_before=False,
        activation_function="gelu",
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = OPTForCausalLM(config)
    with torch.no_grad():
        _move(load_file(minilm_directory() / "model.safetensors"), model)
        _set_logit_scale(model)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        suppress_tokens=sorted(tokenizer.convert_tokens_to_ids([*SPECIAL, LINE])),
    )
    return model


def around(tokenizer: PreTrainedTokenizerFast) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token ids before and after the text of a single user message."""
    start, user, assistant, end = tokenizer.convert_tokens_to_ids(["[CLS]", _USER, ASSISTANT, _END])
    return (start, user), (end, assistant)


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


def _move(bert: Mapping[str, torch.Tensor], model: OPTForCausalLM) -> None:
    """Copy BERT's layers, and its embeddings with the layer norm folded in."""
    decoder = model.model.decoder
    for i, layer in enumerate(decoder.layers):
        for theirs, ours in _PARTS.items():
            part = layer.get_submodule(ours)
            part.weight.copy_(bert[f"encoder.layer.{i}.{theirs}.weight"])
            part.bias.copy_(bert[f"encoder.layer.{i}.{theirs}.bias"])
    words = bert["embeddings.word_embeddings.weight"]
    positions = bert["embeddings.position_embeddings.weight"] + bert["embeddings.token_type_embeddings.weight"][0]
    gain, shift = bert["embeddings.LayerNorm.weight"], bert["embeddings.LayerNorm.bias"]
    words, positions = words - words.mean(1, keepdim=True), positions - positions.mean(1, keepdim=True)
    # Variance of the sum, ignoring covariance: the row's variance plus a typical row's variance in the other table.
    word_variance, position_variance = words.pow(2).mean(1, keepdim=True), positions.pow(2).mean(1, keepdim=True)
    word_scale = (word_variance + position_variance[1:].mean()).rsqrt()
    position_scale = (position_variance + word_variance.median()).rsqrt()
    decoder.embed_tokens.weight.copy_(gain * words * word_scale)
    decoder.embed_positions.weight[2:].copy_(gain * positions * position_scale + shift)
    decoder.embed_positions.weight[:2] = 0  # padding; random values would give every build a different digest


def _set_logit_scale(model: OPTForCausalLM) -> None:
    """Scale the last layer norm so that the logits of the untrained head have a standard deviation of 1."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, model.config.vocab_size, (4, 64), generator=generator)
    spread = model(input_ids=ids).logits.std()
    norm = model.model.decoder.layers[-1].final_layer_norm
    norm.weight.mul_(1.0 / spread)
    norm.bias.mul_(1.0 / spread)
