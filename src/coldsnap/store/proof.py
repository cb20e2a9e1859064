"""Proving that an open file holds what a digest promises: by its whole SHA-256, or extent by extent.

SHA-256 of a whole file cannot be computed in parallel; that of its extents can. Both prove the same bytes, given
that whoever names the extents is bound to the pack's digest (a manifest that an artifact's digests bind):
the extents' digests, zero padding between and after them, and the size leave no byte of a pack open.

The file is read with ``pread`` and never mapped, so that a file truncated meanwhile is an error and no signal.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from coldsnap.core.digest import Digest
from coldsnap.core.extents import PAGE_BYTES, padded
from coldsnap.errors import PayloadRejected, Problem
from coldsnap.store.buffers import transit_buffer
from coldsnap.store.meter import Meter, run_all

__all__ = ["CHUNK_BYTES", "FileExtent", "digest_of_file", "extent_faults", "layout_faults"]

CHUNK_BYTES = 4 << 20
_TASK_BYTES = 32 << 20

Sink = Callable[[memoryview, int], None]
"""Takes bytes and their offset in the file; the bytes are good until it returns."""


class FileExtent(NamedTuple):
    """Where an extent is in its file, and its digest. A plain (offset, size, sha256) does as well."""

    offset: int
    size: int
    sha256: Digest


def digest_of_file(fd: int, size_bytes: int, meter: Meter) -> Digest:
    """The SHA-256 of the first ``size_bytes``, read ahead of the hashing. Raises PayloadRejected when it ends early."""
    state = hashlib.sha256()
    buffers = [transit_buffer(min(CHUNK_BYTES, size_bytes)) for _ in range(2)]
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="coldsnap-read") as reader:
        pending = reader.submit(_chunk, fd, buffers[0], 0, size_bytes) if size_bytes else None
        offset = 0
        while pending is not None:
            chunk = pending.result()
            offset += len(chunk)
            following = buffers[offset // CHUNK_BYTES % 2]
            pending = reader.submit(_chunk, fd, following, offset, size_bytes) if offset < size_bytes else None
            state.update(chunk)
            meter.advance(len(chunk))
    return Digest.from_hash(state)


def layout_faults(extents: Sequence[tuple[int, int, Digest]], size_bytes: int) -> list[Problem]:
    """Why these extents are not the complete layout of a file of ``size_bytes``; empty when they are."""
    problems: list[Problem] = []
    end = 0
    for index, (offset, size, _) in enumerate(extents):
        if size < 1 or offset != end:
            problems.append(
                Problem(
                    field=f"extents[{index}]",
                    message=f"must start at {end} and hold at least one byte",
                    value=f"{offset}, {size} bytes",
                    cure="take the extents from the manifest that belongs to this file",
                )
            )
        end = offset + padded(max(size, 0))
    if end != size_bytes:
        problems.append(
            Problem(
                field="extents",
                message=f"do not end where the file does, at {size_bytes}",
                value=str(end),
                cure="take the extents from the manifest that belongs to this file",
            )
        )
    return problems


def extent_faults(
    fd: int,
    extents: Sequence[tuple[int, int, Digest]],
    *,
    num_threads: int,
    meter: Meter,
    sink: Sink | None = None,
) -> list[Problem]:
    """Every extent whose bytes have another digest, or whose padding is not zero. In file order.

    ``extents`` are a complete layout (:func:`layout_faults`). ``sink`` is given every byte of the file, with its
    offset, before it is hashed, by many threads and in no order. Raises PayloadRejected when the file ends early.
    """
    # The longest first: an extent is hashed by one thread, and a large one that begins last is hashed alone.
    runs = sorted(_runs(extents), key=lambda run: extents[run[0]][0] - _end(extents[run[1] - 1]))
    tasks = [partial(_run_faults, fd, extents, first, last, meter, sink) for first, last in runs]
    found = run_all(tasks, num_threads=num_threads, meter=meter)
    return [fault for _, faults in sorted(zip(runs, found, strict=True), key=lambda one: one[0]) for fault in faults]


def read_exactly(fd: int, buffer: memoryview, offset: int) -> memoryview:
    """Fill ``buffer`` from ``offset``. Raises PayloadRejected when the file ends before that."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise PayloadRejected(
                "changed_during_validation",
                f"the file became shorter while it was read: nothing at byte {offset + done}",
                cure="find what writes to it, then try again",
            )
        done += count
    return buffer


def _chunk(fd: int, buffer: memoryview, offset: int, size_bytes: int) -> memoryview:
    return read_exactly(fd, buffer[: min(CHUNK_BYTES, size_bytes - offset)], offset)


def _runs(extents: Sequence[tuple[int, int, Digest]]) -> Iterator[tuple[int, int]]:
    """Index ranges of neighbouring extents that make about ``_TASK_BYTES`` of file each."""
    first = 0
    for index, (offset, size, _) in enumerate(extents):
        if offset + size - extents[first][0] >= _TASK_BYTES:
            yield first, index + 1
            first = index + 1
    if first < len(extents):
        yield first, len(extents)


def _end(extent: tuple[int, int, Digest]) -> int:
    offset, size, _ = extent
    return offset + padded(size)


def _run_faults(
    fd: int, extents: Sequence[tuple[int, int, Digest]], first: int, last: int, meter: Meter, sink: Sink | None
) -> list[Problem]:
    start = extents[first][0]
    end = _end(extents[last - 1])
    window = _Window(fd, start, end, meter, sink)
    faults: list[Problem] = []
    for index in range(first, last):
        offset, size, digest = extents[index]
        state = hashlib.sha256()
        for part in window.take(size):
            state.update(part)
        found = state.hexdigest()
        if found != digest.hex:
            faults.append(
                Problem(
                    field=f"extents[{index}]",
                    message=f"{size} bytes at offset {offset} are not {digest}",
                    value=f"sha256:{found}",
                    cure="fetch or write the file again",
                )
            )
        if any(bytes(part).count(0) != len(part) for part in window.take(-size % PAGE_BYTES)):
            faults.append(
                Problem(
                    field=f"extents[{index}]",
                    message=f"the padding after byte {offset + size} is not zero",
                    cure="fetch or write the file again",
                )
            )
    return faults


class _Window:
    """Reads a region of a file once, front to back, in large pieces, and hands it out in small ones."""

    def __init__(self, fd: int, start: int, end: int, meter: Meter, sink: Sink | None) -> None:
        self._fd = fd
        self._next, self._end = start, end
        self._buffer = transit_buffer(min(CHUNK_BYTES, end - start))
        self._chunk = self._buffer[:0]
        self._meter = meter
        self._sink = sink

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """The next ``num_bytes``, in parts that are good until the next part is asked for."""
        while num_bytes:
            if not self._chunk:
                size = min(len(self._buffer), self._end - self._next)
                self._chunk = read_exactly(self._fd, self._buffer[:size], self._next)
                if self._sink is not None:
                    self._sink(self._chunk, self._next)
                self._next += size
                self._meter.advance(size)
            part, self._chunk = self._chunk[:num_bytes], self._chunk[num_bytes:]
            num_bytes -= len(part)
            yield part
