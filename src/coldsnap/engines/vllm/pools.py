"""CuMem's books as records: which allocations vLLM's sleep-mode allocator has, what each is for, and what is in it.

vLLM keeps one row an allocation (``pointer_to_data``); torch cuts an allocation into blocks and tells of them by pool
(``snapshot``). A row is read from both. Three things are not what they seem:

- 0.26 remembers the last pool of a tag only, as a pair; from 0.32 on it is a list of pairs. An allocation of a pool
  that is not remembered may hold anything, so it counts as live and as free of free blocks.
- When a pool's context ends, allocations without a live block are given back to the driver behind torch's back: torch
  still lists them, vLLM does not. vLLM's list is the one that is true.
- An allocation can lose its last live block later. Nobody ever allocates from such a pool again, so what lies there is
  of no use, whatever its tag says.
- A row has the tag of the context it was made in, and graphs are captured in none; so what they use is told by its
  pool. Their blocks count as free once the capture is over, and the graphs go on using them: to us they are all taken.

Nothing here imports vllm or torch: the protocols say what is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from coldsnap.core.canonical import canonical_sha256
from coldsnap.errors import Problem

__all__ = [
    "DISCARDED_TAGS",
    "GRAPHS_TAG",
    "SMALL_BYTES",
    "WEIGHTS_TAG",
    "Allocator",
    "Handle",
    "Place",
    "Row",
    "backup_problems",
    "discarded",
    "graphs",
    "layout_tag",
    "pools_of",
    "rows_of",
    "weights",
]

WEIGHTS_TAG = "weights"
DISCARDED_TAGS = frozenset({"kv_cache", "workspace"})
"""What holds nothing that a request to come needs: keys and values, and scratch (named so from 0.32 on)."""

GRAPHS_TAG = "cudagraph"
"""Of the pool that CUDA graphs use. vLLM calls the one of its own so, too (an option from 0.32 on)."""

SMALL_BYTES = 1 << 20
"""torch keeps segments for requests of up to so many bytes apart from the others (its `kSmallSize`)."""

Handle: TypeAlias = tuple[int, int, int, Any]
"""device, bytes, address, and where vLLM keeps the driver's handle."""


class Entry(Protocol):
    """vLLM's `AllocationData`."""

    handle: Handle
    tag: str
    cpu_backup_tensor: Any
    is_asleep: bool


class Allocator(Protocol):
    """What is looked at of vLLM's `CuMemAllocator`."""

    @property
    def pointer_to_data(self) -> Mapping[int, Entry]:
        """Address -> its row."""
        ...

    @property
    def allocator_and_pools(self) -> Mapping[str, Any]:
        """Tag -> (pool, allocator), or a list of such pairs."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One allocation: `size` bytes at `ptr`, all of them mapped unless `asleep`.

    `live`: torch has given out some of it. `free`: its blocks that are given out to nobody, each (address, bytes).
    `small`: torch cuts small requests from it, and only those. `backup_bytes`: what a sleep of level 1 has copied to
    host memory.
    """

    ptr: int
    size: int
    tag: str
    asleep: bool
    live: bool
    free: tuple[tuple[int, int], ...] = ()
    small: bool = False
    backup_bytes: int = 0

    @property
    def spare(self) -> tuple[tuple[int, int], ...]:
        """Of the free blocks those that torch may still give out: a small request gets none of a large segment."""
        return tuple((ptr, size) for ptr, size in self.free if self.small or size > SMALL_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tensor: `size` bytes at `ptr`, by one of its names."""

    ptr: int
    size: int
    name: str


def rows_of(allocator: Allocator) -> tuple[Row, ...]:
    """Every allocation of vLLM's, by address."""
    segments = {segment["address"]: segment for pool in pools_of(allocator) for segment in pool.snapshot()}
    of_graphs = {segment["address"] for pool in _pools_of(allocator, GRAPHS_TAG) for segment in pool.snapshot()}
    return tuple(
        _row(ptr, entry, segments.get(ptr), of_graphs=ptr in of_graphs)
        for ptr, entry in sorted(allocator.pointer_to_data.items())
    )


def weights(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Those whose bytes are to be preserved."""
    return tuple(row for row in rows if row.tag == WEIGHTS_TAG and row.live)


def graphs(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Those that CUDA graphs use."""
    return tuple(row for row in rows if row.tag == GRAPHS_TAG)


def discarded(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Those whose bytes nobody needs after a sleep: keys and values, scratch, and weights that are no more."""
    return tuple(row for row in rows if row.tag in DISCARDED_TAGS or (row.tag == WEIGHTS_TAG and not row.live))


def backup_problems(rows: Iterable[Row]) -> tuple[Problem, ...]:
    """Each copy in host memory that a sleep by somebody else has left: it would land in the process image."""
    return tuple(
        Problem(
            field=f"cumem[0x{row.ptr:x}].cpu_backup_tensor",
            message=f"a leftover level-1 backup of tag {row.tag!r} in host memory",
            value=f"{row.backup_bytes} bytes",
            cure="restart the engine, and do not put it to sleep by hand before a capture",
        )
        for row in rows
        if row.backup_bytes
    )


def layout_tag(row: Row, places: Sequence[Place]) -> str:
    """The row's tag with a digest of which tensors lie where in it, so that another layout is never taken for it."""
    inside = [
        [place.ptr - row.ptr, place.size, place.name]
        for place in sorted(places, key=lambda one: (one.ptr, one.size, one.name))
        if row.ptr <= place.ptr < row.ptr + row.size
    ]
    return f"{row.tag}:{canonical_sha256([row.size, inside]).hex[:12]}"


def pools_of(allocator: Allocator) -> Iterator[Any]:
    """torch's memory pools, of every tag."""
    for tag in list(allocator.allocator_and_pools):
        yield from _pools_of(allocator, tag)


def _pools_of(allocator: Allocator, tag: str) -> Iterator[Any]:
    held = allocator.allocator_and_pools.get(tag, ())
    pairs = [held] if held and isinstance(held, tuple) else list(held)  # 0.26, then 0.32 and later
    for pair in pairs:
        yield pair[0]


def _row(ptr: int, entry: Entry, segment: Mapping[str, Any] | None, *, of_graphs: bool) -> Row:
    backup = entry.cpu_backup_tensor
    tag = GRAPHS_TAG if of_graphs else entry.tag
    blocks = segment["blocks"] if segment is not None and tag != GRAPHS_TAG else ()
    return Row(
        ptr=ptr,
        size=entry.handle[1],
        tag=tag,
        asleep=entry.is_asleep,
        live=segment is None or segment["allocated_size"] > 0,
        free=tuple((block["address"], block["size"]) for block in blocks if block["state"] == "inactive"),
        small=segment is not None and segment["segment_type"] == "small",
        backup_bytes=0 if backup is None else backup.numel() * backup.element_size(),
    )
