"""Folders written aside and renamed: a half-written folder never stands at a name that means something."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from coldsnap.core.points import reached
from coldsnap.errors import ResourceBusy
from coldsnap.store.faults import host_error
from coldsnap.store.staging import PARTIAL_SUFFIX, sync_folder

__all__ = ["folder_aside", "num_cores", "remove_asides", "throw_away", "write_file"]


@contextlib.contextmanager
def folder_aside(target: Path) -> Iterator[Path]:
    """A new private folder beside ``target`` that takes its name when the block ends, and is removed when it fails.

    The block syncs what it writes; the rename and the parent are synced here. Raises ResourceBusy when ``target``
    exists by then; OSErrors of the block come out as HostError or OutOfSpace.
    """
    aside = _aside(target)
    try:
        aside.mkdir(mode=0o700)
        yield aside
        sync_folder(aside)
        reached("capsule.aside")
        aside.rename(target)  # refuses a folder that is not empty, which is meant
        reached("capsule.named")
        sync_folder(target.parent)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and aside.exists():
            message = f"{target} exists already"
            raise ResourceBusy(message, cure="name another folder; it is never overwritten") from error
        raise host_error(error, "write", error.filename or target) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def throw_away(folder: Path) -> None:
    """Remove a folder, or whatever stands at its name; the name is free at once. A link's target is left alone."""
    aside = _aside(folder)
    try:
        folder.rename(aside)
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise host_error(error, "remove", folder) from error


def remove_asides(target: Path) -> None:
    """Remove what killed writers of ``target`` left. The caller holds the lock that excludes living ones."""
    for path in target.parent.glob(f".{target.name}.*{PARTIAL_SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """A new private file, on disk when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def num_cores() -> int:
    """Cores this process may use, at most 16: what is in flight takes memory for each, and one thread hashes."""
    return min(len(os.sched_getaffinity(0)), 16)


def _aside(target: Path) -> Path:
    return target.parent / f".{target.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
