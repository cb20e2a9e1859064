"""A file mapped as a whole, for those who copy out of its pages themselves.

A byte that the file lost while it is mapped is a SIGBUS, and the end of the process: no wrong answer, and no error
either. So files are mapped only when they are proved and lie in memory, where nobody but us writes and truncates.
"""

from __future__ import annotations

import os

from coldsnap.core.extents import padded
from coldsnap.hydrate import libc

__all__ = ["MappedFile"]


class MappedFile:
    """Addresses for a file's bytes, until ``close``. ``fd`` stays the caller's. Raises OSError.

    ``writable``: for drivers that lock only pages this process may write; the file is opened once more for that, and
    nothing is written.
    """

    def __init__(self, fd: int, *, file_bytes: int, writable: bool = False) -> None:
        self.mapped_bytes = padded(file_bytes)
        if not writable:
            self._base = libc.map_file(fd, 0, self.mapped_bytes, writable=False)
            return
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._base = libc.map_file(again, 0, self.mapped_bytes, writable=True)
        finally:
            os.close(again)

    def address(self, file_offset: int) -> int:
        """Where a byte of the file is in this process."""
        return self._base + file_offset

    def close(self) -> None:
        """Unmap. Idempotent."""
        size, self.mapped_bytes = self.mapped_bytes, 0
        if size:
            libc.unmap(self._base, size)

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
