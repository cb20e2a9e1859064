"""Copying a stretch of one open file to another. Standard library only."""

from __future__ import annotations

import errno
import os
from typing import Final

__all__ = ["copy_range"]

_BLOCK_BYTES: Final = 1 << 20


def copy_range(source_fd: int, target_fd: int, source: int, target: int, size: int) -> int:
    """Copy ``size`` bytes from one offset to another, and return the offset behind what was written. Raises OSError."""
    while size:
        piece = os.pread(source_fd, min(size, _BLOCK_BYTES), source)
        if not piece:
            raise OSError(errno.EIO, "the file to copy from ends too early")
        view = memoryview(piece)
        while view:
            written = os.pwrite(target_fd, view, target)
            view, target = view[written:], target + written
        source, size = source + len(piece), size - len(piece)
    return target
