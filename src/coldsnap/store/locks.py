"""Locks between processes of one host: ``flock`` on small files that gc may remove.

The kernel lets go of a lock when its holder dies, so no lock is ever stale. Removing a lock file that
somebody else is about to lock would give two holders of one name; so whoever has locked a file checks that
the name still leads to it and otherwise starts again, and whoever removes one holds it locked.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coldsnap.errors import ResourceBusy, UnsafePath
from coldsnap.store.faults import translated

__all__ = ["hold", "is_named", "try_hold"]

_FIRST_WAIT_S = 0.002
_LONGEST_WAIT_S = 0.05


@contextmanager
def hold(path: Path, *, deadline_s: float, purpose: str, shared: bool = False) -> Iterator[None]:
    """Hold the lock file ``path``, made when missing; exclusively unless ``shared``.

    Waits up to ``deadline_s`` seconds (0: not at all), then raises ResourceBusy naming ``purpose`` and the
    holder. Excludes threads of one process as well as processes.
    """
    give_up = time.monotonic() + deadline_s
    wait_s = _FIRST_WAIT_S
    while (fd := _try(path, create=True, shared=shared)) is None:
        if time.monotonic() >= give_up:
            message = f"{purpose} is being done by another process"
            cure = "wait for it to end, then try again"
            raise ResourceBusy(message, cure=cure, facts={"lock": str(path), "holder": _holder(path)})
        time.sleep(min(wait_s, max(0.0, give_up - time.monotonic())))
        wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
    try:
        if not shared:
            with suppress(OSError):  # who holds it is a courtesy, and a sweep must work on a full disk
                os.truncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        _release(fd)


@contextmanager
def try_hold(path: Path) -> Iterator[bool]:
    """Whether nobody held the existing file ``path``; while inside, it is held by us exclusively.

    False also when there is no such file any more.
    """
    fd = _try(path, create=False, shared=False)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            _release(fd)


def is_named(fd: int, path: Path) -> bool:
    """Whether ``path`` itself, not a link's target, still leads to the open file ``fd``."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _try(path: Path, *, create: bool, shared: bool) -> int | None:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    while True:
        with translated("lock", path):
            try:
                fd = os.open(path, flags, 0o600)
            except FileNotFoundError:
                if create:
                    raise
                return None
        held = False
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UnsafePath(f"the lock {path} is not a regular file", cure="remove it", facts={"path": str(path)})
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if is_named(fd, path):
                held = True
                return fd
            if not create:
                return None
        finally:
            if not held:
                os.close(fd)


def _release(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may still have a copy of the descriptor
    os.close(fd)


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip() or "unknown"
    except (OSError, UnicodeDecodeError):
        return "unknown"
