"""What the programs inside a unit share: how a child is started there, and the private files.

Standard library only. Descriptor numbers of a CRIU child are fixed, so that its command line can be
built, and tested, before any descriptor exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from typing import Any, Final, NoReturn

__all__ = [
    "FAILURE_FD",
    "IMAGES_FD",
    "OUTPUT_FD",
    "PRIVATE_ROOTS",
    "RUN_ROOT",
    "WORK_DIR",
    "become_child",
    "become_criu",
    "load_private",
    "make_target",
    "private_path",
    "save_private",
]

RUN_ROOT: Final = "/run/coldsnap"
PRIVATE_ROOTS: Final = {"run": RUN_ROOT, "shm": "/dev/shm"}  # noqa: S108  (a tmpfs of the unit's own)
WORK_DIR: Final = f"{RUN_ROOT}/.criu"
IMAGES_FD: Final = 10
OUTPUT_FD: Final = 11
FAILURE_FD: Final = 12
_CRIU_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_SCRATCH_FD = 32
_TOP_FD = 1 << 20
_COPY_BYTES = 1024 * 1024


def become_child(descriptors: dict[int, int]) -> None:
    """In a forked child: keep exactly ``{number wanted: descriptor held}``, and default signals.

    0 to 2 should be among the wanted. Nothing else stays open, whatever was inherited.
    """
    # First out of the way, so that no wanted number is overwritten while it is still needed.
    high = [(wanted, _above(held)) for wanted, held in descriptors.items()]
    for wanted, held in high:
        os.dup2(held, wanted, inheritable=True)
    keep = sorted(descriptors)
    for low, top in zip([-1, *keep], [*keep, _TOP_FD], strict=True):
        if low + 1 < top:  # closerange(0, 0) closes everything
            os.closerange(low + 1, top)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Numbers that libc keeps for itself are refused.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def become_criu(argv: list[str], descriptors: dict[int, int], log_fd: int) -> NoReturn:
    """In a forked child: run CRIU with exactly these descriptors, its log on ``log_fd``."""
    try:
        null = os.open("/dev/null", os.O_RDONLY)
        become_child({0: null, 1: log_fd, 2: log_fd, **descriptors})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a refused write is then an error that CRIU handles
        os.execve(argv[0], argv, _CRIU_ENVIRONMENT)
    except OSError as error:
        os.write(2, f"Error: cannot run {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _above(held: int) -> int:
    return fcntl.fcntl(held, fcntl.F_DUPFD_CLOEXEC, _SCRATCH_FD)


def private_path(entry: dict[str, Any]) -> str:
    """Where a saved private file belongs. Raises ValueError on a path that leaves its root."""
    path = entry["path"]
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"private file path {path!r} is not clean")
    return f"{PRIVATE_ROOTS[entry['root']]}/{path}"


def make_target(tree: int, target: str) -> None:
    """An empty folder or file for a detached copy to be attached to; the source's path may be hidden by now."""
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def save_private(images_fd: int) -> list[dict[str, Any]]:
    """Copy folders and regular files of the unit's private tmpfs into the images folder.

    CRIU recreates sockets and unlinked files by itself, but expects files with a name to be there. Returns
    one entry each, parents first: ``root``, ``path``, ``mode`` and, for files, ``bytes`` and ``content`` (a
    file of the images folder; None when empty).
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
                entry["bytes"] = facts.st_size
                entry["content"] = f"private-{len(entries)}.bin" if facts.st_size else None
                entries.append(entry)
                if entry["content"]:
                    source = os.open(f"{top}/{path}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    _copy(source, os.open(entry["content"], flags, 0o600, dir_fd=images_fd))


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
            if entry["content"]:
                _copy(os.open(entry["content"], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=images_fd), output)
            else:
                os.close(output)
        os.chmod(target, entry["mode"])


def _copy(source: int, target: int) -> None:
    try:
        while piece := os.read(source, _COPY_BYTES):
            view = memoryview(piece)
            while view:
                view = view[os.write(target, view) :]
    finally:
        os.close(source)
        os.close(target)
