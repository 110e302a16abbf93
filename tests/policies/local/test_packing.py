import copy
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from leret.policies.local.packing import MODEL_TYPES, collate, share_prompts
from tests.tiny import tiny_policy


def sequences():
    draw = random.Random(0)
    prompts = [[draw.randrange(6, 200) for _ in range(n)] for n in (5, 35, 3, 39, 7, 30)]
    found = [(p, [draw.randrange(6, 200) for _ in range(draw.randint(1, 8))]) for p in (*prompts, *prompts)]
    return [*found, found[0]]


def model_of(arch, tmp_path, attention="sdpa"):
    if "qwen" not in arch:
        return AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path / arch, arch), attn_implementation=attention)
    torch.manual_seed(0)
    shape = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = Qwen2Config(**shape, **heads) if arch == "qwen2" else Qwen3Config(**shape, **heads, head_dim=32)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


KINDS = [("llama", "sdpa"), ("opt", "eager"), ("opt", "sdpa"), ("qwen2", "sdpa"), ("qwen3", "sdpa")]


def test_every_model_type_that_shares_prompts_is_compared():
    assert {arch for arch, _ in KINDS} == MODEL_TYPES


@pytest.mark.parametrize(("arch", "attention"), KINDS)
def test_packed_batches_have_the_logits_and_gradients_of_padded_ones(tmp_path, arch, attention):
    plain = model_of(arch, tmp_path, attention)
    sharing = copy.deepcopy(plain)
    assert share_prompts(sharing)
    results = []
    for model, packed in ((plain, False), (sharing, True)):
        batch = collate(sequences(), 0, packed=packed)
        mask = batch.pop("completion_mask")[:, 1:].bool()  # the positions that predict a completion's token
        logits = model(**batch, use_cache=False).logits[:, :-1][mask]
        logits.square().mean().backward()
        results.append((logits.detach(), [p.grad for p in model.parameters()]))
    (expected, gradients), (found, ours) = results
    assert torch.allclose(found, expected, atol=2e-5)
    for one, other in zip(gradients, ours, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()) + 2e-6)
