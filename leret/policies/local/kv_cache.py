"""Key-value caches: buffers that are filled in place, and a cache of prompt prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

KeyValues = list[tuple[Tensor, Tensor]]
"""One (keys, values) pair per layer, each (n_rows, n_heads, n_slots, head_dim)."""


class BufferLayer(DynamicLayer):
    """A cache layer with preallocated buffers for keys and values.

    The layer in transformers copies its tensors at each token, which takes longer than a small
    model's forward pass.
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self, keys: Tensor | None = None, values: Tensor | None = None, length: int = 0
    ) -> None:
        super().__init__()
        self.length = length
        if keys is not None and values is not None:
            self.dtype = keys.dtype
            self.device = keys.device
            self.keys = keys
            self.values = values
            self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states
            self.values = value_states
            self.length = key_states.shape[-2]
            return key_states, value_states
        start = self.length
        end = start + key_states.shape[-2]
        if end <= self.keys.shape[-2]:
            self.keys[:, :, start:end] = key_states
            self.values[:, :, start:end] = value_states
        else:
            self.keys = torch.cat([self.keys[:, :, :start], key_states], dim=-2)
            self.values = torch.cat([self.values[:, :, :start], value_states], dim=-2)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length


def buffered_cache(layers: KeyValues | None = None, length: int = 0) -> Cache:
    """Return a cache for the model: empty, or over buffers with ``length`` slots in use."""
    if layers is None:
        return Cache(layer_class_to_replicate=BufferLayer)
    return Cache(layers=[BufferLayer(keys, values, length) for keys, values in layers])


def layers_of(cache: Cache) -> KeyValues:
    """Return the key and value buffers of a cache."""
    return [(layer.keys, layer.values) for layer in cache.layers if isinstance(layer, BufferLayer)]


class PrefixCache:
    """LRU cache of the keys and values of prompt prefixes.

    Prefixes are stored when they occur for the second time, so that a prefix of a single prompt
    takes no memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = 0
        self._entries: OrderedDict[tuple[int, ...], tuple[KeyValues, int]] = OrderedDict()
        self._sightings: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def wanted(self, prefix: tuple[int, ...], n_sightings: int) -> bool:
        """Count ``n_sightings`` more prompts with this prefix.

        Return True once it is stored or was seen twice.
        """
        if prefix in self._entries:
            return True
        seen = self._sightings.pop(prefix, 0) + n_sightings
        self._sightings[prefix] = seen
        while len(self._sightings) > 1024:
            self._sightings.popitem(last=False)
        return seen > 1

    def get(self, prefix: tuple[int, ...]) -> KeyValues | None:
        """Return the keys and values of a prefix, as tensors with ``n_rows`` = 1.

        None if the prefix is not stored.
        """
        if prefix not in self._entries:
            return None
        self._entries.move_to_end(prefix)
        self.hits += 1
        layers, _ = self._entries[prefix]
        return layers

    def put(self, prefix: tuple[int, ...], layers: KeyValues) -> None:
        """Store a prefix that fits in ``max_bytes``.

        Evict the least recently used prefixes beyond that limit.
        """
        n_bytes = 0
        for keys, values in layers:
            n_bytes += keys.nbytes + values.nbytes
        if n_bytes > self.max_bytes:
            return
        self._entries[prefix] = (layers, n_bytes)
        self._sightings.pop(prefix, None)
        while sum(size for _, size in self._entries.values()) > self.max_bytes:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()
        self._sightings.clear()


def gather_rows(layers: KeyValues, rows: Tensor) -> KeyValues:
    """Return copies of the given rows of the buffers."""
    return [(keys.index_select(0, rows), values.index_select(0, rows)) for keys, values in layers]


def align_rows(
    parts: Sequence[tuple[KeyValues, Tensor, Tensor]], n_rows: int, end: int, capacity: int
) -> KeyValues:
    """Copy prefilled parts into common buffers, aligned at their last prompt token.

    A part is (keys and values, rows to copy (n,), rows of the buffers to fill (n,)). ``end`` is the
    slot after the last prompt token; ``capacity`` is the number of slots.
    """
    aligned: KeyValues = []
    for layer, pair in enumerate(parts[0][0]):
        buffers = []
        for side, example in enumerate(pair):
            # Zeros, not empty: masked slots are multiplied by 0, which does not remove NaN.
            buffer = example.new_zeros((n_rows, example.shape[1], capacity, example.shape[3]))
            for layers, source, target in parts:
                tensor = layers[layer][side]
                buffer[target, :, end - tensor.shape[2] : end] = tensor[source]
            buffers.append(buffer)
        aligned.append((buffers[0], buffers[1]))
    return aligned
