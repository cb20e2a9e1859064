"""Reading pieces through the page cache: ``preadv`` straight into the destination.

A piece of several parts is one scattering read; the file's bytes between parts (padding) land in a
scratch buffer of this reader. ``preadv`` restarts after a signal by itself and may return short, so
reading goes on until the piece is full; nothing more to read before that is a truncated file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol

from coldsnap.errors import HostError, IntegrityError
from coldsnap.hydrate.memory import HostAddressable
from coldsnap.hydrate.segments import Piece

__all__ = ["BufferedReader", "PieceReader", "read_failed", "truncated"]


class PieceReader(Protocol):
    """Reads pieces into memory. One reader belongs to one thread at a time.

    ``read`` fills every part of the piece and writes no other byte of memory, or raises IntegrityError
    (the file ends too early), HostError (the device failed) or UsageError (no such memory). After a
    failure the parts hold anything, and reading the piece again is fine.
    """

    def read(self, piece: Piece) -> None:
        """See the class."""
        ...

    def close(self) -> None:
        """Let go of buffers."""
        ...


class BufferedReader:
    """``PieceReader`` through the page cache. ``fd`` stays the caller's."""

    def __init__(self, fd: int, memory: HostAddressable) -> None:
        self._fd = fd
        self._memory = memory
        self._scratch = memoryview(b"")

    def read(self, piece: Piece) -> None:
        """See ``PieceReader.read``."""
        buffers = list(self._buffers(piece))
        position, end = piece.file_offset, piece.file_offset + piece.size
        while position < end:
            try:
                count = os.preadv(self._fd, buffers, position)
            except OSError as error:
                raise read_failed(error, position) from error
            if count == 0:
                raise truncated(position, end)
            position += count
            if position < end:
                buffers = _after(buffers, count)

    def close(self) -> None:
        """See ``PieceReader.close``."""
        self._scratch = memoryview(b"")

    def _buffers(self, piece: Piece) -> Iterator[memoryview]:
        position = 0
        for part in piece.parts:
            if position < part.skip:
                yield self._scratch_of(part.skip - position)
            yield self._memory.view(part.ptr, part.size)
            position = part.skip + part.size

    def _scratch_of(self, size: int) -> memoryview:
        if len(self._scratch) < size:
            self._scratch = memoryview(bytearray(size))
        return self._scratch[:size]


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of ``buffers`` once the first ``count`` bytes are filled."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def truncated(position: int, end: int) -> IntegrityError:
    """The file ends at or before ``position``, where bytes up to ``end`` were promised."""
    return IntegrityError(
        f"the file ends at offset {position}, and bytes up to {end} were promised",
        cure="fetch or write the file again",
        facts={"file_offset": position, "expected_end": end},
    )


def read_failed(error: OSError, position: int) -> HostError:
    """The kernel refused or failed a read at ``position``."""
    return HostError(
        f"reading at file offset {position} failed: {error.strerror}",
        cure="look into the kernel log for the device; the transfer can be tried again",
        facts={"file_offset": position, "errno": error.errno},
    )
