"""vLLM's weights on a processor as stable memory: there is no CuMem there, so they are moved into ours.

Every storage that a parameter or a buffer uses is copied into an arena, and the tensors are laid over the copy, keeping
shape, strides and whatever they share. That happens twice: before weights are loaded, for what the model was built
with, and after the finalizers, for what those made. Copies are made while the tracer looks, so what it knows about
bytes goes along. A place of the arena whose tensor a finalizer replaced stays as it is: somebody may hold a view of it.

A tensor that is neither parameter nor buffer stays where it is, in the process image. One that was a view of a
parameter before `prepare` sees no weights: vLLM makes none.

Keys and values are ordinary torch memory here. Their pages go back to the kernel, and read as zero when touched again.

This module imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from coldsnap.core.extents import PAGE_BYTES, Allocation, padded
from coldsnap.engines.vllm.pools import WEIGHTS_TAG, Place, Row, layout_tag
from coldsnap.errors import EngineError, Problem
from coldsnap.hydrate import HostMemory, libc
from coldsnap.hydrate.host import DEFAULT_BASE
from coldsnap.hydrate.maps import holes, overlapping, read_maps

__all__ = ["HostPool"]

_ALIGNMENT = 64

Tracer = contextlib.AbstractContextManager[object]
"""What looks at torch's copies while it is entered, such as a dispatch mode; it may be entered already."""


