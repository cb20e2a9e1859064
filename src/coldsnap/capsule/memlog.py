"""A log that lives in memory: a program killed at any moment leaves no file, and its last lines are still ours."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["MemoryLog", "memory_log"]

_LIMIT_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLog:
    """A file without a name that a child writes to."""

    fd: int

    def text(self) -> str:
        """What was written, at most the last 4 MiB."""
        size = os.fstat(self.fd).st_size
        return os.pread(self.fd, _LIMIT_BYTES, max(0, size - _LIMIT_BYTES)).decode(errors="replace")


@contextlib.contextmanager
def memory_log() -> Iterator[MemoryLog]:
    """An empty log, gone at the end of the block."""
    fd = os.memfd_create("coldsnap-criu-log", os.MFD_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # several writers, none of which overwrites another
        yield MemoryLog(fd=fd)
    finally:
        os.close(fd)
