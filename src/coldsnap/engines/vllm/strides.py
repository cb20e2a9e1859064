"""Copying between two strided views, as runs of bytes that stay together. Arithmetic only.

Worked example: rows 8 to 15 of a row-major matrix of 32 columns of 2 bytes, copied to a dense tensor, are one run of
512 bytes. Columns 8 to 15 of 16 rows are 16 runs of 16 bytes, and its transpose into a dense tensor is 512 runs of 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

__all__ = ["Layout", "Run", "Runs", "runs_between"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A view: its first element's address, bytes from one element to the next in each dimension (>= 0), item size."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def span(self) -> tuple[int, int]:
        """From the first to behind the last byte that it touches."""
        if self.size == 0:
            return self.ptr, self.ptr
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.ptr, self.ptr + last + self.item_bytes

    def narrow(self, dim: int, start: int, length: int) -> Layout:
        """The same view of `length` elements from `start` of one dimension."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        ptr = self.ptr + start * self.strides[dim]
        return Layout(ptr=ptr, shape=shape, strides=self.strides, item_bytes=self.item_bytes)

    def select(self, dim: int, index: int) -> Layout:
        """The same view of one element of a dimension, which goes."""
        shape, strides = ((*v[:dim], *v[dim + 1 :]) for v in (self.shape, self.strides))
        ptr = self.ptr + index * self.strides[dim]
        return Layout(ptr=ptr, shape=shape, strides=strides, item_bytes=self.item_bytes)

    def expanded(self, shape: Sequence[int]) -> Layout:
        """The same view broadcast to `shape`, whose last dimensions are its own or stand for one of size 1."""
        lead = len(shape) - len(self.shape)
        own = [
            stride if size == wanted else 0
            for size, stride, wanted in zip(self.shape, self.strides, shape[lead:], strict=True)
        ]
        return Layout(ptr=self.ptr, shape=tuple(shape), strides=(*(0,) * lead, *own), item_bytes=self.item_bytes)


class Run(NamedTuple):
    """`size` bytes at `src` that go to `dst`."""

    dst: int
    src: int
    size: int


class Runs(NamedTuple):
    """`num_runs` runs of `size` bytes each; iterating `all()` gives them in the order of their destinations."""

    size: int
    num_runs: int
    dst: int
    src: int
    dims: tuple[tuple[int, int, int], ...]
    """(elements, stride there, stride here), the outermost first."""

    def all(self) -> Iterator[Run]:
        """Every run."""
        ranges = [[(i * there, i * here) for i in range(size)] for size, there, here in self.dims]
        for steps in product(*ranges):
            dst = self.dst + sum(step[0] for step in steps)
            src = self.src + sum(step[1] for step in steps)
            yield Run(dst, src, self.size)


def runs_between(dst: Layout, src: Layout) -> Runs | None:
    """The longest equal runs of a copy from `src` to `dst`, of one shape and item size.

    None where bytes of `dst` would be written more than once, or may be, so that what they hold is nobody's promise.
    """
    item = dst.item_bytes
    dims = [
        (size, there, here) for size, there, here in zip(dst.shape, dst.strides, src.strides, strict=True) if size != 1
    ]
    if any(size == 0 for size, _, _ in dims):
        return Runs(item, 0, dst.ptr, src.ptr, ((0, 0, 0),))
    dims.sort(key=lambda dim: dim[1], reverse=True)
    reach = item
    for size, there, _ in reversed(dims):
        if there < reach:
            return None
        reach = (size - 1) * there + reach
    joined: list[tuple[int, int, int]] = []
    for size, there, here in dims:
        if joined and joined[-1][1] == size * there and joined[-1][2] == size * here:
            size *= joined.pop()[0]
        joined.append((size, there, here))
    run = item
    if joined and joined[-1][1:] == (item, item):
        run = joined.pop()[0] * item
    return Runs(run, math.prod(size for size, _, _ in joined), dst.ptr, src.ptr, tuple(joined))
