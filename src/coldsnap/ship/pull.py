"""An object onto a disk: in parallel ranges, continued where an earlier attempt was cut off, proved while it arrives.

The file lies under a temporary name that follows from the item, locked while its writer lives. Behind its bytes it
keeps a tail until it is whole: the size of a range, and one byte a range, 1 once all of that range was written.

    | size bytes of the object | 8 bytes: range size, big-endian | ceil(size / range size) bytes: 0 or 1 |

Whoever finds such a file and can lock it goes on from there. The tail is believed only as a saving of time: every
byte is hashed in order while the ranges come in, those of an earlier attempt too, and nothing leaves here without the
digest. A file with earlier ranges that turns out wrong (a power cut can lose bytes whose mark survived) is begun anew
once. Memory is one piece a stream, whatever the size. How the bytes come is in ``attempt.py``.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coldsnap.errors import PayloadRejected, RemoteError, ResourceBusy, UnsafePath
from coldsnap.ship.attempt import Attempt
from coldsnap.ship.base import Item, Progress, Source
from coldsnap.ship.faults import remote_error
from coldsnap.ship.limits import Limits, retried
from coldsnap.store.faults import translated
from coldsnap.store.locks import is_named
from coldsnap.store.staging import PARTIAL_SUFFIX, StagedFile

__all__ = ["partial_path", "pulled", "resumable_bytes"]


def partial_path(folder: Path, item: Item) -> Path:
    """The temporary name of an object on its way to ``folder``."""
    return folder / f"fetch-{item.kind}-{item.digest.hex}{PARTIAL_SUFFIX}"


def resumable_bytes(folder: Path, item: Item, size: int) -> int:
    """The bytes on disk that an earlier attempt has reserved for this object already."""
    with suppress(OSError):
        found = partial_path(folder, item).lstat()
        return min(found.st_blocks * 512, size)
    return 0


@contextmanager
def pulled(
    source: Source,
    item: Item,
    size: int,
    folder: Path,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> Iterator[StagedFile]:
    """The object as a proved, locked, not yet synced file in ``folder``; who renames it away keeps it.

    Raises PayloadRejected (``size_mismatch``, ``digest_mismatch``) for an object that is not its item, RemoteError,
    OutOfSpace before a byte is moved, ResourceBusy while another process brings the same object. After a
    RemoteError or an interruption the finished ranges stay for the next attempt.
    """
    limits = limits or Limits()
    _check_size(source, item, size, limits, cancel)
    path = partial_path(folder, item)
    fd = _open(path)
    keep = False
    advance = progress or (lambda num_bytes: None)
    try:
        try:
            for attempt in range(2):
                work = Attempt(source, item, size, fd, limits, advance, cancel)
                resumed = work.prepare(path)
                if work.run() == item.digest:
                    break
                with translated("empty", path):
                    os.ftruncate(fd, 0)
                if attempt or not resumed:
                    raise _wrong_bytes(source, item)
                advance(-size)
        except (RemoteError, KeyboardInterrupt):
            keep = True
            raise
        except Exception:
            keep = cancel is not None and cancel.is_set()
            raise
        with translated("finish", path):
            os.ftruncate(fd, size)
        yield StagedFile(fd=fd, path=path, expected_bytes=size)
    finally:
        if not keep and is_named(fd, path):
            path.unlink()
        os.close(fd)


def _check_size(source: Source, item: Item, size: int, limits: Limits, cancel: threading.Event | None) -> None:
    found = retried(limits, lambda: source.stat(item), cancel=cancel)
    if found is None:
        raise remote_error("not_found", f"{source.name} has no {item}", place=source.name)
    if found.bytes != size:
        message = f"{item} has {found.bytes} bytes at {source.name}, and {size} were published"
        cure = "it was exchanged or cut there; publish it again, or use another source"
        raise PayloadRejected("size_mismatch", message, cure=cure, facts={"place": source.name})


def _wrong_bytes(source: Source, item: Item) -> PayloadRejected:
    message = f"{source.name} gives other bytes than {item}; they were thrown away"
    cure = "it was exchanged or damaged there; publish it again, or use another source"
    return PayloadRejected("digest_mismatch", message, cure=cure, facts={"place": source.name})


def _open(path: Path) -> int:
    while True:
        with translated("create", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            message = f"{path.name} is being fetched by another process"
            raise ResourceBusy(message, cure="wait for it to end", facts={"path": str(path)}) from error
        found = os.fstat(fd)
        ours = found.st_uid == os.geteuid() and not found.st_mode & 0o077 and found.st_nlink <= 1
        if not ours or not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise UnsafePath(f"{path} is no file of ours alone", cure="remove it", facts={"path": str(path)})
        if is_named(fd, path):
            return fd
        os.close(fd)  # a sweep came between
