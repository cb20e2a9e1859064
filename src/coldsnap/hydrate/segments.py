"""What is to be moved: segments, the source they come from, and the pieces that threads read.

A *segment* binds bytes of stable memory to bytes of a file. A *piece* is what one thread reads in one
go: a slice of a large segment, or several small segments that lie close together in the file. Pure.

Pieces of a large segment are cut where the destination address is a multiple of the piece size, so that
no two threads fault the same huge page. In a pack, whose offsets are multiples of 4096, that also cuts
the file at multiples of 4096 whenever the destination itself is one, as O_DIRECT wants.

Worked example, pieces of 4 MiB: a segment of 9 MiB at 0x50000010_0000 becomes 3, 4 and 2 MiB; ten
norm weights of 8 KiB, each in its own 4096-padded slot, become one piece of ten parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from coldsnap.core.digest import Digest
from coldsnap.core.extents import Allocation
from coldsnap.errors import Problem
from coldsnap.hydrate.extents import ExtentsProof

__all__ = [
    "PIECE_BYTES",
    "ExtentsSource",
    "Part",
    "Piece",
    "ProvedSource",
    "Segment",
    "Source",
    "UnprovedSource",
    "plan_pieces",
    "segment_problems",
]

PIECE_BYTES = 4 * 1024 * 1024
"""Measured with ``host``'s figures: 1 MiB 5.3 GB/s, 4 MiB 7.1, 8 MiB 5.8-7.2; smaller ones balance better."""

_SMALL_BYTES = 256 * 1024  # a smaller segment shares a read with its neighbours in the file
_MAX_GAP_BYTES = 16 * 1024  # reading and dropping this much costs less than another system call
_MAX_PARTS = 256  # with a gap beside each part, half of what one preadv takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """``size`` bytes at ``ptr`` that are the file's bytes from ``file_offset``; ``sha256`` is of them."""

    ptr: int
    size: int
    file_offset: int
    sha256: Digest | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvedSource:
    """An open file whose content somebody has proved; segments are read without another check.

    ``evidence`` says how (``full-sha256``, ``extents-sha256``, a validation record). Whoever makes one
    vouches for it; there is no other way to leave the verification out. ``fd`` stays the caller's.
    """

    fd: int
    bytes: int
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnprovedSource:
    """An open file of ``bytes`` bytes about which nothing is known; every segment is verified as it is read."""

    fd: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtentsSource:
    """An open file about which nothing is known, with bytes of extents that are proved as they become complete.

    Other bytes of the same extents may come from other files; ``proof`` ends with the verdict on all of them.
    """

    fd: int
    bytes: int
    proof: ExtentsProof


