"""Files on their way: a temporary name that nothing takes for the real one, and a lock that shows its writer lives.

A staged file is created empty and exclusively, locked with ``flock``, and only then filled. Should its writer
be killed, the kernel lets go of the lock, and whoever finds a ``*.partial`` file that it can lock may remove
it. The writer checks after locking that its name still leads to its file, so a sweep that came between
creating and locking costs a retry and never the file.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from coldsnap.errors import HostError
from coldsnap.store.faults import translated
from coldsnap.store.locks import is_named, try_hold

__all__ = [
    "HOLE_BYTES",
    "PARTIAL_SUFFIX",
    "StagedFile",
    "leftovers",
    "remove_leftovers",
    "stage_file",
    "sync_folder",
    "write_all",
    "write_around_zeros",
]

PARTIAL_SUFFIX = ".partial"
HOLE_BYTES = 64 << 10
_ZEROS = bytes(HOLE_BYTES)
_NAME_CHARACTERS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedFile:
    """An open, locked, private file under a temporary name. ``expected_bytes`` are reserved on disk."""

    fd: int
    path: Path
    expected_bytes: int


@contextmanager
def stage_file(folder: Path, expected_bytes: int, *, stem: str = "") -> Iterator[StagedFile]:
    """A fresh file ``<stem>.<random>.partial`` in ``folder`` with ``expected_bytes`` reserved, removed on the way out.

    Whoever renames it away keeps it. Raises OutOfSpace, with nothing left behind, when the bytes do not fit.
    """
    fd, path = _create(folder, stem[:_NAME_CHARACTERS])
    try:
        if expected_bytes:
            with translated(f"reserve {expected_bytes} bytes for", path):
                os.posix_fallocate(fd, 0, expected_bytes)
        yield StagedFile(fd=fd, path=path, expected_bytes=expected_bytes)
    finally:
        try:
            if is_named(fd, path):
                path.unlink()
        finally:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _create(folder: Path, stem: str) -> tuple[int, Path]:
    for _ in range(100):
        path = folder / f"{stem}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        with translated("create", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # a sweep holds it for a moment at most
                if is_named(fd, path):
                    return fd, path
            except BaseException:
                path.unlink(missing_ok=True)
                os.close(fd)
                raise
            os.close(fd)
    raise HostError(f"temporary files in {folder} are removed as fast as they are made", cure="find what removes them")


def remove_leftovers(folder: Path, *, stem: str | None = None) -> tuple[Path, ...]:
    """Remove the temporary files of dead writers in ``folder`` (only those of ``stem``, when given)."""
    removed: list[Path] = []
    for path in leftovers(folder, stem=stem):
        with try_hold(path) as free:
            if free:
                path.unlink(missing_ok=True)
                removed.append(path)
    return tuple(removed)


def leftovers(folder: Path, *, stem: str | None = None) -> tuple[Path, ...]:
    """Every file in ``folder`` that bears a temporary name, its writer dead or alive, in name order."""
    beginning = "" if stem is None else stem[:_NAME_CHARACTERS] + "."
    with translated("list", folder):
        files = sorted(folder.iterdir())
    return tuple(
        one
        for one in files  # folders with such names are scratch folders, which those who make them collect
        if one.name.endswith(PARTIAL_SUFFIX)
        and one.name.startswith(beginning)
        and one.is_file()
        and not one.is_symlink()
    )


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, however many calls that takes. Raises OSError."""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def write_around_zeros(fd: int, data: bytes | memoryview, offset: int) -> None:
    """As :func:`write_all`, where the file reads as zeros already: blocks of zeros are left out, and stay holes.

    Blocks are 64 KiB and begin at ``offset``, which suits file systems when it is a multiple of that.
    """
    view, start = memoryview(data), 0
    for at in range(0, len(view), HOLE_BYTES):
        end = min(at + HOLE_BYTES, len(view))
        if _is_zero(view[at:end]):
            write_all(fd, view[start:at], offset + start)
            start = end
    write_all(fd, view[start:], offset + start)


def _is_zero(block: memoryview) -> bool:
    # A view compares itself byte by byte, a copy at the speed of memory; few blocks begin and end with zero.
    return not block[0] and not block[-1] and bytes(block) == _ZEROS[: len(block)]


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    with translated("sync", folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
