"""Reading pieces past the page cache: O_DIRECT into the destination where that can be done.

O_DIRECT moves whole blocks: file offset, length and address must be multiples of what the file system
asks (``DirectAlignment``). A segment need not be any of that, and not one byte outside it may be
written. So

    file   |....bbbb|BBBBBBBB|BBBBBBBB|bbb.....|      b: head and tail, read as whole blocks into a
    block  0        1        2        3        4         bounce buffer and copied from there
                                                      B: body, read straight into place

and everything through the bounce buffer when the body's address is not aligned, or when the piece has
several parts. The bounce buffer is this reader's own, and is written by nobody else.

A file system may let O_DIRECT be opened and refuse the first read (EINVAL). Then this reader, and all
that share its ``refused`` flag, read through the page cache from there on.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading

from coldsnap.hydrate import libc
from coldsnap.hydrate.buffered import BufferedReader, read_failed, truncated
from coldsnap.hydrate.memory import HostAddressable
from coldsnap.hydrate.segments import Piece

__all__ = ["DirectReader", "open_direct"]

_BOUNCE_BYTES = 4 * 1024 * 1024


def open_direct(fd: int) -> int:
    """Another descriptor of the same open file, with O_DIRECT; the caller closes it.

    The flag belongs to an open file description, which others may share: hence a new one, by way of
    /proc, which also finds files that have no name any more. Raises OSError.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)


class DirectReader:
    """``PieceReader`` past the page cache. Both descriptors stay the caller's."""

    def __init__(
        self,
        direct_fd: int,
        memory: HostAddressable,
        *,
        alignment: libc.DirectAlignment,
        refused: threading.Event,
        otherwise: BufferedReader,
    ) -> None:
        self._fd = direct_fd
        self._memory = memory
        self._alignment = alignment
        self._refused = refused
        self._otherwise = otherwise
        self._bounce: mmap.mmap | None = None
        self._bounce_address = 0

    def read(self, piece: Piece) -> None:
        """See ``PieceReader.read``."""
        if not self._refused.is_set():
            try:
                self._read(piece)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise read_failed(error, piece.file_offset) from error
                self._refused.set()
            else:
                return
        self._otherwise.read(piece)

    def close(self) -> None:
        """See ``PieceReader.close``."""
        self._otherwise.close()
        self._bounce = None  # not closed: the traceback of a failed read may still hold a view of it

    def _read(self, piece: Piece) -> None:
        targets = [(piece.file_offset + part.skip, self._memory.view(part.ptr, part.size)) for part in piece.parts]
        if len(targets) == 1:
            ((offset, view),) = targets
            done = self._read_straight(offset, view)
            if done is not None:
                body_start, body_end = done
                self._read_bounced([(offset, view[: body_start - offset])])
                self._read_bounced([(body_end, view[body_end - offset :])])
                return
        self._read_bounced(targets)

    def _read_straight(self, offset: int, view: memoryview) -> tuple[int, int] | None:
        """Read the body into place; the file offsets between which it is there, None if it cannot be."""
        block = self._alignment.offset
        start, end = -(-offset // block) * block, (offset + len(view)) // block * block
        if end <= start or (libc.address_of(view) + start - offset) % self._alignment.memory:
            return None
        position = start
        while position < end:
            count = os.preadv(self._fd, [view[position - offset : end - offset]], position) // block * block
            if count == 0:  # the end of the file, or close to it: the bounce buffer finds out
                break
            position += count
        return start, position

    def _read_bounced(self, targets: list[tuple[int, memoryview]]) -> None:
        """Fill ``(file offset, view)`` pairs, in file order, by whole blocks and a copy."""
        block = self._alignment.offset
        last = -(-(targets[-1][0] + len(targets[-1][1])) // block) * block
        have_start = have_end = 0  # the part of the file that lies in the bounce buffer
        for offset, view in targets:
            position, end = offset, offset + len(view)
            while position < end:
                if not have_start <= position < have_end:
                    have_start = position // block * block
                    have_end = have_start + self._fill_bounce(have_start, min(last - have_start, _BOUNCE_BYTES))
                    if have_end <= position:
                        raise truncated(have_end, end)
                count = min(end, have_end) - position
                libc.copy_bytes(
                    libc.address_of(view[position - offset :]), self._bounce_address + position - have_start, count
                )
                position += count

    def _fill_bounce(self, offset: int, size: int) -> int:
        if self._bounce is None:
            self._bounce = mmap.mmap(-1, _BOUNCE_BYTES)
            self._bounce_address = libc.address_of(memoryview(self._bounce))
        return os.preadv(self._fd, [memoryview(self._bounce)[:size]], offset)
