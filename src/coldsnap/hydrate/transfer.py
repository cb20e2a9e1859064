"""From a file into stable memory, and the only function that does it.

Several threads take pieces in the order of the file; each piece is read straight into its destination
(``direct`` or ``buffered``, see ``choose``). Bytes of an unproved source are hashed by further threads
while reading goes on. Device memory has ways of its own, in ``cuda.transfer``.

What holds afterwards, whatever happened:

- no thread of the transfer runs any more, and no byte outside the segments was written;
- the memory is mapped as it was: nothing here maps, unmaps or moves;
- after an error the segments hold anything, and the same call can be made again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from coldsnap.core.extents import PAGE_BYTES
from coldsnap.errors import IntegrityError, InvalidDocument, UsageError
from coldsnap.hydrate import libc
from coldsnap.hydrate.buffered import BufferedReader, PieceReader, read_failed
from coldsnap.hydrate.choose import FileFacts, PathChoice, TransferPath, choose_path, file_facts, num_threads_for
from coldsnap.hydrate.cuda.registered import RegisteredFile
from coldsnap.hydrate.cuda.transfer import BLOCK_BYTES, fill_device
from coldsnap.hydrate.cuda.window import DeviceWindow
from coldsnap.hydrate.direct import DirectReader, open_direct
from coldsnap.hydrate.extents import ExtentsProof
from coldsnap.hydrate.holes import around_holes, data_ranges
from coldsnap.hydrate.memory import HostAddressable, StableMemory, host_addressable
from coldsnap.hydrate.scan import hash_ranges, read_chunks
from coldsnap.hydrate.segments import (
    PIECE_BYTES,
    ExtentsSource,
    Piece,
    ProvedSource,
    Segment,
    Source,
    UnprovedSource,
    plan_pieces,
    segment_problems,
)
from coldsnap.hydrate.verify import Verifier
from coldsnap.hydrate.workers import Progress, Stop, num_cores, run_together

__all__ = [
    "ExtentsProof",
    "ExtentsSource",
    "ProvedSource",
    "Segment",
    "Source",
    "TransferPath",
    "TransferReport",
    "UnprovedSource",
    "hash_ranges",
    "hydrate_file",
    "read_chunks",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """What a transfer did.

    ``num_threads`` read; ``verified_bytes`` is ``bytes`` for an unproved source and 0 for a proved one. For a source
    of extents it is the bytes of those that became complete, right or wrong: the proof has the verdict.
    ``registered_bytes`` went to a device straight from the file's own pages. ``hole_bytes`` of ``bytes`` were zero on
    both sides and were not moved.
    """

    bytes: int
    seconds: float
    path: TransferPath
    reason: str
    num_threads: int
    verified_bytes: int
    registered_bytes: int = 0
    hole_bytes: int = 0


def hydrate_file(
    source: Source,
    segments: Sequence[Segment],
    memory: StableMemory,
    *,
    num_threads: int = 0,
    path: TransferPath | None = None,
    piece_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
    registered: RegisteredFile | None = None,
    zeroed: bool = False,
) -> TransferReport:
    """Fill ``segments`` of mapped ``memory`` from ``source``.

    ``num_threads`` 0 takes the default of the I/O path; ``path`` None leaves the path to the rule;
    ``piece_bytes``, a multiple of 4096, is what one thread reads in one go; None: what suits the memory.
    ``progress`` is told the bytes read since its last call, from other threads, one call at a time.
    Setting ``cancel`` ends the transfer after the pieces in hand. ``registered``: the source's pages, for device
    memory, if they were registered ahead. ``zeroed``: whoever calls knows that all of the segments' memory is zero, as
    it is after a ``remap``, so that large holes of a proved file are left alone.

    Raises UsageError (memory unmapped, piece size), InvalidDocument (every segment that is outside the file or the
    memory, overlaps another or lacks a needed digest), IntegrityError (wrong size, truncated, changed
    while it was read, or bytes that do not match a digest, with file offset and address), HostError
    (the device failed) and OperationInterrupted (cancelled).
    """
    begun = time.monotonic()
    if not memory.mapped:
        raise UsageError("memory is unmapped: nothing can be read into it", cure="remap it first")
    if piece_bytes is not None and (piece_bytes <= 0 or piece_bytes % PAGE_BYTES):
        raise UsageError(
            f"piece_bytes must be a positive multiple of {PAGE_BYTES}, not {piece_bytes}",
            facts={"piece_bytes": piece_bytes},
        )
    before = _identity(source)
    proof = source.proof if isinstance(source, ExtentsSource) else None
    unproved = isinstance(source, UnprovedSource)
    problems = tuple(segment_problems(segments, memory.allocations, source_bytes=source.bytes, need_digest=unproved))
    if proof is not None and not problems:
        problems = tuple(proof.claim([(segment.ptr, segment.size) for segment in segments]))
    if problems:
        raise InvalidDocument("segments to hydrate", problems)
    wanted = _wanted(source, segments, zeroed=zeroed)
    moving, facts = wanted.segments, wanted.facts
    stop, told = Stop(cancel), Progress(progress)
    if wanted.hole_bytes:
        told.add(wanted.hole_bytes)
    if isinstance(memory, DeviceWindow):
        moved = fill_device(
            source,
            moving,
            memory,
            facts,
            num_threads=num_threads,
            wanted=path,
            block_bytes=piece_bytes or BLOCK_BYTES,
            stop=stop,
            told=told,
            registered=registered,
        )
        done = _Done(moved.choice, moved.num_threads, moved.verified_bytes, moved.registered_bytes)
    else:
        done = _fill_host(
            source,
            moving,
            host_addressable(memory),
            facts,
            num_threads=num_threads,
            wanted=path,
            piece_bytes=piece_bytes or PIECE_BYTES,
            stop=stop,
            told=told,
        )
    if _identity(source) != before:
        raise IntegrityError(
            "the file changed while it was read", cure="keep writers away from it and try again", facts={"was": before}
        )
    return TransferReport(
        bytes=sum(segment.size for segment in segments),
        seconds=time.monotonic() - begun,
        path=done.choice.path,
        reason=done.choice.reason,
        num_threads=done.num_threads,
        verified_bytes=done.verified_bytes,
        registered_bytes=done.registered_bytes,
        hole_bytes=wanted.hole_bytes,
    )


class _Wanted(NamedTuple):
    """What is to be moved, what the kernel says of it, and what is left out because it is zero."""

    segments: Sequence[Segment]
    facts: FileFacts
    hole_bytes: int


class _Done(NamedTuple):
    choice: PathChoice
    num_threads: int
    verified_bytes: int
    registered_bytes: int


def _fill_host(
    source: Source,
    segments: Sequence[Segment],
    memory: HostAddressable,
    facts: FileFacts,
    *,
    num_threads: int,
    wanted: TransferPath | None,
    piece_bytes: int,
    stop: Stop,
    told: Progress,
) -> _Done:
    pieces = plan_pieces(segments, piece_bytes=piece_bytes)
    choice = choose_path(facts, wanted=wanted)
    cores = num_cores()
    readers = min(num_threads_for(choice.path, num_cores=cores, asked=num_threads), len(pieces))
    verifier = None
    if not isinstance(source, ProvedSource):
        proof = source.proof if isinstance(source, ExtentsSource) else None
        hashers = min(num_threads or cores, len(segments))
        pieces = _largest_first(pieces, segments)
        verifier = Verifier(segments, pieces, memory, num_readers=readers, num_hashers=hashers, proof=proof)
    with _Readers(source.fd, memory, choice, facts.direct) as made:
        queue = _Pieces(pieces)
        jobs = [partial(_read_pieces, queue, made.reader, stop, told, verifier) for _ in range(readers)]
        if verifier is not None:
            # After the readers: one that cannot be started must leave no hasher waiting for it.
            jobs += [partial(verifier.hash_arrived, stop) for _ in range(verifier.num_hashers)]
        run_together(jobs, stop=stop, name="hydrate")
    return _Done(made.choice, readers, verifier.verified_bytes if verifier else 0, 0)


def _largest_first(pieces: Sequence[Piece], segments: Sequence[Segment]) -> tuple[Piece, ...]:
    """Pieces of large segments before those of small ones, else in the order of the file.

    One segment is hashed by one thread at a time: a large one that arrives last is hashed alone.
    """
    return tuple(sorted(pieces, key=lambda piece: -max(segments[part.segment].size for part in piece.parts)))


def _identity(source: Source) -> tuple[int, int, int, int]:
    """Device, inode, size and mtime of the open file. Raises IntegrityError when the size is not the promised one."""
    try:
        facts = os.fstat(source.fd)
    except OSError as error:
        raise read_failed(error, 0) from error
    if facts.st_size != source.bytes:
        raise IntegrityError(
            f"the file has {facts.st_size} bytes, and {source.bytes} were promised",
            cure="fetch or write the file again",
            facts={"bytes": facts.st_size, "expected_bytes": source.bytes},
        )
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _wanted(source: Source, segments: Sequence[Segment], *, zeroed: bool) -> _Wanted:
    start = min((segment.file_offset for segment in segments), default=0)
    end = max((segment.file_offset + segment.size for segment in segments), default=0)
    ranges, moving = [(start, end)], segments
    if zeroed and isinstance(source, ProvedSource):
        try:
            ranges = data_ranges(source.fd, start, end)
        except OSError as error:
            raise read_failed(error, start) from error
        moving = around_holes(segments, ranges)
    total, left = (sum(segment.size for segment in some) for some in (segments, moving))
    return _Wanted(moving, file_facts(source.fd, ranges, wanted_bytes=left), total - left)


class _Readers:
    """Makes the readers of one transfer, and knows which path they really took."""

    def __init__(
        self, fd: int, memory: HostAddressable, choice: PathChoice, alignment: libc.DirectAlignment | None
    ) -> None:
        self._fd = fd
        self._memory = memory
        self._choice = choice
        self._alignment = alignment
        self._direct_fd: int | None = None
        self._refused = threading.Event()

    def __enter__(self) -> _Readers:
        if self._choice.path is TransferPath.DIRECT:
            try:
                self._direct_fd = open_direct(self._fd)
            except OSError as error:
                self._choice = PathChoice(
                    path=TransferPath.BUFFERED, reason=f"O_DIRECT cannot be opened here: {error.strerror}"
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def reader(self) -> PieceReader:
        buffered = BufferedReader(self._fd, self._memory)
        if self._direct_fd is None or self._alignment is None:
            return buffered
        return DirectReader(
            self._direct_fd, self._memory, alignment=self._alignment, refused=self._refused, otherwise=buffered
        )

    @property
    def choice(self) -> PathChoice:
        if self._refused.is_set():
            return PathChoice(path=TransferPath.BUFFERED, reason="the file system refused an O_DIRECT read (EINVAL)")
        return self._choice


class _Pieces:
    """Hands each piece to one thread, in order."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._lock = threading.Lock()
        self._remaining: Iterator[Piece] = iter(pieces)

    def take(self) -> Piece | None:
        with self._lock:
            return next(self._remaining, None)


def _read_pieces(
    queue: _Pieces, make: Callable[[], PieceReader], stop: Stop, told: Progress, verifier: Verifier | None
) -> None:
    """The work of one reading thread."""
    try:
        with contextlib.closing(make()) as reader:
            while not stop.requested() and (piece := queue.take()) is not None:
                reader.read(piece)
                if verifier is not None:
                    verifier.arrived(piece)
                told.add(sum(part.size for part in piece.parts))
    finally:
        if verifier is not None:
            verifier.reader_done()
