"""Holes in files: bytes that are zero and on no disk. Into memory that is zero already they need not be moved.

Where holes are the kernel says (SEEK_DATA, SEEK_HOLE), for the open file as it is then; whoever moves bytes looks at
the file's identity before and after. A file system that knows no holes says that everything is data.

Small holes are read like data: reading and copying 64 KiB of zeros takes about as long as one more copy does.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from coldsnap.core.extents import PAGE_BYTES, padded
from coldsnap.hydrate.segments import Segment

__all__ = ["LEAST_HOLE_BYTES", "around_holes", "data_ranges"]

LEAST_HOLE_BYTES = 1 << 20


def data_ranges(fd: int, start: int, end: int) -> list[tuple[int, int]]:
    """The (start, end) inside ``[start, end)`` that are not holes worth leaving out, in order, cut at whole pages.

    Moves the file's own offset. Raises OSError when the file cannot be read.
    """
    found: list[tuple[int, int]] = []
    for begin, stop in _data(fd, start, end):
        begin, stop = max(start, begin - begin % PAGE_BYTES), min(end, padded(stop))
        before = found[-1][1] if found else start
        if begin - before < LEAST_HOLE_BYTES:
            begin = found.pop()[0] if found else start
        found.append((begin, stop))
    if found and end - found[-1][1] < LEAST_HOLE_BYTES:
        found[-1] = (found[-1][0], end)
    return found if found or end - start >= LEAST_HOLE_BYTES else [(start, end)]


def around_holes(segments: Sequence[Segment], data: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """What of ``segments`` is in ``data`` (sorted, disjoint). A segment that is cut has no digest any more. Pure."""
    starts = [start for start, _ in data]
    return tuple(part for segment in segments for part in _parts(segment, data, starts))


def _parts(segment: Segment, data: Sequence[tuple[int, int]], starts: Sequence[int]) -> Iterator[Segment]:
    offset, end = segment.file_offset, segment.file_offset + segment.size
    for index in range(max(0, bisect_right(starts, offset) - 1), len(data)):
        first, last = max(offset, data[index][0]), min(end, data[index][1])
        if data[index][0] >= end:
            return
        if (first, last) == (offset, end):
            yield segment
        elif first < last:
            yield Segment(ptr=segment.ptr + first - offset, size=last - first, file_offset=first)


def _data(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Every run of data, as the kernel tells it."""
    position = start
    while position < end:
        try:
            begin = os.lseek(fd, position, os.SEEK_DATA)
            stop = os.lseek(fd, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            begin, stop = position, end  # no file system that tells
        if begin >= end:
            return
        yield begin, min(stop, end)
        position = stop
