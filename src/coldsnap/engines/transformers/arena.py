"""One stable allocation that holds every parameter and buffer of the model.

Tensors of a page or more start at a multiple of 4096, so that they are read from disk straight into place;
smaller ones follow at multiples of 64. The order is an option because nothing may depend on it: two captures
with different orders and addresses give the same pack.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.extents import PAGE_BYTES, Allocation, padded
from coldsnap.hydrate.cuda import CudaMemory
from coldsnap.hydrate.memory import StableMemory, host_addressable

__all__ = ["PADDING", "Arena", "Place", "Tensors", "bytes_at", "collect_tensors", "place_tensors"]

PADDING = "padding between tensors"
_SMALL_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The model's tensors, each once, in the order of the model. `names` are all the names a tensor has.

    `saved` are those that a checkpoint is expected to hold: parameters and persistent buffers.
    """

    names: tuple[tuple[str, ...], ...]
    tensors: tuple[torch.Tensor, ...]
    saved: frozenset[int]

    def targets(self) -> dict[str, torch.Tensor]:
        """Every name of every saved tensor."""
        return {name: self.tensors[i] for i in sorted(self.saved) for name in self.names[i]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where tensor number `index` lies: `size` bytes at `ptr`."""

    index: int
    ptr: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Arena:
    """The allocation, the place of each non-empty tensor by its number, and the bytes between them."""

    allocation: Allocation
    places: Mapping[int, Place]
    gaps: tuple[tuple[int, int], ...]


def collect_tensors(model: torch.nn.Module) -> Tensors:
    """Every parameter and buffer of the model, tied ones once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    saved: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
        saved.add(id(parameter))
    for path, module in model.named_modules():
        for short, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            name = f"{path}.{short}" if path else short
            names.setdefault(id(buffer), []).append(name)
            tensors[id(buffer)] = buffer
            if short not in module._non_persistent_buffers_set:
                saved.add(id(buffer))
    numbers = {key: index for index, key in enumerate(tensors)}
    return Tensors(
        names=tuple(tuple(names[key]) for key in tensors),
        tensors=tuple(tensors.values()),
        saved=frozenset(numbers[key] for key in saved),
    )


def place_tensors(tensors: Tensors, memory: StableMemory, *, load_order: str, address: int | None) -> Arena:
    """Reserve the arena and give each tensor its place. Raises ResourceBusy when `address` is taken, OutOfSpace.

    The allocation's tag has a digest of what lies where, so that memory of another layout is never taken for this one.
    """
    order = _ordered([index for index, tensor in enumerate(tensors.tensors) if tensor.numel()], load_order)
    sizes = {index: tensors.tensors[index].numel() * tensors.tensors[index].element_size() for index in order}
    offsets: dict[int, int] = {}
    end = 0
    for small in (False, True):
        for index in order:
            if (sizes[index] < PAGE_BYTES) == small:
                alignment = _SMALL_ALIGNMENT if small else PAGE_BYTES
                offsets[index] = -(-end // alignment) * alignment
                end = offsets[index] + sizes[index]
    rows = [
        [offset, sizes[index], str(tensors.tensors[index].dtype), *tensors.names[index]]
        for index, offset in sorted(offsets.items(), key=lambda one: one[1])
    ]
    tag = f"weights-{canonical_sha256(rows).hex[:16]}"
    allocation = memory.reserve(padded(max(end, 1)), tag=tag, address=address)
    places = {i: Place(index=i, ptr=allocation.ptr + offset, size=sizes[i]) for i, offset in offsets.items()}
    gaps: list[tuple[int, int]] = []
    reach = allocation.ptr
    for place in sorted(places.values(), key=lambda one: one.ptr):
        if place.ptr > reach:
            gaps.append((reach, place.ptr - reach))
        reach = place.ptr + place.size
    if reach < allocation.ptr + allocation.size:
        gaps.append((reach, allocation.ptr + allocation.size - reach))
    return Arena(allocation=allocation, places=places, gaps=tuple(gaps))


def over_memory(memory: StableMemory, place: Place, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and type of `like` whose bytes are those at `place`."""
    return bytes_at(memory, place.ptr, place.size).view(like.dtype).reshape(like.shape)


def bytes_at(memory: StableMemory, ptr: int, size: int) -> torch.Tensor:
    """The bytes at `ptr` as a flat tensor over them, on the device they are on."""
    if isinstance(memory, CudaMemory):
        there: torch.Tensor = torch.as_tensor(memory.array(ptr, size), device=f"cuda:{memory.ordinal}")
        return there
    return torch.frombuffer(host_addressable(memory).view(ptr, size), dtype=torch.uint8)


def _ordered(indices: list[int], load_order: str) -> list[int]:
    if load_order == "reverse":
        return indices[::-1]
    if load_order.startswith("shuffled:"):
        random.Random(int(load_order.removeprefix("shuffled:"))).shuffle(indices)  # noqa: S311 - order, not secrecy
    return indices
