"""Every system call the standard library of Python 3.11 does not have, in one file.

Used by the controller and by the unit's init, so it imports nothing but the standard library and costs
a few milliseconds. Calls raise ``OSError`` with the call's name and its path; the caller's room turns that
into one of our errors.

The mount calls are the descriptor-based ones (``open_tree`` and friends, Linux 5.12 and newer): a source
is pinned before anything is mounted over it, and read-only is set on the whole copied tree before it is
visible anywhere.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Sequence
from typing import Final

__all__ = [
    "CLONE_NEWIPC",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWTIME",
    "attach_tree",
    "clone_tree",
    "die_with_parent",
    "make_private",
    "make_read_only",
    "map_file",
    "mount_proc",
    "mount_tmpfs",
    "populate",
    "set_name",
    "setns",
    "unmount",
    "unshare",
    "write_memory",
]

CLONE_NEWTIME: Final = 0x80
CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWIPC: Final = 0x0800_0000
CLONE_NEWPID: Final = 0x2000_0000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x2, 0x4, 0x8
_MS_REC, _MS_PRIVATE = 0x4000, 0x4_0000
_MNT_DETACH = 2
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 0x1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOUNT_ATTR_RDONLY = 0x1
_PROT_READ, _MAP_SHARED, _MADV_POPULATE_READ = 0x1, 0x1, 22
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# The same numbers on x86-64 and arm64: calls newer than 5.1 share one table.
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442

_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_EMPTY = ctypes.c_char_p(b"")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_ssize_t
_libc.process_vm_writev.restype = ctypes.c_ssize_t


class _MountAttr(ctypes.Structure):
    _fields_ = [
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


class _IoVector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _checked(result: int, call: str, path: str | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", path)
    return result


def _syscall(call: str, path: str | None, number: int, *arguments: object) -> int:
    # A variadic C call: every integer goes as a full register, or its upper half is garbage.
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *words), call, path)


def unshare(flags: int) -> None:
    """Leave the namespaces named by ``flags``; a new PID namespace holds only children made afterwards."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(descriptor: int, flags: int) -> None:
    """Enter the namespaces ``flags`` of the process behind a pidfd (Linux 5.8)."""
    _checked(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(flags)), "setns")


def die_with_parent() -> None:
    """Be killed when the thread that forked this process ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")


def set_name(name: str) -> None:
    """Name the calling thread as ``ps`` shows it (15 bytes)."""
    _checked(_libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0), "prctl")


def _mount(kind: str, target: str, flags: int, data: str | None) -> None:
    options = None if data is None else ctypes.c_char_p(data.encode())
    name = ctypes.c_char_p(kind.encode())
    result = _libc.mount(name, ctypes.c_char_p(os.fsencode(target)), name, ctypes.c_ulong(flags), options)
    _checked(result, f"mount {kind}", target)


def make_private() -> None:
    """Stop mounts of this mount namespace from reaching any other, and the reverse."""
    root = ctypes.c_char_p(b"/")
    _checked(_libc.mount(None, root, None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount private", "/")


def mount_proc(target: str) -> None:
    """Mount the proc of the calling process's PID namespace."""
    _mount("proc", target, _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)


def mount_tmpfs(target: str, *, size_bytes: int, mode: int, huge: bool = False) -> None:
    """Mount an empty tmpfs of at most ``size_bytes`` (0: half of the memory), in ``huge`` pages where it can."""
    size = f"size={size_bytes}," if size_bytes else ""
    pages = "huge=always," if huge else ""
    _mount("tmpfs", target, _MS_NOSUID | _MS_NODEV, f"{size}{pages}mode={mode:o}")


def mount_overlay(target: str, *, lower: str, upper: str, work: str) -> None:
    """Mount ``lower`` at ``target``, with what is written going to ``upper``. Colons and commas cannot be in paths."""
    for path in (lower, upper, work):
        if set(path) & set(":,\\"):
            raise OSError(errno.EINVAL, "a path of an overlay holds a colon, a comma or a backslash", path)
    _mount("overlay", target, 0, f"lowerdir={lower},upperdir={upper},workdir={work}")


def pivot_into(new_root: str) -> None:
    """Make the mount at ``new_root`` the root of this mount namespace; the old root is gone from it."""
    os.chdir(new_root)
    dot = ctypes.c_char_p(b".")
    _syscall("pivot_root", new_root, _SYS_PIVOT_ROOT[os.uname().machine], dot, dot)
    unmount(".")


def sync_file_system(descriptor: int) -> None:
    """Have everything of the file system behind a descriptor on its disk."""
    _checked(_libc.syncfs(ctypes.c_int(descriptor)), "syncfs")


def unmount(target: str) -> None:
    """Take a mount away from this namespace; it ends when nobody uses it any more."""
    _checked(_libc.umount2(ctypes.c_char_p(os.fsencode(target)), ctypes.c_int(_MNT_DETACH)), "umount", target)


def clone_tree(source: str) -> int:
    """A descriptor of a detached copy of the mounts at ``source``. The caller closes it."""
    path = ctypes.c_char_p(os.fsencode(source))
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    return _syscall("open_tree", source, _SYS_OPEN_TREE, _AT_FDCWD, path, flags)


def make_read_only(tree: int) -> None:
    """Make every mount of a detached copy read-only."""
    attributes = _MountAttr(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    size = ctypes.sizeof(attributes)
    _syscall("mount_setattr", None, _SYS_MOUNT_SETATTR, tree, _EMPTY, flags, ctypes.byref(attributes), size)


def attach_tree(tree: int, target: str) -> None:
    """Put a detached copy at ``target``, which must exist."""
    path = ctypes.c_char_p(os.fsencode(target))
    _syscall("move_mount", target, _SYS_MOVE_MOUNT, tree, _EMPTY, _AT_FDCWD, path, _MOVE_MOUNT_F_EMPTY_PATH)


def map_file(descriptor: int, size: int) -> int:
    """The address of a read-only mapping of a whole file, which stays until the process ends."""
    length, offset = ctypes.c_size_t(size), ctypes.c_long(0)
    return _checked(_libc.mmap(None, length, _PROT_READ, _MAP_SHARED, ctypes.c_int(descriptor), offset), "mmap")


def populate(address: int, size: int) -> None:
    """Have the pages of a mapping ready to be read (Linux 5.14)."""
    done = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_READ))
    _checked(done, "madvise")


def write_memory(pid: int, source: int, pieces: Sequence[tuple[int, int]]) -> int:
    """Copy what lies at our address ``source`` to the (address, size) ``pieces`` of another process, one after another.

    Returns how many bytes were written, which is fewer when a piece is not, or not all, writable memory there.
    """
    local = _IoVector(source, sum(size for _, size in pieces))
    remote = (_IoVector * len(pieces))(*(_IoVector(*piece) for piece in pieces))
    count = ctypes.c_ulong(len(pieces))
    result = _libc.process_vm_writev(
        ctypes.c_int(pid), ctypes.byref(local), ctypes.c_ulong(1), remote, count, ctypes.c_ulong(0)
    )
    return _checked(result, "process_vm_writev")
