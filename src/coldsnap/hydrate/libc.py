"""Every foreign call of this room, and every raw address it turns into a Python object.

Rule: no other file in ``hydrate`` imports ctypes. A wrapper either succeeds or raises ``OSError`` with
the call's errno; translating that into an error of ours is the business of the file that knows what
was being done. The Linux constants are the same on x86-64 and aarch64, the two machines we run on.

``ctypes`` releases the GIL during every call below, so several threads may copy or fault pages at once.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass

__all__ = [
    "ADVICE_DISCARD",
    "ADVICE_HUGE_PAGES",
    "CacheStat",
    "DirectAlignment",
    "address_of",
    "advise",
    "cache_stat",
    "copy_bytes",
    "direct_alignment",
    "map_anonymous",
    "map_anywhere",
    "map_file",
    "unmap",
    "view_at",
]

ADVICE_DISCARD = 4  # MADV_DONTNEED: private anonymous pages read as zero when they are touched again
ADVICE_HUGE_PAGES = 14  # MADV_HUGEPAGE

_PROT_NONE, _PROT_READ_WRITE = 0, 1 | 2
_PROT_READ = 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000
_MAP_FAILED = ctypes.c_void_p(-1).value
_SYS_CACHESTAT = 451  # one number on every architecture; Linux 6.5
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000  # Linux 6.1

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.memmove.restype = ctypes.c_void_p
_LIBC.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_LIBC.syscall.restype = ctypes.c_long


def _fail(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")


def map_anonymous(address: int, size: int, *, writable: bool, replace: bool) -> None:
    """Map ``size`` private anonymous bytes at exactly ``address``.

    ``writable``: zero-filled and readable and writable; otherwise a reservation that nobody can touch
    and that counts towards no memory limit. ``replace``: swap whatever is there, in one step; only for
    a range the caller owns. Without it a taken range raises ``FileExistsError`` and nothing changes.
    """
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS
    flags |= _MAP_FIXED if replace else _MAP_FIXED_NOREPLACE
    if not writable:
        flags |= _MAP_NORESERVE
    got = _LIBC.mmap(address, size, _PROT_READ_WRITE if writable else _PROT_NONE, flags, -1, 0)
    if got == _MAP_FAILED:
        raise _fail("mmap")
    if got != address:  # a kernel before 4.17 takes MAP_FIXED_NOREPLACE for a mere hint
        unmap(got, size)
        raise FileExistsError(f"mmap: address 0x{address:x} is taken")


def map_anywhere(size: int) -> int:
    """Map ``size`` zero-filled private bytes where the kernel likes; the address."""
    return _mmap_anywhere(size, _PROT_READ_WRITE, _MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)


def map_file(fd: int, offset: int, size: int, *, writable: bool) -> int:
    """Map ``size`` bytes of a file from ``offset``, a multiple of the page size, shared; the address.

    Touching bytes beyond the end of the file, even one that becomes shorter later, is a SIGBUS.
    """
    return _mmap_anywhere(size, _PROT_READ_WRITE if writable else _PROT_READ, _MAP_SHARED, fd, offset)


def _mmap_anywhere(size: int, rights: int, flags: int, fd: int, offset: int) -> int:
    got = _LIBC.mmap(None, size, rights, flags, fd, offset)
    if got == _MAP_FAILED or not isinstance(got, int):
        raise _fail("mmap")
    return got


def unmap(address: int, size: int) -> None:
    """Give the range back to the kernel; what is not mapped is left alone."""
    if _LIBC.munmap(address, size) != 0:
        raise _fail("munmap")


def advise(address: int, size: int, advice: int) -> None:
    """``madvise``."""
    if _LIBC.madvise(address, size, advice) != 0:
        raise _fail("madvise")


def copy_bytes(destination: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between two addresses without holding the GIL."""
    _LIBC.memmove(destination, source, size)


def view_at(address: int, size: int) -> memoryview:
    """A writable byte view of raw memory. It does not keep the memory mapped."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def address_of(buffer: memoryview) -> int:
    """The address of the first byte of a writable, non-empty view."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStat:
    """How many pages of a file range are in the page cache, and how many of those are dirty."""

    cached_pages: int
    dirty_pages: int


def cache_stat(fd: int, offset: int, size: int) -> CacheStat:
    """``cachestat``. OSError ENOSYS before Linux 6.5, EPERM where the kernel keeps the answer to the owner."""
    wanted = (ctypes.c_uint64 * 2)(offset, size)
    result = (ctypes.c_uint64 * 5)()
    code = _LIBC.syscall(
        ctypes.c_long(_SYS_CACHESTAT), ctypes.c_uint(fd), ctypes.byref(wanted), ctypes.byref(result), ctypes.c_uint(0)
    )
    if code != 0:
        raise _fail("cachestat")
    return CacheStat(cached_pages=result[0], dirty_pages=result[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectAlignment:
    """What O_DIRECT asks of addresses, and of file offsets and lengths; both powers of two."""

    memory: int
    offset: int


def direct_alignment(fd: int) -> DirectAlignment | None:
    """What the file system says O_DIRECT needs for this file; None when it says "not supported".

    OSError ENOSYS when the C library or kernel cannot say.
    """
    if not hasattr(_LIBC, "statx"):
        raise OSError(38, "statx: this C library has none")
    result = ctypes.create_string_buffer(256)
    code = _LIBC.statx(
        ctypes.c_int(fd), ctypes.c_char_p(b""), ctypes.c_int(_AT_EMPTY_PATH), ctypes.c_uint(_STATX_DIOALIGN), result
    )
    if code != 0:
        raise _fail("statx")
    (mask,) = struct.unpack_from("=I", result, 0)
    memory, offset = struct.unpack_from("=II", result, 152)
    if not mask & _STATX_DIOALIGN:
        raise OSError(38, "statx: this kernel or file system does not tell O_DIRECT's alignment")
    return DirectAlignment(memory=memory, offset=offset) if memory and offset else None
