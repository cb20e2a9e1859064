"""The cover proof on plain ranges: every byte of every allocation belongs to exactly one extent.

A byte that no extent covers comes back as zero after a restore and gives fluent nonsense; a byte that two
extents cover gets whichever was written last. Neither shows up as an error later, so both are refused
here, from the manifest alone, with every gap and overlap named by its addresses.

How problems are named: extents are swept in address order with ``reach``, the highest end seen so far. An
extent that starts below ``reach`` overlaps the one that set it. The union of the reported overlaps is exactly the
set of bytes covered twice or more, and every reported overlap names two extents that really share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from coldsnap.errors import Problem

__all__ = ["RangeGroup", "complement", "cover_problems"]

_ADDRESS_END = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeGroup:
    """Ranges of one list of a document: ``field`` is the list's path, rows are (ptr, size, allocation_ptr).

    ``allocation_ptr`` None means that the document does not name it and it is found by address.
    """

    field: str
    rows: Sequence[tuple[int, int, int | None]]


def complement(
    allocations: Iterable[tuple[int, int]], ranges: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """What ``ranges`` (ptr, size) leave of ``allocations`` (ptr, size): (ptr, size, allocation ptr), by address.

    Should allocations overlap, what they share counts as the lower one's.
    """
    taken = sorted(one for one in ranges if one[1] > 0)
    position = 0  # the first range that may still reach into the current allocation
    end = 0
    for start, length in sorted(allocations):
        cursor, end = max(start, end), max(start + length, end)
        while position < len(taken) and taken[position][0] < end:
            ptr, size = taken[position]
            if ptr > cursor:
                yield cursor, ptr - cursor, start
            cursor = max(cursor, ptr + size)
            if ptr + size > end:
                break
            position += 1
        if cursor < end:
            yield cursor, end - cursor, start


def cover_problems(
    allocations: Sequence[tuple[int, int]], groups: Sequence[RangeGroup], *, page_bytes: int
) -> list[Problem]:
    """Everything that keeps ``groups`` from being a disjoint, complete split of ``allocations``.

    Allocations are (ptr, size) rows of the list ``entries``. Empty when the split is proved.
    """
    if _fits_exactly(allocations, groups, page_bytes):
        return []
    return [
        *_bad_allocations(allocations, page_bytes),
        *_misplaced(allocations, groups),
        *_overlaps(groups),
        *_gaps(allocations, groups),
    ]


def _fits_exactly(allocations: Sequence[tuple[int, int]], groups: Sequence[RangeGroup], page_bytes: int) -> bool:
    """Whether the extents, put in address order, fill the allocations one after the other to the last byte.

    Nearly every manifest does, and this says so several times faster than looking for something to name.
    """
    rows = sorted((row for group in groups for row in group.rows), key=itemgetter(0))
    position = 0
    before = 0
    for start, length in sorted(allocations):
        end = start + length
        if start < before or length < 1 or start % page_bytes or length % page_bytes or end > _ADDRESS_END:
            return False
        cursor = before = start
        while cursor < end:
            if position == len(rows):
                return False
            ptr, size, named = rows[position]
            if ptr != cursor or size < 1 or (named is not None and named != start):
                return False
            cursor += size
            position += 1
        if cursor != end:
            return False
        before = end
    return position == len(rows)


def _span(start: int, end: int) -> str:
    return f"{start:#x}..{end:#x}"


def _bad_allocations(allocations: Sequence[tuple[int, int]], page_bytes: int) -> Iterator[Problem]:
    for index, (ptr, size) in enumerate(allocations):
        if ptr % page_bytes or size % page_bytes or size < 1:
            yield Problem(
                field=f"entries[{index}]",
                message=f"an allocation is whole pages: multiples of {page_bytes}, at least one",
                value=_span(ptr, ptr + size),
                cure="export the allocation map again; only whole pages can be unmapped and mapped back",
            )
        if ptr + size > _ADDRESS_END:
            yield Problem(
                field=f"entries[{index}]",
                message="the allocation ends beyond the 64-bit address space",
                value=_span(ptr, ptr + size),
                cure="export the allocation map again",
            )
    reach, holder = 0, -1
    for ptr, size, index in sorted((ptr, size, index) for index, (ptr, size) in enumerate(allocations)):
        if ptr < reach:
            yield Problem(
                field=f"entries[{index}]",
                message=f"overlaps entries[{holder}]",
                value=_span(ptr, min(reach, ptr + size)),
                cure="list every allocation once; two allocations never share an address",
            )
        if ptr + size > reach:
            reach, holder = ptr + size, index


def _misplaced(allocations: Sequence[tuple[int, int]], groups: Sequence[RangeGroup]) -> Iterator[Problem]:
    ends = {ptr: ptr + size for ptr, size in allocations}
    starts = sorted(ends)
    for group in groups:
        for index, (ptr, size, named) in enumerate(group.rows):
            if size < 1:
                yield Problem(
                    field=f"{group.field}[{index}].size",
                    message="an extent holds at least one byte",
                    value=str(size),
                    cure="leave empty tensors out",
                )
                continue
            start = _start_below(starts, ptr) if named is None else named
            end = ends.get(start) if start is not None else None
            if start is None or end is None:
                where = (
                    "is in no allocation of entries" if named is None else "names an allocation that is not in entries"
                )
                value = _span(ptr, ptr + size) if named is None else f"{named:#x}"
                field = f"{group.field}[{index}]" + ("" if named is None else ".allocation_ptr")
                yield Problem(field=field, message=where, value=value, cure="export the worker's manifest again")
            elif ptr < start or ptr + size > end:
                yield Problem(
                    field=f"{group.field}[{index}]",
                    message=f"reaches outside its allocation {_span(start, end)}",
                    value=_span(ptr, ptr + size),
                    cure="an extent lies in exactly one allocation; split it at the allocation's end",
                )


def _start_below(starts: Sequence[int], ptr: int) -> int | None:
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        if starts[middle] <= ptr:
            low = middle + 1
        else:
            high = middle
    return starts[low - 1] if low else None


def _overlaps(groups: Sequence[RangeGroup]) -> Iterator[Problem]:
    rows = [
        (ptr, size, number, index)
        for number, group in enumerate(groups)
        for index, (ptr, size, _) in enumerate(group.rows)
        if size > 0
    ]
    rows.sort()
    reach, holder = 0, (0, 0)
    for ptr, size, number, index in rows:
        if ptr < reach:
            yield Problem(
                field=f"{groups[number].field}[{index}]",
                message=f"overlaps {groups[holder[0]].field}[{holder[1]}]",
                value=_span(ptr, min(reach, ptr + size)),
                cure="every byte belongs to exactly one extent; merge aliases into one",
            )
        if ptr + size > reach:
            reach, holder = ptr + size, (number, index)


def _gaps(allocations: Sequence[tuple[int, int]], groups: Sequence[RangeGroup]) -> Iterator[Problem]:
    ranges = ((ptr, size) for group in groups for ptr, size, _ in group.rows if size > 0)
    index_of = {ptr: index for index, (ptr, _) in enumerate(allocations)}
    for ptr, size, start in complement(allocations, ranges):
        yield Problem(
            field=f"entries[{index_of[start]}]",
            message=f"{size} bytes belong to no extent",
            value=_span(ptr, ptr + size),
            cure="bytes that no extent covers would come back as zeros; make them residual",
        )
