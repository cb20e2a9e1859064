"""A private folder for what an operation has not committed yet, below the state root's staging folder.

Its name ends in ``.partial`` and it is locked while its operation lives, so that ``gc`` can tell what a killed
operation left from what a running one needs. It is on the state root's file system: what is finished in it is
renamed into place.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldsnap.store.faults import translated
from coldsnap.store.staging import PARTIAL_SUFFIX
from coldsnap.store.stateroot import StateRoot
from coldsnap.store.sweep import GcItem

__all__ = ["dead_scratch", "remove_scratch", "scratch_folder"]

_NAME_CHARACTERS = 80


@contextmanager
def scratch_folder(state: StateRoot, operation_id: str) -> Iterator[Path]:
    """A new folder, mode 0700, removed with everything in it on the way out. Raises OutOfSpace, HostError."""
    state.check(state.staging)
    folder = state.staging / f"{operation_id[:_NAME_CHARACTERS]}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
    with translated("create", folder):
        folder.mkdir(mode=0o700)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def dead_scratch(state: StateRoot) -> Iterator[GcItem]:
    """Folders whose operation is gone."""
    for folder in sorted(state.staging.iterdir()):
        if folder.name.endswith(PARTIAL_SUFFIX) and not folder.is_symlink() and folder.is_dir():
            with _held(folder) as free:
                if free:
                    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
                    yield GcItem(kind="scratch", path=folder, bytes=size, reason="its operation is gone")


def remove_scratch(folder: Path) -> bool:
    """Remove a dead operation's folder; False when it is in use, or gone already."""
    if not folder.is_dir():
        return False
    with _held(folder) as free:
        if free:
            shutil.rmtree(folder, ignore_errors=True)
        return free


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    with translated("open", folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)
