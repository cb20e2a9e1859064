"""The files of a unit's private tmpfs, on their way into the images folder and back.

CRIU recreates sockets and unlinked files by itself, but expects files with a name to be there. Shared memory is made
large and hardly written to (vLLM's queues between two processes: 420 MB, of which 0.1 MB was ever touched), and in a
tmpfs what was never written is no memory. So holes are not saved and are holes again after a restore; holes below
``_HOLE_BYTES`` are saved as zeros, so that a file of many small ones does not become as many pieces.

Standard library only.
"""

from __future__ import annotations

import errno
import os
from typing import Any, Final

from coldsnap.capsule.copying import copy_range
from coldsnap.capsule.inside import PRIVATE_ROOTS, WORK_DIR

__all__ = ["load_private", "private_path", "save_private"]

_HOLE_BYTES: Final = 64 * 1024


def private_path(entry: dict[str, Any]) -> str:
    """Where a saved private file belongs. Raises ValueError on a path that leaves its root."""
    path = entry["path"]
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"private file path {path!r} is not clean")
    return f"{PRIVATE_ROOTS[entry['root']]}/{path}"


def save_private(images_fd: int) -> list[dict[str, Any]]:
    """Copy folders and regular files of the unit's private tmpfs into the images folder.

    Returns one entry each, parents first: ``root``, ``path``, ``mode`` and, for files, ``bytes``, ``pieces`` (offset
    and size of what is in them, in order) and ``content``: the file of the images folder that holds the pieces, one
    after the other; None when there are none.
    """
    entries: list[dict[str, Any]] = []
    for root, top in PRIVATE_ROOTS.items():
        if root == "run" or os.path.ismount(top):
            _save_folder(root, top, "", images_fd, entries, os.stat(top).st_dev)
    return entries


def _save_folder(root: str, top: str, inner: str, images_fd: int, entries: list[dict[str, Any]], device: int) -> None:
    with os.scandir(f"{top}/{inner}") as found:
        for item in sorted(found, key=lambda one: one.name):
            path = f"{inner}/{item.name}" if inner else item.name
            if f"{top}/{path}" == WORK_DIR:
                continue
            facts = item.stat(follow_symlinks=False)
            if facts.st_dev != device or os.path.ismount(f"{top}/{path}"):
                continue  # something of the host, mounted here
            entry: dict[str, Any] = {"root": root, "path": path, "mode": facts.st_mode & 0o7777}
            if item.is_dir(follow_symlinks=False):
                entries.append(entry)
                _save_folder(root, top, path, images_fd, entries, device)
            elif item.is_file(follow_symlinks=False):
                source = os.open(f"{top}/{path}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    entry |= _save_file(source, f"private-{len(entries)}.bin", images_fd)
                finally:
                    os.close(source)
                entries.append(entry)


def _save_file(source: int, name: str, images_fd: int) -> dict[str, Any]:
    size = os.fstat(source).st_size
    pieces = _pieces(source, size)
    if pieces:
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=images_fd)
        try:
            at = 0
            for offset, length in pieces:
                at = copy_range(source, target, offset, at, length)
        finally:
            os.close(target)
    return {"bytes": size, "pieces": pieces, "content": name if pieces else None}


def _pieces(source: int, size: int) -> list[tuple[int, int]]:
    """(Offset, size) of what is in a file, without its holes."""
    pieces: list[tuple[int, int]] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                break
            raise
        at = min(size, os.lseek(source, start, os.SEEK_HOLE))
        if pieces and start - sum(pieces[-1]) < _HOLE_BYTES:
            start = pieces.pop()[0]
        if start < at:
            pieces.append((start, at - start))
    return pieces


def load_private(entries: list[dict[str, Any]], images_fd: int, *, skip: frozenset[str]) -> None:
    """Put saved files back; those of ``RUN_DIR`` named in ``skip`` are somebody else's to write."""
    for entry in entries:
        target = private_path(entry)
        if entry["root"] == "run" and entry["path"] in skip:
            continue
        if "bytes" not in entry:
            os.makedirs(target, exist_ok=True)
        else:
            output = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _load_file(entry, output, images_fd)
            finally:
                os.close(output)
        os.chmod(target, entry["mode"])


def _load_file(entry: dict[str, Any], output: int, images_fd: int) -> None:
    os.ftruncate(output, entry["bytes"])
    if entry["content"]:
        source = os.open(entry["content"], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=images_fd)
        try:
            at = 0
            for offset, length in entry["pieces"]:
                copy_range(source, output, at, offset, length)
                at += length
        finally:
            os.close(source)
