"""What goes to a device, cut for the way it takes. Pure.

A *row* is a run of file bytes with one place in memory: a segment, or a slice of one.
A *window* is an aligned stretch of the file with the rows in it: what is registered in one go.
A *block* is a smaller aligned stretch: what one copy buffer carries. Stretches without a wanted byte split
a block, so that they are not read.
A *chain* is a list of blocks that one thread moves in order, so that it can hash a segment while doing so.

Unlike ``segments.plan_pieces`` the cuts follow the file and not the destination, because a device faults no
pages, and because whole blocks suit O_DIRECT. Windows are cut into blocks only when a block is asked for: a pack of
16 GB has 520 rows in windows and 4300 in blocks, and making the latter took 60 ms, a fifth of the whole transfer.

Worked example, blocks of 4 MiB: a pack with a tensor of 6 MiB at offset 0 and one of 8 KiB at 6 MiB gives one
window of two rows, and the blocks [0, 4 MiB) with one row and [4 MiB, 6 MiB + 8 KiB) with two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from coldsnap.core.extents import PAGE_BYTES, padded
from coldsnap.hydrate.segments import Part, Piece, Segment

__all__ = ["Block", "Row", "Window", "blocks_of", "piece_of", "plan_chains", "plan_windows"]

_MAX_GAP_BYTES = 64 * 1024  # reading and dropping this much costs less than another read
_SMALL_BYTES = 256 * 1024  # a smaller segment shares a block with its neighbours in the file


class Row(NamedTuple):
    """``size`` bytes of segment number ``segment``: at ``file_offset`` of the file, for ``ptr`` in memory."""

    file_offset: int
    ptr: int
    size: int
    segment: int


class Block(NamedTuple):
    """``size`` bytes of the file from ``file_offset``, and the rows in them. What is between rows is dropped."""

    file_offset: int
    size: int
    rows: tuple[Row, ...]

    @property
    def payload_bytes(self) -> int:
        """What of it goes to memory."""
        return sum(row.size for row in self.rows)


class Window(NamedTuple):
    """Like a block, but whole pages; the last may reach over the end of the file."""

    file_offset: int
    size: int
    rows: tuple[Row, ...]

    @property
    def payload_bytes(self) -> int:
        """What of it goes to memory."""
        return sum(row.size for row in self.rows)


def plan_windows(segments: Sequence[Segment], *, window_bytes: int) -> tuple[Window, ...]:
    """Every byte of every segment in exactly one row of one window; windows in the order of the file.

    ``window_bytes`` is a multiple of a page, so that no two windows share one. Segments may share file bytes.
    """
    windows = []
    for rows in _stretches(_rows(segments, range(len(segments))), window_bytes):
        start = rows[0].file_offset // PAGE_BYTES * PAGE_BYTES
        end = padded(max(row.file_offset + row.size for row in rows))
        windows.append(Window(start, end - start, rows))
    return tuple(windows)


def blocks_of(rows: Iterable[Row], *, block_bytes: int) -> Iterator[Block]:
    """Rows in the order of the file, as blocks in the same order, each inside one aligned ``block_bytes``."""
    for inside in _stretches(rows, block_bytes):
        run: list[Row] = []
        reach = 0
        for row in inside:
            if run and row.file_offset - reach > _MAX_GAP_BYTES:
                yield Block(run[0].file_offset, reach - run[0].file_offset, tuple(run))
                run, reach = [], 0
            run.append(row)
            reach = max(reach, row.file_offset + row.size)
        yield Block(run[0].file_offset, reach - run[0].file_offset, tuple(run))


def plan_chains(segments: Sequence[Segment], *, block_bytes: int) -> tuple[tuple[Block, ...], ...]:
    """Chains for hashing on the way, the longest first: one segment is hashed by one thread.

    A chain is the blocks of one segment in order, or a single block of several whole small ones.
    """
    small, chains = [], []
    for number, segment in enumerate(segments):
        last = (segment.file_offset + segment.size - 1) // block_bytes
        if segment.size < _SMALL_BYTES and segment.file_offset // block_bytes == last:
            small.append(number)
        else:
            chains.append(tuple(blocks_of(_rows(segments, [number]), block_bytes=block_bytes)))
    chains.extend((block,) for block in blocks_of(_rows(segments, small), block_bytes=block_bytes))
    return tuple(sorted(chains, key=lambda chain: -sum(block.payload_bytes for block in chain)))


def piece_of(block: Block) -> Piece:
    """The same as ``verify`` wants it."""
    parts = (
        Part(segment=row.segment, ptr=row.ptr, size=row.size, skip=row.file_offset - block.file_offset)
        for row in block.rows
    )
    return Piece(file_offset=block.file_offset, size=block.size, parts=tuple(parts))


def _rows(segments: Sequence[Segment], numbers: Iterable[int]) -> list[Row]:
    rows = [Row(segments[n].file_offset, segments[n].ptr, segments[n].size, n) for n in numbers]
    rows.sort(key=lambda row: (row.file_offset, row.size, row.ptr))
    return rows


def _stretches(rows: Iterable[Row], stretch_bytes: int) -> Iterator[tuple[Row, ...]]:
    """Rows in the order of the file, cut at multiples of ``stretch_bytes`` and gathered between them.

    A row that reaches over a multiple lies in several stretches, and so may others that share its bytes: they wait
    in ``later`` until their stretch comes.
    """
    waiting = iter(rows)
    later: list[Row] = []
    following = next(waiting, None)
    while later or following is not None:
        starts = [row.file_offset for row in later]
        if following is not None:
            starts.append(following.file_offset)
        end = (min(starts) // stretch_bytes + 1) * stretch_bytes
        inside: list[Row] = []
        rest: list[Row] = []
        for row in later:
            _cut(row, end, inside, rest)
        while following is not None and following.file_offset < end:
            _cut(following, end, inside, rest)
            following = next(waiting, None)
        inside.sort()
        yield tuple(inside)
        later = rest


def _cut(row: Row, end: int, inside: list[Row], rest: list[Row]) -> None:
    """The bytes of ``row`` before file offset ``end`` go ``inside``, the others to the ``rest``."""
    if row.file_offset >= end:
        rest.append(row)
        return
    size = min(row.size, end - row.file_offset)
    inside.append(row if size == row.size else Row(row.file_offset, row.ptr, size, row.segment))
    if size < row.size:
        rest.append(Row(end, row.ptr + size, row.size - size, row.segment))
