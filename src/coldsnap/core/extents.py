"""Extents: byte ranges of stable allocations bound to file offsets, and the algebra on them.

A *preserved allocation* is split completely into model extents (bytes the loader was seen to write,
kept in the pack) and residual extents (everything else, kept in the capsule). Three things follow from
that split and live here, all of them pure:

* ``merge_aliases`` and ``residual_ranges`` make the split;
* ``pack_order`` and ``file_layout`` place it in files;
* ``prove_cover`` proves, from a manifest alone, that the split is complete.

The pack's identity must not depend on where the allocator put a tensor. So nothing here that decides
the pack's bytes looks at an address: the order is (sha256, size, semantic_id), and an extent is one
tensor, or several that share bytes, but never two that are merely neighbours. Addresses only break
ties between extents that are equal in all three, whose bytes are equal too.

Worked example. One allocation at 0x10000, 0x3000 bytes; the loader wrote ``a`` to 0x10100..0x10200 and
``b`` to 0x10200..0x10280. They touch but do not share a byte: two model extents of 256 and 128 bytes.
Residual: 0x10000..0x10100 and 0x10280..0x13000. The pack holds two slots of 4096 bytes, and so does the
residual's first extent; its second takes 0x2d80 bytes, rounded up to 0x3000.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

from coldsnap.core.cover import RangeGroup, complement, cover_problems
from coldsnap.core.digest import Digest
from coldsnap.errors import InvalidDocument, Problem

__all__ = [
    "PAGE_BYTES",
    "Allocation",
    "AllocationIndex",
    "CoverProof",
    "FileLayout",
    "MergedRange",
    "ModelExtent",
    "ObservedRange",
    "ResidualExtent",
    "canonical_key",
    "file_layout",
    "merge_aliases",
    "offset_problems",
    "pack_order",
    "padded",
    "prove_cover",
    "residual_group",
    "residual_order_problems",
    "residual_ranges",
    "semantic_id",
    "split_problems",
]

PAGE_BYTES = 4096
"""Every extent starts at a multiple of this in its file, and is padded with zeros to the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A stable allocation: ``size`` bytes from address ``ptr``, both multiples of ``PAGE_BYTES``."""

    ptr: int
    size: int
    tag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelExtent:
    """``size`` bytes at ``ptr``, inside the allocation at ``allocation_ptr``, kept at ``offset`` of the pack.

    ``semantic_id`` is 64 hex digits (see :func:`semantic_id`), ``sha256`` and ``crc32`` are of its bytes.
    """

    ptr: int
    size: int
    allocation_ptr: int
    semantic_id: str
    sha256: Digest
    offset: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualExtent:
    """``size`` bytes at ``ptr``, inside the allocation at ``allocation_ptr``, kept at ``offset`` of the residual."""

    ptr: int
    size: int
    allocation_ptr: int
    offset: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedRange:
    """A loader was seen to write tensor ``name`` to ``size`` bytes at ``ptr``."""

    name: str
    ptr: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedRange:
    """A future model extent. ``tensors`` are the sorted (name, offset in the range, size) inside it."""

    ptr: int
    size: int
    tensors: tuple[tuple[str, int, int], ...]

    @property
    def semantic_id(self) -> str:
        """The range's identity apart from its address and its bytes."""
        return semantic_id(self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """Where each extent starts in its file, in file order, and how long the file is."""

    offsets: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverProof:
    """That a split is complete, in numbers: ``preserved_bytes`` = ``model_bytes`` + ``residual_bytes``.

    ``pack_file_bytes`` and ``residual_file_bytes`` are the sizes of the two files, padding included.
    """

    preserved_bytes: int
    model_bytes: int
    residual_bytes: int
    pack_file_bytes: int
    residual_file_bytes: int
    num_allocations: int
    num_model_extents: int
    num_residual_extents: int


class _Packable(Protocol):
    @property
    def sha256(self) -> Digest: ...
    @property
    def size(self) -> int: ...
    @property
    def semantic_id(self) -> str: ...
    @property
    def ptr(self) -> int: ...


_P = TypeVar("_P", bound=_Packable)


def padded(size: int) -> int:
    """``size`` rounded up to a multiple of ``PAGE_BYTES``."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def semantic_id(tensors: Iterable[tuple[str, int, int]]) -> str:
    """SHA-256 (64 hex digits) of the compact JSON of the sorted ``[name, offset, size]`` rows.

    ``offset`` is relative to the extent, so the identity survives another address, and another order of
    observation. Raises ValueError when there is no tensor: an extent without one has no identity.
    """
    rows = sorted(tensors)
    if not rows:
        raise ValueError("an extent holds at least one tensor")
    return hashlib.sha256(json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode("ascii")).hexdigest()


def canonical_key(extent: _Packable) -> tuple[str, int, str, int]:
    """The sort key of the pack: (sha256 hex, size, semantic_id), and the address where all three are equal."""
    return (extent.sha256.hex, extent.size, extent.semantic_id, extent.ptr)


def pack_order(extents: Iterable[_P]) -> list[_P]:
    """The extents in the order in which the pack stores them."""
    return sorted(extents, key=canonical_key)


def file_layout(sizes: Iterable[int]) -> FileLayout:
    """Offsets of extents of these sizes, one after the other, each padded to a multiple of ``PAGE_BYTES``.

    The same rule places the pack (sizes in pack order) and the residual (sizes in address order).
    Raises ValueError for a size below 1: empty tensors are not extents.
    """
    offsets: list[int] = []
    end = 0
    for size in sizes:
        if size < 1:
            raise ValueError(f"an extent holds at least one byte, not {size}")
        offsets.append(end)
        end += padded(size)
    return FileLayout(offsets=tuple(offsets), bytes=end)


def merge_aliases(observed: Iterable[ObservedRange]) -> list[MergedRange]:
    """Turn observed writes into disjoint ranges, in address order.

    Ranges that share a byte, directly or through a third, become one; ranges that only touch stay apart,
    so that a tensor's neighbours never change its identity. Empty ranges vanish. A write seen twice counts
    once. Raises ValueError for a negative size.
    """
    ranges = sorted(set(observed), key=lambda seen: (seen.ptr, seen.size, seen.name))
    merged: list[MergedRange] = []
    group: list[ObservedRange] = []
    reach = 0

    def close() -> None:
        if group:
            start = group[0].ptr
            tensors = tuple(sorted((seen.name, seen.ptr - start, seen.size) for seen in group))
            merged.append(MergedRange(ptr=start, size=reach - start, tensors=tensors))

    for seen in ranges:
        if seen.size < 0:
            raise ValueError(f"tensor {seen.name!r} was observed with a negative size, {seen.size}")
        if seen.size == 0:
            continue
        if seen.ptr >= reach:
            close()
            group = []
        group.append(seen)
        reach = max(reach, seen.ptr + seen.size)
    close()
    return merged


def residual_ranges(
    allocations: Iterable[Allocation], model_ranges: Iterable[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """What the model ranges leave over: (ptr, size, allocation_ptr) in address order, never empty.

    ``model_ranges`` are (ptr, size) in any order; they may overlap. Parts outside every allocation are
    ignored here, because naming them is the cover proof's work. Residual neighbours in two adjacent
    allocations stay apart: an extent lies in exactly one allocation.
    """
    return list(complement(((one.ptr, one.size) for one in allocations), model_ranges))


class AllocationIndex:
    """Finds the allocation that holds a range. Allocations must not overlap."""

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        self._sorted: Sequence[Allocation] = sorted(allocations, key=lambda one: one.ptr)
        self._ptrs = [one.ptr for one in self._sorted]

    def holding(self, ptr: int, size: int) -> Allocation | None:
        """The allocation that contains all ``size`` bytes at ``ptr``, or None."""
        position = bisect_right(self._ptrs, ptr) - 1
        if position < 0:
            return None
        found = self._sorted[position]
        return found if ptr + size <= found.ptr + found.size else None


def split_problems(
    allocations: Sequence[Allocation],
    model_extents: Sequence[ModelExtent],
    residual_extents: Sequence[ResidualExtent],
) -> list[Problem]:
    """Every reason why this is not a canonical, disjoint and complete split of the allocations."""
    problems = cover_problems(
        [(one.ptr, one.size) for one in allocations],
        [
            RangeGroup(
                field="model_weight_extents", rows=[(one.ptr, one.size, one.allocation_ptr) for one in model_extents]
            ),
            residual_group(residual_extents),
        ],
        page_bytes=PAGE_BYTES,
    )
    keys = [(one.sha256.hex, one.size, one.semantic_id, one.ptr) for one in model_extents]
    if keys != sorted(keys):
        problems += [
            Problem(
                field=f"model_weight_extents[{index}]",
                message="is out of canonical order: sha256, then size, then semantic_id, never decreasing",
                value=f"sha256:{after[0]}",
                cure="sort the extents as the pack stores them",
            )
            for index, (before, after) in enumerate(pairwise(keys), start=1)
            if after < before
        ]
    problems += offset_problems("model_weight_extents", [(one.offset, one.size) for one in model_extents])
    return problems + residual_order_problems(residual_extents)


def residual_group(extents: Sequence[ResidualExtent]) -> RangeGroup:
    """The residual extents as rows for :func:`coldsnap.core.cover.cover_problems`."""
    return RangeGroup(field="residual_extents", rows=[(one.ptr, one.size, one.allocation_ptr) for one in extents])


def residual_order_problems(extents: Sequence[ResidualExtent]) -> list[Problem]:
    """Residual extents are in address order, one after the other in their file."""
    problems = [
        Problem(
            field=f"residual_extents[{index}]",
            message="is out of order: residual extents are sorted by address",
            value=f"{after.ptr:#x}",
            cure=f"place it before {before.ptr:#x}",
        )
        for index, (before, after) in enumerate(pairwise(extents), start=1)
        if after.ptr < before.ptr
    ]
    return problems + offset_problems("residual_extents", [(one.offset, one.size) for one in extents])


def offset_problems(field: str, rows: Sequence[tuple[int, int]]) -> list[Problem]:
    """Rows are (offset, size) in file order: each starts where the padding of the one before it ends."""
    problems: list[Problem] = []
    expected = 0
    for index, (offset, size) in enumerate(rows):
        if offset != expected:
            problems.append(
                Problem(
                    field=f"{field}[{index}].offset",
                    message=f"must be {expected}, where the padding of the extent before it ends",
                    value=str(offset),
                    cure=f"offsets start at 0 and are multiples of {PAGE_BYTES} without holes",
                )
            )
        expected = offset + padded(size)
    return problems


def prove_cover(
    allocations: Sequence[Allocation],
    model_extents: Sequence[ModelExtent],
    residual_extents: Sequence[ResidualExtent],
) -> CoverProof:
    """Prove that the extents split the allocations: disjoint, complete, each in one allocation, in canonical order.

    Raises InvalidDocument naming every gap, overlap, stray extent and wrong offset, with addresses.
    """
    problems = split_problems(allocations, model_extents, residual_extents)
    if problems:
        raise InvalidDocument("cover proof", problems)
    return CoverProof(
        preserved_bytes=sum(one.size for one in allocations),
        model_bytes=sum(one.size for one in model_extents),
        residual_bytes=sum(one.size for one in residual_extents),
        pack_file_bytes=sum(padded(one.size) for one in model_extents),
        residual_file_bytes=sum(padded(one.size) for one in residual_extents),
        num_allocations=len(allocations),
        num_model_extents=len(model_extents),
        num_residual_extents=len(residual_extents),
    )