Source = ProvedSource | UnprovedSource | ExtentsSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The slice of segment number ``segment`` that one piece carries; ``skip`` bytes into the piece."""

    segment: int
    ptr: int
    size: int
    skip: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """``size`` bytes of the file from ``file_offset``, and where they go. Bytes between parts are dropped."""

    file_offset: int
    size: int
    parts: tuple[Part, ...]


def segment_problems(
    segments: Sequence[Segment], allocations: Sequence[Allocation], *, source_bytes: int, need_digest: bool
) -> Iterator[Problem]:
    """Everything that forbids a transfer: outside the file or the memory, overlapping, or no digest.

    Two segments may share file bytes (tied weights), never a byte of memory. ``allocations`` by address.
    """
    for number, segment in enumerate(segments):
        name = f"segments[{number}]"
        if segment.size <= 0:
            yield Problem(field=f"{name}.size", message="must be positive", value=str(segment.size))
            continue
        if segment.file_offset < 0 or segment.file_offset + segment.size > source_bytes:
            yield Problem(
                field=f"{name}.file_offset",
                message=f"is outside the file's {source_bytes} bytes",
                value=f"{segment.size} bytes at {segment.file_offset}",
                cure="use the manifest that belongs to this file",
            )
        if need_digest and segment.sha256 is None:
            yield Problem(
                field=f"{name}.sha256",
                message="is missing, and the source is not proved",
                value="None",
                cure="give the digest, or admit the file first and pass it as proved",
            )
    by_address = sorted((number for number, s in enumerate(segments) if s.size > 0), key=lambda n: segments[n].ptr)
    yield from _memory_problems(segments, by_address, allocations)


def _memory_problems(
    segments: Sequence[Segment], by_address: Sequence[int], allocations: Sequence[Allocation]
) -> Iterator[Problem]:
    remaining = iter(allocations)
    allocation = next(remaining, None)
    for number in by_address:
        segment = segments[number]
        while allocation is not None and allocation.ptr + allocation.size <= segment.ptr:
            allocation = next(remaining, None)
        if (
            allocation is None
            or segment.ptr < allocation.ptr
            or segment.ptr + segment.size > allocation.ptr + allocation.size
        ):
            yield Problem(
                field=f"segments[{number}].ptr",
                message="is not inside one allocation",
                value=f"{segment.size} bytes at 0x{segment.ptr:x}",
                cure="reserve the allocations of the manifest first",
            )
    furthest = None
    for before, number in pairwise(by_address):
        if furthest is None or _end(segments[before]) > _end(segments[furthest]):
            furthest = before
        if segments[number].ptr < _end(segments[furthest]):
            yield Problem(
                field=f"segments[{number}].ptr",
                message=f"overlaps segments[{furthest}], which ends at 0x{_end(segments[furthest]):x}",
                value=f"0x{segments[number].ptr:x}",
            )


def _end(segment: Segment) -> int:
    return segment.ptr + segment.size


def plan_pieces(segments: Sequence[Segment], *, piece_bytes: int = PIECE_BYTES) -> tuple[Piece, ...]:
    """Cut and gather sound segments into pieces, in the order of the file.

    Every byte of every segment is in exactly one part of one piece, and the parts of a segment come in
    the order of its bytes.
    """
    pieces: list[Piece] = []
    gathered: list[int] = []
    for number in sorted(range(len(segments)), key=lambda n: (segments[n].file_offset, n)):
        segment = segments[number]
        if segment.size >= _SMALL_BYTES or segment.size >= piece_bytes:
            pieces.extend(_cut(number, segment, piece_bytes))
            continue
        if gathered and not _fits(segments, gathered, segment, piece_bytes):
            pieces.append(_gather(segments, gathered))
            gathered = []
        gathered.append(number)
    if gathered:
        pieces.append(_gather(segments, gathered))
    return tuple(sorted(pieces, key=lambda piece: piece.file_offset))


def _cut(number: int, segment: Segment, piece_bytes: int) -> Iterator[Piece]:
    ptr, end = segment.ptr, segment.ptr + segment.size
    while ptr < end:
        size = min(end, (ptr // piece_bytes + 1) * piece_bytes) - ptr
        part = Part(segment=number, ptr=ptr, size=size, skip=0)
        yield Piece(file_offset=segment.file_offset + ptr - segment.ptr, size=size, parts=(part,))
        ptr += size


def _fits(segments: Sequence[Segment], gathered: Sequence[int], segment: Segment, piece_bytes: int) -> bool:
    last = segments[gathered[-1]]
    gap = segment.file_offset - (last.file_offset + last.size)
    total = segment.file_offset + segment.size - segments[gathered[0]].file_offset
    return 0 <= gap <= _MAX_GAP_BYTES and total <= piece_bytes and len(gathered) < _MAX_PARTS


def _gather(segments: Sequence[Segment], gathered: Sequence[int]) -> Piece:
    start = segments[gathered[0]].file_offset
    end = segments[gathered[-1]].file_offset + segments[gathered[-1]].size
    parts = tuple(
        Part(segment=n, ptr=segments[n].ptr, size=segments[n].size, skip=segments[n].file_offset - start)
        for n in gathered
    )
    return Piece(file_offset=start, size=end - start, parts=parts)
