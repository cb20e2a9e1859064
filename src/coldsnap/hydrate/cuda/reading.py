"""A stretch of a file into a copy buffer: through the page cache, past it by whole blocks, or out of its pages.

Unlike a destination in host memory, a copy buffer is ours alone: whole blocks around the wanted bytes may land in
it, so O_DIRECT needs no second buffer, and padding is read along and never sent. A block is cut at multiples of its
size, which O_DIRECT's alignment divides; so whole disk blocks around what is wanted of it fit as well.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Protocol

from coldsnap.hydrate import libc
from coldsnap.hydrate.buffered import read_failed, truncated
from coldsnap.hydrate.cuda.slots import Slot

__all__ = ["BufferedStretches", "DirectStretches", "MappedStretches", "StretchReader"]


class StretchReader(Protocol):
    """Reads stretches of one file; several threads may use one at a time."""

    def read(self, slot: Slot, offset: int, size: int) -> int:
        """Fill the slot with the bytes at ``offset``; they begin where the returned number says.

        It has room for the whole aligned block that the bytes lie in. Raises IntegrityError (the file ends
        too early) and HostError (the device failed).
        """
        ...


class MappedStretches:
    """Out of the file's pages in memory, by the processor itself: 48 GB/s with 12 threads where ``preadv`` makes 35.

    ``address`` says where a byte of the file is in this process. See ``mapping`` for when that may be done.
    """

    def __init__(self, address: Callable[[int], int]) -> None:
        self._address = address

    def read(self, slot: Slot, offset: int, size: int) -> int:
        """See ``StretchReader.read``."""
        libc.copy_bytes(slot.address, self._address(offset), size)
        return 0


class BufferedStretches:
    """Through the page cache. ``drop_behind``: let the kernel forget what was read (memory is short)."""

    def __init__(self, fd: int, *, drop_behind: bool) -> None:
        self._fd = fd
        self._drop_behind = drop_behind

    def read(self, slot: Slot, offset: int, size: int) -> int:
        """See ``StretchReader.read``."""
        done = 0
        while done < size:
            try:
                count = os.preadv(self._fd, [slot.view[done:size]], offset + done)
            except OSError as error:
                raise read_failed(error, offset + done) from error
            if count == 0:
                raise truncated(offset + done, offset + size)
            done += count
        if self._drop_behind:
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)
        return 0


class DirectStretches:
    """Past the page cache; ``otherwise`` takes over, for all threads, when the file system refuses a read."""

    def __init__(
        self,
        direct_fd: int,
        *,
        alignment: libc.DirectAlignment,
        refused: threading.Event,
        otherwise: BufferedStretches,
    ) -> None:
        self._fd = direct_fd
        self._block = alignment.offset
        self._refused = refused
        self._otherwise = otherwise

    def read(self, slot: Slot, offset: int, size: int) -> int:
        """See ``StretchReader.read``."""
        if not self._refused.is_set():
            try:
                return self._read(slot.view, offset, size)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise read_failed(error, offset) from error
                self._refused.set()
        return self._otherwise.read(slot, offset, size)

    def _read(self, buffer: memoryview, offset: int, size: int) -> int:
        start = offset // self._block * self._block
        end = -(-(offset + size) // self._block) * self._block
        position = start
        while position < offset + size:
            count = os.preadv(self._fd, [buffer[position - start : end - start]], position)
            if position + count < offset + size:  # not at the end: go on at a block, as the kernel wants
                count = count // self._block * self._block
            if count == 0:
                raise truncated(min(position, offset + size), offset + size)
            position += count
        return offset - start
