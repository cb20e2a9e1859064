"""Telling the kernel to begin with the disk's part of the work while more bytes are still on their way."""

from __future__ import annotations

import ctypes

__all__ = ["begin_writeback"]

_SYNC_FILE_RANGE_WRITE = 2

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def begin_writeback(fd: int, offset: int, size: int) -> None:
    """Have ``size`` bytes from ``offset`` of an open file written to its disk soon, and wait for nothing but a queue.

    A hint that makes nothing durable: an fsync that comes later finds less to do. A file system that cannot do it, or
    a descriptor that is no file, is left as it is.
    """
    _LIBC.sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE)
