"""Writing extents one after the other into a file, with everything that must be computed on the way.

    caller's thread: copies the sources into blocks of 4 MiB
        |--> whole-file SHA-256
        |--> per-extent digests
        '--> pwrite, but for zeros ---> fdatasync now and then

Each arrow is a thread with a queue. All three read the same private block, so what is hashed is what is
written, even while the source changes; and a block goes back to the pool when all three are done with it. The
whole-file SHA-256 cannot be split, so it sets the pace (about 1 GB/s); on two cores the rest hides behind it.
The disk is kept busy meanwhile: left to itself the kernel would begin to write when the last byte is there, and
the final fsync of a large pack would take as long again.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coldsnap.core.digest import Digest
from coldsnap.core.extents import padded
from coldsnap.store.meter import Meter
from coldsnap.store.sources import Source, chunks_of
from coldsnap.store.staging import write_around_zeros

__all__ = ["BLOCK_BYTES", "CrcTally", "DigestTally", "Tally", "assemble"]

BLOCK_BYTES = 4 << 20
_NUM_BLOCKS = 8
_FLUSH_BYTES = 64 << 20


@dataclass(slots=True)
class _Block:
    data: mmap.mmap
    """Memory of its own that is given back whole. Freed heap may stay in the process, and an engine that exports its
    weights is frozen next: they would be in its image."""

    offset: int = 0
    used: int = 0
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    """(index of the source, start, end) of the source bytes inside ``data``; what is between them is padding."""
    users: int = 0


class Tally(Protocol):
    """Something computed per extent from its bytes in order: ``update`` calls for one extent are consecutive."""

    def update(self, index: int, data: memoryview) -> None:
        """More bytes of the source with this index."""
        ...


class DigestTally:
    """The SHA-256 of each extent; ``done`` is called with it at the end of the extent. Raises what it raises."""

    def __init__(self, sizes: Sequence[int], done: Callable[[int, Digest], None]) -> None:
        self._sizes = sizes
        self._done = done
        self._state = hashlib.sha256()
        self._count = 0

    def update(self, index: int, data: memoryview) -> None:
        self._state.update(data)
        self._count += len(data)
        if self._count == self._sizes[index]:
            self._done(index, Digest.from_hash(self._state))
            self._state = hashlib.sha256()
            self._count = 0


class CrcTally:
    """The CRC-32 of each extent, in ``values``."""

    def __init__(self, num_extents: int) -> None:
        self.values = [0] * num_extents

    def update(self, index: int, data: memoryview) -> None:
        self.values[index] = zlib.crc32(data, self.values[index])


def assemble(fd: int, sources: Sequence[Source], tally: Tally, meter: Meter) -> Digest:
    """Write the sources in order, each padded with zeros to a page, from the start of ``fd``; the file's SHA-256.

    The file must be empty or read as zeros. Raises OSError from writing, what a source or the tally raises,
    and OperationInterrupted. No thread is left when it returns or raises.
    """
    whole = hashlib.sha256()

    def hash_whole(block: _Block) -> None:
        whole.update(memoryview(block.data)[: block.used])

    def hash_parts(block: _Block) -> None:
        view = memoryview(block.data)
        for index, start, end in block.parts:
            tally.update(index, view[start:end])

    with _Flusher(fd) as flusher, _Line((hash_whole, hash_parts, flusher.write), meter) as line:
        filler = _Filler(line, meter)
        for index, source in enumerate(sources):
            for chunk in chunks_of(source):
                filler.add(index, chunk)
            filler.pad(padded(source.size) - source.size)
        filler.flush()
    return Digest.from_hash(whole)


class _Flusher:
    """Writes blocks, and has another thread push them to the disk. Leaving it raises what that thread met."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._dirty_bytes = 0
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="coldsnap-flush", daemon=True)

    def __enter__(self) -> _Flusher:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._wanted.put(False)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def write(self, block: _Block) -> None:
        write_around_zeros(self._fd, memoryview(block.data)[: block.used], block.offset)
        self._dirty_bytes += block.used
        if self._dirty_bytes >= _FLUSH_BYTES and self._wanted.empty():
            self._dirty_bytes = 0
            self._wanted.put(True)

    def _run(self) -> None:
        while self._wanted.get():
            try:
                os.fdatasync(self._fd)
            except OSError as error:  # the kernel tells of a lost write only once, so it must not get lost here
                self._error = error
                return


class _Filler:
    """Copies bytes into blocks and sends full ones down the line."""

    def __init__(self, line: _Line, meter: Meter) -> None:
        self._line = line
        self._meter = meter
        self._offset = 0
        self._block: _Block | None = None

    def add(self, index: int, chunk: memoryview) -> None:
        while chunk:
            block = self._current()
            count = min(len(chunk), BLOCK_BYTES - block.used)
            end = block.used + count
            block.data[block.used : end] = chunk[:count]
            block.parts.append((index, block.used, end))
            block.used = end
            self._send_if_full(block)
            self._meter.advance(count)
            chunk = chunk[count:]

    def pad(self, num_bytes: int) -> None:
        # A page multiple divides a block, so padding never reaches into the next one.
        if num_bytes:
            block = self._current()
            block.data[block.used : block.used + num_bytes] = bytes(num_bytes)
            block.used += num_bytes
            self._send_if_full(block)

    def flush(self) -> None:
        if self._block is not None:
            self._send(self._block)

    def _current(self) -> _Block:
        if self._block is None:
            self._block = self._line.take()
            self._block.offset = self._offset
        return self._block

    def _send_if_full(self, block: _Block) -> None:
        if block.used == BLOCK_BYTES:
            self._send(block)

    def _send(self, block: _Block) -> None:
        self._offset += block.used
        self._block = None
        self._line.send(block)


class _Line:
    """The threads behind the filler. Leaving it waits for all of them and raises the first error of any."""

    def __init__(self, steps: Sequence[Callable[[_Block], None]], meter: Meter) -> None:
        self._meter = meter
        self._free: queue.SimpleQueue[_Block] = queue.SimpleQueue()
        for _ in range(_NUM_BLOCKS):
            self._free.put(_Block(mmap.mmap(-1, BLOCK_BYTES)))
        self._queues: list[queue.SimpleQueue[_Block | None]] = [queue.SimpleQueue() for _ in steps]
        self._count = threading.Lock()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(step, blocks), name="coldsnap-assembly", daemon=True)
            for step, blocks in zip(steps, self._queues, strict=True)
        ]

    def __enter__(self) -> _Line:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._finish()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._meter.stop()
        self._finish()
        if self._errors and self._errors[0] is not error:
            raise self._errors[0] from None

    def _finish(self) -> None:
        for blocks in self._queues:
            blocks.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def take(self) -> _Block:
        block = self._free.get()
        self._raise_if_failed()
        block.used = 0
        block.parts.clear()
        block.users = len(self._queues)
        return block

    def send(self, block: _Block) -> None:
        self._raise_if_failed()
        for blocks in self._queues:
            blocks.put(block)

    def _raise_if_failed(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _run(self, step: Callable[[_Block], None], blocks: queue.SimpleQueue[_Block | None]) -> None:
        while (block := blocks.get()) is not None:
            try:
                if not self._errors:
                    step(block)
            except BaseException as error:  # noqa: BLE001 # handed to the caller's thread
                self._errors.append(error)
            with self._count:
                block.users -= 1
                last = block.users == 0
            if last:
                self._free.put(block)
