"""Keys and values in stable memory of their own: fixed addresses, one size, nothing of it ever kept.

A captured graph reads and writes fixed addresses, so the cache cannot grow with a request. It has a place for every
token of the longest one, and which of them exist is said by a mask that the graph computes from one number. The
memory is unmapped for sleep and zero after it: nothing of a request is in an image.

The cache takes part in a model's forward pass by one call, `update`. Models are given a ready mask of four dimensions
and their positions, which Transformers 5 passes through as they are; so neither its own static cache nor its masks,
which change from release to release, are relied on.

Layout: for each layer its keys, then its values, `[1, heads, length, width]` each, at multiples of 4096.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import Cache, DynamicCache

from coldsnap.core.extents import padded
from coldsnap.engines.transformers.arena import bytes_at
from coldsnap.errors import UserError
from coldsnap.hydrate.memory import StableMemory

__all__ = ["UNSUITABLE_CURE", "LayerShape", "StaticCache", "layer_shapes"]

UNSUITABLE_CURE = "write 'kv_cache_tokens: 0' and 'cuda_graph: false' below 'serve'"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One layer's keys or values: heads, width of a head, number type."""

    heads: int
    width: int
    dtype: torch.dtype


def layer_shapes(cache: Any) -> tuple[tuple[LayerShape, LayerShape], ...]:
    """Keys and values of each layer, from a cache that a model filled itself.

    Raises UserError for a model that keeps anything else, such as a window or a recurrent state.
    """
    if not isinstance(cache, DynamicCache):
        raise UserError(
            f"this model keeps a {type(cache).__name__}, not keys and values that a static cache can hold",
            cure=UNSUITABLE_CURE,
        )
    for number, layer in enumerate(cache.layers):
        if type(layer).__name__ != "DynamicLayer":
            raise UserError(
                f"layer {number} of this model keeps a {type(layer).__name__}, which a static cache cannot hold",
                cure=UNSUITABLE_CURE,
            )
    return tuple((_shape(layer.keys), _shape(layer.values)) for layer in cache.layers)


class StaticCache(Cache):  # type: ignore[misc] # Transformers is not type-checked here
    """A Transformers cache over memory that this object reserves, and may unmap and remap.

    `slots` says where the tokens of the next forward pass go: their places as a tensor.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[LayerShape, LayerShape]],
        *,
        length: int,
        memory: StableMemory,
        device: torch.device,
    ) -> None:
        """Raises ResourceBusy, OutOfSpace and HostError as `StableMemory.reserve` does."""
        super().__init__(layers=[])
        self.length = length
        self.slots = torch.zeros(1, dtype=torch.int64, device=device)
        self._memory = memory
        sizes = [padded(prod(_full(one, length)) * one.dtype.itemsize) for layer in shapes for one in layer]
        ptr = memory.reserve(sum(sizes), tag="kv").ptr
        self._everything = bytes_at(memory, ptr, sum(sizes))
        tensors: list[torch.Tensor] = []
        for one, size in zip((one for layer in shapes for one in layer), sizes, strict=True):
            used = prod(_full(one, length)) * one.dtype.itemsize
            tensors.append(bytes_at(memory, ptr, used).view(one.dtype).reshape(_full(one, length)))
            ptr += size
        self._pairs = list(zip(tensors[::2], tensors[1::2], strict=True))

    @property
    def bytes(self) -> int:
        """What it takes while mapped."""
        return sum(one.size for one in self._memory.allocations)

    def clear(self) -> None:
        """Forget every token."""
        self._everything.zero_()

    def unmap(self) -> None:
        """Give the memory back and keep its addresses."""
        self._memory.unmap()

    def remap(self) -> None:
        """Have the memory again, all zero. Raises as `StableMemory.remap` does."""
        self._memory.remap()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the new keys and values into their slots; all of the layer's come back."""
        keys, values = self._pairs[layer_idx]
        keys.index_copy_(2, self.slots, key_states)
        values.index_copy_(2, self.slots, value_states)
        return keys, values

    def get_seq_length(self, *args: object, **kwargs: object) -> int:
        """A fixed number: whoever calls the model says the positions."""
        return 0

    def get_mask_sizes(self, *args: object, **kwargs: object) -> tuple[int, int]:
        """All slots, from the first."""
        return self.length, 0


def _shape(tensor: torch.Tensor) -> LayerShape:
    _, heads, _, width = tensor.shape
    return LayerShape(heads=heads, width=width, dtype=tensor.dtype)


def _full(one: LayerShape, length: int) -> tuple[int, int, int, int]:
    return (1, one.heads, length, one.width)
