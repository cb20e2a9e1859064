"""Which bytes of memory are which bytes of the checkpoint: an interval map, told of every copy.

Pure: addresses are numbers, and nothing is read. A byte is *stored* (it is that byte of a tensor of a file),
*spoiled* (something else was written there, for a reason), or unknown. Each call says what happened to some bytes,
and the last one counts. Whoever forgets to tell of a write leaves a wrong claim; export compares every claim with the
checkpoint, so that costs a row in a report and never a wrong byte.

Worked example: `store(100, 64, q)`, `copy([Run(500, 116, 32)])`: bytes 500 to 532 are bytes 16 to 48 of q. Then
`spoil(508, 4, "aten.mul_")` leaves 500 to 508 and 512 to 532.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coldsnap.engines.vllm.strides import Run

__all__ = ["Provenance", "Span", "Stored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor of the checkpoint: its `size` bytes begin at byte `offset` of `file`."""

    tensor: str
    file: str
    offset: int
    size: int


class Span(NamedTuple):
    """Bytes `start` to `end`: those from byte `at` of a stored tensor on, or spoiled, and why."""

    start: int
    end: int
    what: Stored | str
    at: int

    def part(self, start: int, end: int) -> Span:
        """The bytes of it from `start` to `end`."""
        return Span(start, end, self.what, self.at + start - self.start)

    def continues(self, other: Span) -> bool:
        """Whether it goes on where `other` ends, there and in the checkpoint."""
        if self.start != other.end or self.what != other.what:
            return False
        return isinstance(self.what, str) or self.at == other.at + other.end - other.start


class Provenance:
    """The map. One thread at a time."""

    def __init__(self) -> None:
        self._spans: list[Span] = []  # disjoint, by address
        self._starts: list[int] = []

    def store(self, ptr: int, stored: Stored) -> None:
        """All bytes of a stored tensor are at `ptr` now."""
        self._replace([(ptr, ptr + stored.size)], [Span(ptr, ptr + stored.size, stored, 0)])

    def spoil(self, ptr: int, size: int, reason: str) -> None:
        """Something that is no copy wrote these bytes."""
        self._replace([(ptr, ptr + size)], [Span(ptr, ptr + size, reason, 0)])

    def forget(self, ptr: int, size: int) -> None:
        """Nothing is known of these bytes any more: the memory is new."""
        self._replace([(ptr, ptr + size)], [])

    def copy(self, runs: Sequence[Run], *, reason: str) -> None:
        """Bytes moved, all of them read before any is written; `runs` are by destination, which do not overlap.

        What came from unknown bytes is spoiled for `reason`.
        """
        fresh: list[Span] = []
        for dst, src, size in runs:
            at = src
            for span in self.within(src, size):
                if span.start > at:
                    fresh.append(Span(dst + at - src, dst + span.start - src, reason, 0))
                fresh.append(Span(dst + span.start - src, dst + span.end - src, span.what, span.at))
                at = span.end
            if at < src + size:
                fresh.append(Span(dst + at - src, dst + size, reason, 0))
        self._replace([(dst, dst + size) for dst, _, size in runs], fresh)

    def within(self, ptr: int, size: int) -> Iterator[Span]:
        """What is known of these bytes, by address; gaps are unknown."""
        end = ptr + size
        position = max(bisect_right(self._starts, ptr) - 1, 0)
        while position < len(self._spans) and self._spans[position].start < end:
            span = self._spans[position]
            start, stop = max(span.start, ptr), min(span.end, end)
            if start < stop:
                yield span.part(start, stop)
            position += 1

    def _replace(self, cleared: Sequence[tuple[int, int]], fresh: Iterable[Span]) -> None:
        """Empty the ranges `cleared`, by address, and put `fresh` there, in one change of the list."""
        cleared = [one for one in cleared if one[0] < one[1]]
        if not cleared:
            return
        low, high = cleared[0][0], cleared[-1][1]
        # One neighbour on each side, so that what continues it becomes one with it.
        first = max(bisect_left(self._starts, low) - 1, 0)
        last = min(bisect_left(self._starts, high) + 1, len(self._spans))
        kept = _without(self._spans[first:last], cleared)
        spans = _joined(sorted([*kept, *fresh]) if kept else fresh)
        self._spans[first:last] = spans
        self._starts[first:last] = [span.start for span in spans]


def _without(spans: Iterable[Span], cleared: Sequence[tuple[int, int]]) -> list[Span]:
    kept: list[Span] = []
    position = 0
    for span in spans:
        at = span.start
        while position < len(cleared) and cleared[position][1] <= at:
            position += 1
        probe = position
        while probe < len(cleared) and cleared[probe][0] < span.end:
            start, end = cleared[probe]
            if start > at:
                kept.append(span.part(at, start))
            at = max(at, end)
            probe += 1
        if at < span.end:
            kept.append(span.part(at, span.end))
    return kept


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        if joined and span.continues(joined[-1]):
            span = joined.pop()._replace(end=span.end)
        joined.append(span)
    return joined
