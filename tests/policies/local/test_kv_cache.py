import torch

from leret.policies.local.kv_cache import PrefixCache


def test_prefixes_are_stored_from_the_second_use_and_evicted():
    cache, layers = PrefixCache(1100), {n: [(torch.zeros(1, 2, n, 4),) * 2] for n in (8, 80)}
    assert [cache.wanted((1, 2), 1) for _ in range(2)] == [False, True]
    for prefix in ((1,), (2,)):
        cache.put(prefix, layers[8])  # 2 * 64 floats = 512 bytes
    assert cache.get((1,)) is not None
    cache.put((3,), layers[8])  # does not fit: (2,) was used longest ago
    cache.put((9,), layers[80])  # wider than all the room
    assert [cache.get((prefix,)) is not None for prefix in (1, 2, 3, 9)] == [True, False, True, False]
