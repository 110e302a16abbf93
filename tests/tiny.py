"""A real, random causal LM of 0.2M parameters for tests: safetensors, word-level tokenizer, chat template."""

SPECIALS = ("<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

WORDS = tuple(
    """
    \n . , : ; ? ! | - ' " ( ) question passages query title answer search context
    the of and to in a is that it was for on are as with his they at be this have from or one had by word but not what
    all were we when your can said there use an each which she do how their if will up other about out many then them
    these so some her would make like him into time has look two more write go see number no way could people my than
    first been call who its now find long down day did get come made may part film book song city river country band
    director author singer writer actor born died year where lived company founded capital mother father wife husband
    played wrote directed located name known also became won prize school university team town north south east west
    new york london paris alice bob carol david emma frank grace henry smith jones brown taylor wilson king queen red
    green blue white black old young little great house garden bridge road mountain island sea star moon sun night
    0 1 2 3 4 5 6 7 8 9 1990 2000
    """.strip(" ")
    .replace("\n", " ")
    .split(" ")
)

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_policy(directory, arch="llama", seed=0):
    """Write ``llama`` (rotary, untied), ``opt`` (norm after the block) or ``gpt2`` (tied, no chat template)."""
    import torch

    tokenizer = _tokenizer()
    if arch == "gpt2":
        tokenizer.chat_template = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(arch, tokenizer)
    for part in (model, tokenizer):
        part.save_pretrained(directory)
    return directory


def _tokenizer():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["\n", *dict.fromkeys(word for word in WORDS if word.strip())]
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\w+|[^\w\s]"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=TEMPLATE,
    )


def _model(arch, tokenizer):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    pad, end = SPECIALS.index("<|pad|>"), SPECIALS.index("<|end|>")
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": pad, "bos_token_id": None, "eos_token_id": end}
    if arch == "llama":
        own = {"intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 2, "initializer_range": 0.2}
        model = LlamaForCausalLM(LlamaConfig(**size, **ids, **own, tie_word_embeddings=False))
    elif arch == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **ids, initializer_range=0.2))
    else:
        own = {"ffn_dim": 128, "word_embed_proj_dim": 64, "do_layer_norm_before": False, "init_std": 0.2}
        model = OPTForCausalLM(OPTConfig(**size, **ids, **own, tie_word_embeddings=False))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = pad, [end]
    model.generation_config.suppress_tokens = [i for i in range(len(SPECIALS)) if i != end]
    return model