class HostPool(HostMemory):
    """The `WeightMemory` of a process that computes on a processor.

    `cache` says which tensors hold keys and values now.
    """

    def __init__(
        self,
        *,
        cache: Callable[[], Iterable[torch.Tensor]] = tuple,
        base: int = DEFAULT_BASE,
        huge_pages: bool = True,
    ) -> None:
        super().__init__(base=base, huge_pages=huge_pages)
        self._cache = cache

    def prepare(self, model: torch.nn.Module, tracer: Tracer) -> None:
        """Move what the model was built with. Raises EngineError for a tensor of another device, OutOfSpace."""
        self._move(model, tracer)

    def keep_graphs(self) -> None:
        """Nothing: a processor has no graphs."""

    def settle(self, model: torch.nn.Module, tracer: Tracer) -> None:
        """Move what is not here yet; nothing, where finalizers left every tensor alone. Raises as `prepare`."""
        self._move(model, tracer)

    def seal(self) -> None:
        """Nothing: nobody but `settle` puts anything here."""

    def clear(self) -> None:
        """Zero every byte: what the model was built with lies here too."""
        self.unmap()
        self.remap()

    def complete(self) -> tuple[Allocation, ...]:
        """Nothing: what is not moved by now is in the process image."""
        return ()

    def held_bytes(self) -> int:
        """There is no device."""
        return 0

    def discard_kv(self) -> int:
        """Forget keys and values: they read as zero afterwards. The bytes that the kernel got back."""
        entries = read_maps()
        given_back = 0
        for start, size in sorted({_extent(tensor) for tensor in self._cache()}):
            first, last = padded(start), (start + size) // PAGE_BYTES * PAGE_BYTES
            there = overlapping(entries, first, last)
            whole = first < last and not list(holes(entries, first, last))
            if whole and all(entry.rights == "rw-p" and (entry.anonymous or entry.name == "[heap]") for entry in there):
                libc.advise(first, last - first, libc.ADVICE_DISCARD)
                given_back += last - first
            else:  # of a file, shared, or less than a page: its bytes would not read as zero, or be a neighbour's
                first = last = start + size
            for at, count in ((start, first - start), (last, start + size - last)):
                if count:
                    libc.view_at(at, count)[:] = bytes(count)
        return given_back

    def restore_kv(self) -> None:
        """Nothing: what was discarded is there when it is touched."""

    def leftovers(self) -> tuple[Problem, ...]:
        """Nothing: nobody else sleeps here."""
        return ()

    def _move(self, model: torch.nn.Module, tracer: Tracer) -> None:
        spans = list(_spans(tensor for tensor in _tensors(model) if not self._holds(tensor)))
        if not spans:
            return
        offsets, total = _offsets(spans)
        places = [
            Place(ptr=offset + tensor.data_ptr() - span.ptr, size=_reach(tensor), name=tensor.name)
            for span, offset in zip(spans, offsets, strict=True)
            for tensor in span.tensors
        ]
        row = Row(ptr=0, size=total, tag=WEIGHTS_TAG, asleep=False, live=True)
        allocation = self.reserve(total, tag=layout_tag(row, places))
        with torch.no_grad():
            for span, offset in zip(spans, offsets, strict=True):
                # A storage of its own for each: where one begins and ends is what a tracer goes by.
                there = torch.frombuffer(self.view(allocation.ptr + offset, span.size), dtype=torch.uint8)
                here = _bytes_at(span)
                with tracer:
                    there.copy_(here)
                for tensor in span.tensors:
                    tensor.lay_over(there, tensor.data_ptr() - span.ptr)

    def _holds(self, tensor: _Named) -> bool:
        return any(one.ptr <= tensor.data_ptr() < one.ptr + one.size for one in self.allocations)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    tensor: torch.Tensor

    def data_ptr(self) -> int:
        return int(self.tensor.data_ptr())

    def lay_over(self, flat: torch.Tensor, offset: int) -> None:
        """Let the tensor be the bytes of `flat` from `offset` on; its shape and strides stay."""
        like = self.tensor
        elements = offset // like.element_size()
        over = torch.empty(0, dtype=like.dtype).set_(flat.untyped_storage(), elements, like.size(), like.stride())
        like.data = over


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes of one storage that tensors use, lowest to highest; it begins at a multiple of 64 of the storage."""

    ptr: int
    size: int
    tensors: tuple[_Named, ...]


def _tensors(model: torch.nn.Module) -> Iterator[_Named]:
    """Every parameter and buffer with bytes, once, in the order of the model."""
    seen: set[int] = set()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) in seen or not tensor.numel():
            continue
        seen.add(id(tensor))
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise EngineError(
                f"{name} is a {tensor.layout} tensor on {tensor.device}, and the weights are to lie in host memory",
                cure="serve this model on a GPU, or without the option that places it there",
                facts={"name": name, "device": str(tensor.device)},
            )
        yield _Named(name, tensor)


def _spans(tensors: Iterable[_Named]) -> Iterator[_Span]:
    by_storage: dict[int, list[_Named]] = {}
    for one in tensors:
        by_storage.setdefault(int(one.tensor.untyped_storage().data_ptr()), []).append(one)
    for storage, members in by_storage.items():
        lowest = min(one.data_ptr() for one in members)
        start = storage + (lowest - storage) // _ALIGNMENT * _ALIGNMENT
        end = max(one.data_ptr() + _reach(one) for one in members)
        yield _Span(start, end - start, tuple(members))


def _reach(one: _Named) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(one.tensor.size(), one.tensor.stride(), strict=True))
    return int((steps + 1) * one.tensor.element_size())


def _offsets(spans: Sequence[_Span]) -> tuple[list[int], int]:
    """A place for each span, large ones at whole pages and small ones behind them, and the bytes in all."""
    offsets = [0] * len(spans)
    end = 0
    for small in (False, True):
        for index, span in enumerate(spans):
            if (span.size < PAGE_BYTES) == small:
                alignment = _ALIGNMENT if small else PAGE_BYTES
                offsets[index] = -(-end // alignment) * alignment
                end = offsets[index] + span.size
    return offsets, padded(end)


def _bytes_at(span: _Span) -> torch.Tensor:
    storage = span.tensors[0].tensor.untyped_storage()
    offset = span.ptr - int(storage.data_ptr())
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (span.size,), (1,))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return int(storage.data_ptr()), int(storage.nbytes())
