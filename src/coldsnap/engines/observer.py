"""What the loader was seen to do, and what follows: which bytes are the model's and which stay behind.

The rule (pure, and the only one): a byte is the model's when the loader was seen to copy it, unchanged, from
one place of one checkpoint file. Writes that share bytes become one extent (`core.extents.merge_aliases`);
neighbours never do, except the pieces of one tensor inside one destination: the rows of a slice of a shard come from
many places of the file and are one extent of as many pieces. An extent is kept whole or not at all: when any byte
of it was also written by something that cannot be replayed, or was written from two different places of the
checkpoint, all of it is residual, with the reason. Never by a parameter's name. Any overlap spoils, whichever came
first.

Worked example. `wrote(0x1000, 64, tensor="a", file="m.safetensors", file_offset=200, tensor_offset=0)` and
`wrote(0x1040, 64, tensor="b", ...)`: two extents of 64 bytes. A later `unreplayable(0x1050, 4, "rounded")`
takes all of the second one out: its 64 bytes are residual for the reason "rounded".

A destination (`within`) that the loader filled only in part, such as a padded vocabulary, keeps what was copied as
model bytes; the rest of it is residual for the reason PARTLY.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from coldsnap.core.extents import Allocation, AllocationIndex, MergedRange, ObservedRange, merge_aliases
from coldsnap.errors import InternalError

__all__ = [
    "AMBIGUOUS",
    "PARTLY",
    "UNOBSERVED",
    "Label",
    "Observation",
    "ObservedExtent",
    "Observer",
    "Write",
    "reason_bytes",
]

AMBIGUOUS = "written from two places of the checkpoint"
PARTLY = "the rest of a tensor that the loader wrote in part"
UNOBSERVED = "not seen to be written by the loader"


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """One observed copy: `size` bytes at `file_offset` of `file`, which are those at `tensor_offset` of
    `tensor`, went to address `ptr`. `file` is relative to the checkpoint folder. `within`: see `Observer.wrote`."""

    ptr: int
    size: int
    tensor: str
    file: str
    file_offset: int
    tensor_offset: int
    within: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Why the `size` bytes at `ptr` are not the model's."""

    ptr: int
    size: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedExtent:
    """A future model extent: where it is, what it holds, and the copies that fill every byte of it once."""

    range: MergedRange
    writes: tuple[Write, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The outcome: disjoint extents in address order, and labels for what is known about the rest."""

    extents: tuple[ObservedExtent, ...]
    labels: tuple[Label, ...]


class Observer:
    """Collects what a loader does. Any thread may tell it; order matters only between overlapping ranges."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: list[Write] = []
        self._labels: list[Label] = []

    def wrote(
        self,
        ptr: int,
        size: int,
        *,
        tensor: str,
        file: str,
        file_offset: int,
        tensor_offset: int = 0,
        within: tuple[int, int] | None = None,
    ) -> None:
        """The loader copied these bytes of the checkpoint, unchanged, to `ptr`.

        `within` is the address and size of the parameter they are a part of, for a loader that fills it piece by
        piece: pieces of one tensor that touch there are one extent, and none is joined to those of a neighbour.
        Raises InternalError when they are not inside it.
        """
        if within is not None and not within[0] <= ptr <= ptr + size <= within[0] + within[1]:
            raise InternalError(
                f"the loader reported {size} bytes at {ptr:#x} within {within[1]} bytes at {within[0]:#x}",
                cure="an engine reports each copy within the parameter it belongs to",
                facts={"ptr": ptr, "size": size, "within": list(within)},
            )
        write = Write(
            ptr=ptr,
            size=size,
            tensor=tensor,
            file=file,
            file_offset=file_offset,
            tensor_offset=tensor_offset,
            within=within,
        )
        with self._lock:
            self._writes.append(write)

    def unreplayable(self, ptr: int, size: int, reason: str) -> None:
        """These bytes come from elsewhere, or from the checkpoint through something that changes them."""
        with self._lock:
            self._labels.append(Label(ptr=ptr, size=size, reason=reason))

    def observation(self, allocations: Sequence[Allocation]) -> Observation:
        """Apply the rule. Raises InternalError for a write that lies in no allocation."""
        with self._lock:
            writes, labels = list(self._writes), list(self._labels)
        index = AllocationIndex(allocations)
        for ptr, size in [(w.ptr, w.size) for w in writes] + [(label.ptr, label.size) for label in labels]:
            if size > 0 and index.holding(ptr, size) is None:
                raise InternalError(
                    f"the loader reported {size} bytes at {ptr:#x}, which no stable allocation holds",
                    cure="an engine reports only what lies in the memory it was given",
                    facts={"ptr": ptr, "size": size},
                )
        joined = _joined(writes)
        labels = [*_rests(joined), *labels]  # first: what the engine says about the same bytes counts
        groups = merge_aliases(_ranges(joined))
        spoiled = _first_labels(groups, labels)
        extents: list[ObservedExtent] = []
        for group, members in zip(groups, _by_group(groups, joined), strict=True):
            reason = spoiled.get(group.ptr)
            chosen = _single_source(members)
            if reason is None and chosen is not None:
                extents.append(ObservedExtent(range=group, writes=chosen))
            else:
                labels.append(Label(ptr=group.ptr, size=group.size, reason=reason or AMBIGUOUS))
        return Observation(extents=tuple(extents), labels=tuple(labels))


def _joined(writes: Iterable[Write]) -> list[Write]:
    """Writes in address order. Pieces of one tensor that continue or repeat each other become one, so that a
    loader's chunk size never shows."""

    def source(write: Write) -> tuple[tuple[int, int], str, str, int, int]:
        shift = write.file_offset - write.ptr, write.tensor_offset - write.ptr
        return (write.within or (-1, 0), write.tensor, write.file, *shift)

    joined: list[Write] = []
    for write in sorted(set(writes), key=lambda w: (*source(w), w.ptr)):
        if write.size == 0:
            continue
        last = joined[-1] if joined else None
        if last is not None and source(last) == source(write) and write.ptr <= last.ptr + last.size:
            end = max(last.ptr + last.size, write.ptr + write.size)
            joined[-1] = replace(last, size=end - last.ptr)
        else:
            joined.append(write)
    return sorted(joined, key=lambda w: (w.ptr, w.size, w.tensor, w.file, w.file_offset))


def _ranges(joined: Iterable[Write]) -> Iterator[ObservedRange]:
    """What each write fills; those of one tensor that touch inside one destination are one range."""
    runs: dict[tuple[tuple[int, int], str], tuple[int, int]] = {}
    for write in joined:  # in address order
        if write.within is None:
            yield ObservedRange(name=write.tensor, ptr=write.ptr, size=write.size)
            continue
        key, end = (write.within, write.tensor), write.ptr + write.size
        start, reach = runs.get(key, (write.ptr, write.ptr))
        if write.ptr > reach:
            yield ObservedRange(name=write.tensor, ptr=start, size=reach - start)
            start = write.ptr
        runs[key] = start, max(reach, end)
    for (_, tensor), (start, reach) in runs.items():
        yield ObservedRange(name=tensor, ptr=start, size=reach - start)


def _rests(joined: Iterable[Write]) -> Iterator[Label]:
    """The bytes of each destination that no write fills."""
    reached: dict[tuple[int, int], int] = {}
    for write in joined:  # in address order
        if write.within is not None:
            reach = reached.get(write.within, write.within[0])
            if write.ptr > reach:
                yield Label(ptr=reach, size=write.ptr - reach, reason=PARTLY)
            reached[write.within] = max(reach, write.ptr + write.size)
    for (ptr, size), reach in reached.items():
        if reach < ptr + size:
            yield Label(ptr=reach, size=ptr + size - reach, reason=PARTLY)


def _by_group(groups: Sequence[MergedRange], writes: Sequence[Write]) -> Iterator[list[Write]]:
    position = 0
    for group in groups:
        start = position
        while position < len(writes) and writes[position].ptr < group.ptr + group.size:
            position += 1
        yield list(writes[start:position])


def _single_source(members: Sequence[Write]) -> tuple[Write, ...] | None:
    """Copies that fill the group once, trimmed where they overlap; None when two disagree on a byte's source."""
    chosen: list[Write] = []
    reach = members[0].ptr
    for write in members:
        if write.ptr < reach:
            for before in chosen:
                shared = before.ptr + before.size > write.ptr
                same = before.file == write.file and before.file_offset - before.ptr == write.file_offset - write.ptr
                if shared and not same:
                    return None
        skipped = max(0, reach - write.ptr)
        if skipped >= write.size:
            continue
        chosen.append(
            replace(
                write,
                ptr=write.ptr + skipped,
                size=write.size - skipped,
                file_offset=write.file_offset + skipped,
                tensor_offset=write.tensor_offset + skipped,
            )
        )
        reach = write.ptr + write.size
    return tuple(chosen)


def _first_labels(groups: Sequence[MergedRange], labels: Iterable[Label]) -> dict[int, str]:
    """Group address -> reason of the lowest label that touches it. Both are walked in address order."""
    spoiled: dict[int, str] = {}
    ordered = sorted((label for label in labels if label.size > 0), key=lambda label: label.ptr)
    waiting: list[tuple[int, int, str]] = []
    position = 0
    for group in groups:
        end = group.ptr + group.size
        while position < len(ordered) and ordered[position].ptr < end:
            label = ordered[position]
            heapq.heappush(waiting, (label.ptr + label.size, label.ptr, label.reason))
            position += 1
        while waiting and waiting[0][0] <= group.ptr:
            heapq.heappop(waiting)
        if waiting:
            spoiled[group.ptr] = min(waiting, key=lambda one: one[1])[2]
    return spoiled


def reason_bytes(residual: Iterable[tuple[int, int]], labels: Sequence[Label]) -> dict[str, int]:
    """How many residual bytes each reason accounts for. The last label told wins; no label: UNOBSERVED.

    `residual` holds disjoint (ptr, size). The counts add up to the residual's bytes.
    """
    totals: dict[str, int] = {}
    starts = sorted(range(len(labels)), key=lambda index: labels[index].ptr)
    position = 0
    active: list[int] = []  # heap of -index of labels that have begun
    for ptr, size in sorted(residual):
        at, end = ptr, ptr + size
        while at < end:
            while position < len(starts) and labels[starts[position]].ptr <= at:
                heapq.heappush(active, -starts[position])
                position += 1
            while active and labels[-active[0]].ptr + labels[-active[0]].size <= at:
                heapq.heappop(active)
            stop = labels[starts[position]].ptr if position < len(starts) else end
            reason = UNOBSERVED
            if active:
                top = labels[-active[0]]
                reason, stop = top.reason, min(stop, top.ptr + top.size)
            stop = min(stop, end)
            totals[reason] = totals.get(reason, 0) + stop - at
            at = stop
    return totals
