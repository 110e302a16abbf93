from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from leret.policies.local.kv_cache import PrefixCache, buffered_cache, gather_rows, layers_of, place

ROW = torch.tensor([0])


def tensors(n_rows: int, n_slots: int, first: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    keys = first + torch.arange(n_rows * n_slots, dtype=torch.float32).reshape(n_rows, 1, n_slots, 1)
    return [(keys, -keys)]


def test_prefixes_are_kept_from_the_second_sight_on_and_forgotten_when_room_is_short() -> None:
    cache, layers = PrefixCache(1100), tensors(1, 64, 0.0)  # 2 * 64 floats = 512 bytes
    assert [cache.wanted((1, 2), 1) for _ in range(2)] == [False, True]
    cache.put((1,), layers)
    cache.put((2,), layers)
    assert cache.get((1,)) is not None
    cache.put((3,), layers)  # does not fit: (2,) was used longest ago
    cache.put((9,), tensors(1, 640, 0.0))  # wider than all the room
    assert [cache.get((prefix,)) is not None for prefix in (1, 2, 3, 9)] == [True, False, True, False]


def test_buffers_that_grow_in_place_give_the_logits_of_one_pass(llama_dir) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_dir).eval()
    ids = torch.tensor([[3, 40, 41, 4, 50, 51, 52]])
    with torch.no_grad():
        expected = model(ids).logits
        cache = buffered_cache()
        found = [model(ids[:, :4], past_key_values=cache).logits]
        prompt = place([(layers_of(cache), ROW, ROW)], 1, 4, 6)
        rest = buffered_cache(prompt, 4)
        found += [model(ids[:, i : i + 1], past_key_values=rest).logits for i in range(4, 7)]  # the last outgrows them
    assert prompt[0][0].shape[2] == 6
    assert torch.allclose(torch.cat(found, dim=1), expected, atol=1e-5)
    assert rest.get_seq_length() == 7


def test_parts_are_aligned_at_the_last_prompt_token() -> None:
    one, two = tensors(1, 2, 1.0), tensors(2, 3, 10.0)
    parts = [(one, torch.tensor([0, 0]), torch.tensor([0, 2])), (two, torch.tensor([1]), torch.tensor([1]))]
    [(keys, values)] = place(parts, n_rows=3, end=3, capacity=4)
    assert keys[:, 0, :, 0].tolist() == [[0, 1, 2, 0], [13, 14, 15, 0], [0, 1, 2, 0]]
    assert torch.equal(values, -keys)
    assert torch.equal(gather_rows([(keys, values)], torch.tensor([1]))[0][0], keys[1:2])
