"""Small private files: written whole or not at all, read only when nobody else could have written them.

A name appears by ``link`` (new) or ``rename`` (replace) of a finished, synced file. So no reader ever sees
half a document, and a crash leaves at most a temporary file, which the next writer of the same name removes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from coldsnap.core.points import reached
from coldsnap.errors import HostError, ResourceBusy, UnsafePath
from coldsnap.store.faults import translated
from coldsnap.store.staging import StagedFile, remove_leftovers, stage_file, sync_folder, write_all

__all__ = ["open_regular", "publish_new", "read_private", "replace", "try_replace", "write_new"]


def write_new(path: Path, data: bytes) -> None:
    """Create ``path``, mode 0600, with exactly ``data``. Raises ResourceBusy when the name is taken by anything."""
    remove_leftovers(path.parent, stem=_stem(path))
    with stage_file(path.parent, len(data), stem=_stem(path)) as staged:
        _fill(staged, data)
        publish_new(staged, path)


def publish_new(staged: StagedFile, path: Path) -> None:
    """Give a finished staged file of the same folder its name, made durable. Raises ResourceBusy when it is taken."""
    with translated("write", path):
        os.fsync(staged.fd)
        reached("document.synced")
        try:
            os.link(staged.path, path, follow_symlinks=False)
        except FileExistsError as error:
            message = f"{path} exists already, and is never overwritten"
            cure = "choose another name, or remove it yourself"
            raise ResourceBusy(message, cure=cure, facts={"path": str(path)}) from error
        staged.path.unlink()
    reached("document.named")
    sync_folder(path.parent)


def replace(path: Path, data: bytes) -> None:
    """Make ``path``, mode 0600, hold exactly ``data``; a reader sees the old or the new document, never a mixture.

    A link, a pipe or an empty folder of that name goes. Raises UnsafePath for a folder with something in it.
    """
    remove_leftovers(path.parent, stem=_stem(path))
    with stage_file(path.parent, len(data), stem=_stem(path)) as staged:
        _fill(staged, data)
        with translated("replace", path):
            os.fsync(staged.fd)
            reached("document.synced")
            try:
                staged.path.rename(path)
            except IsADirectoryError:
                _remove_empty(path)
                staged.path.rename(path)
    reached("document.named")
    sync_folder(path.parent)


def try_replace(path: Path, data: bytes) -> bool:
    """As ``replace``, for what is only kept to save time; False when the place takes none, which is no error."""
    try:
        replace(path, data)
    except HostError:
        return False
    return True


def read_private(path: Path, limit_bytes: int, *, only_ours: bool = False) -> bytes:
    """The bytes of a regular file, no link, that is ours or root's and that nobody else may write to.

    ``only_ours`` also demands that it is ours and that nobody else may read it (mode 0600 or less).
    Raises UnsafePath, or HostError when it is missing, unreadable or longer than ``limit_bytes``.
    """
    fd, found = open_regular(path, only_ours=only_ours)
    try:
        if found.st_size > limit_bytes:
            message = f"{path} holds {found.st_size} bytes, more than the {limit_bytes} such a document may have"
            raise HostError(message, cure="check that it is the right file", facts={"path": str(path)})
        with translated("read", path):
            parts: list[bytes] = []
            left = limit_bytes + 1
            while left > 0 and (part := os.read(fd, min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
        if left <= 0:
            message = f"{path} grew past {limit_bytes} bytes while it was read"
            raise HostError(message, cure="check what writes to it", facts={"path": str(path)})
        return b"".join(parts)
    finally:
        os.close(fd)


def open_regular(path: Path, *, only_ours: bool = False) -> tuple[int, os.stat_result]:
    """Open a file to read, under the conditions of :func:`read_private`. The caller closes the descriptor."""
    with translated("open", path):
        # O_NONBLOCK: opening a FIFO that was put in the file's place must not hang
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        _check(path, found, only_ours=only_ours)
    except BaseException:
        os.close(fd)
        raise
    return fd, found


def _remove_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as error:
        message = f"{path} is a folder with something in it, and a file of coldsnap's belongs there"
        raise UnsafePath(message, cure=f"move {path} away", facts={"path": str(path)}) from error


def _check(path: Path, found: os.stat_result, *, only_ours: bool) -> None:
    facts = {"path": str(path), "mode": f"{stat.S_IMODE(found.st_mode):#o}", "owner": found.st_uid}
    owners = {os.geteuid()} if only_ours else {os.geteuid(), 0}
    if not stat.S_ISREG(found.st_mode):
        raise UnsafePath(f"{path} is not a regular file", cure="put the real file there, or move it away", facts=facts)
    if found.st_uid not in owners:
        cure = "run as its owner, or copy it"
        raise UnsafePath(f"{path} belongs to user {found.st_uid}, not to us", cure=cure, facts=facts)
    if found.st_mode & (0o077 if only_ours else 0o022):
        allowed = "chmod 600" if only_ours else "chmod go-w"
        message = f"{path} can be {'read or ' if only_ours else ''}changed by other users (mode {facts['mode']})"
        raise UnsafePath(message, cure=f"{allowed} {path}, if you trust what it holds now", facts=facts)


def _fill(staged: StagedFile, data: bytes) -> None:
    with translated("write", staged.path):
        write_all(staged.fd, data, 0)
    reached("document.filled")


def _stem(path: Path) -> str:
    return f".{path.name}"
