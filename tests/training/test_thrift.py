import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from leret.training.algorithms.losses import PairCollator
from leret.training.thrift import SHARED, compact_heads, make_thrifty, row_groups
from tests.tiny import tiny_policy


def rows(seed=0, n=6):
    """Pairs of long and of short prompts, with completions of different lengths."""
    draw = torch.Generator().manual_seed(seed)

    def ids(low, high):
        return torch.randint(6, 200, (int(torch.randint(low, high, (1,), generator=draw)),), generator=draw).tolist()

    prompts = [ids(30, 40) if i % 2 else ids(3, 8) for i in range(n)]
    return [{"prompt_tokens": p, "chosen_tokens": ids(1, 9), "rejected_tokens": ids(1, 9)} for p in prompts]


def model_of(arch, tmp_path, attention):
    if arch == "qwen3":
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=128, attn_implementation=attention,
        )  # fmt: skip
        return Qwen3ForCausalLM(config)
    return AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path / arch, arch), attn_implementation=attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("arch", ["llama", "opt", "qwen3"])
@pytest.mark.parametrize("shared", [True, False])
def test_hidden_states_and_gradients_are_those_of_the_plain_forward(tmp_path, arch, attention, shared):
    plain = model_of(arch, tmp_path, attention)
    thrifty = copy.deepcopy(plain)
    assert make_thrifty(thrifty)
    batch = PairCollator(0, sequence=False, shared=shared)(rows())
    mask = batch.pop("completion_mask").roll(-1, dims=1).bool()  # the positions that predict a completion
    weight = torch.randn(64, generator=torch.Generator().manual_seed(1))
    results = []
    for model, keys in ((plain, {n: v for n, v in batch.items() if n != SHARED}), (thrifty, batch)):
        hidden = model.base_model(**keys, use_cache=False).last_hidden_state[mask]
        (hidden @ weight).square().mean().backward()
        results.append((hidden.detach(), [p.grad for p in model.base_model.parameters()]))
    (expected, gradients), (found, ours) = results
    assert torch.allclose(found, expected, atol=2e-5)
    for one, other in zip(gradients, ours, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()) + 2e-6)


def test_a_model_of_another_kind_is_left_alone():
    from transformers import BertConfig, BertLMHeadModel

    model = BertLMHeadModel(BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    assert not make_thrifty(model)
    assert "forward" not in vars(model.base_model)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5], [[0]]),
        ([9, 9, 8], [[0, 1, 2]]),  # 27 padded, 26 in parts of 18 and 8: less than a tenth
        ([9, 2, 9, 2], [[0, 2], [1, 3]]),  # 36 padded, 18 + 4
        ([100, 10, 50, 10], [[0], [2], [1, 3]]),
    ],
)
def test_rows_are_parted_where_that_saves_a_tenth(lengths, expected):
    assert row_groups(lengths) == expected


def test_compact_heads_are_put_back():
    from trl.trainer import utils

    before = utils._use_triton
    with compact_heads():
        assert utils._use_triton(torch.device("cpu"))
    assert utils._use_triton is before
