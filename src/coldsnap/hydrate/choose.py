"""Which I/O path a transfer takes: one pure rule, and the facts it looks at.

The rule, first match wins; its reason is reported with every transfer:

1. The caller names a path: that one. (``direct`` still falls back when the file system refuses it, and what
   only device memory has is buffered.)
2. The file system has no O_DIRECT: buffered.
3. Less than 16 MiB to read: buffered; opening a second descriptor is not worth it.
4. Half of the range or more is in the page cache: buffered. It is copied from memory, while O_DIRECT
   would read it from the disk again.
5. Otherwise direct: no copy, no page cache filled with bytes that memory is about to hold anyway.

The figures behind 4 (2-core VM, virtio disk, 1 GiB, huge pages): warm buffered 7.1 GB/s, cold buffered 1.8,
direct 2.0. There the two break even at 13 % in the cache; with a disk of 7 GB/s it would be near 70 %.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from coldsnap.hydrate import libc

__all__ = ["FileFacts", "PathChoice", "TransferPath", "choose_path", "file_facts", "num_threads_for"]

_SMALL_TRANSFER_BYTES = 16 * 1024 * 1024
_WARM_FRACTION = 0.5
_GUESSED_ALIGNMENT = libc.DirectAlignment(memory=4096, offset=4096)  # suits every disk we know of
_MIN_DIRECT_THREADS = 8
_MAX_THREADS = 16


class TransferPath(StrEnum):
    """How bytes come out of a file. Host memory knows the first two; devices have a rule of their own
    (``cuda.choose``)."""

    DIRECT = "direct"
    BUFFERED = "buffered"
    MAPPED = "mapped"
    REGISTERED = "registered"
    MIXED = "mixed"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """What the rule looks at.

    ``cached_fraction``: share of the ranges in the page cache, None when the kernel does not tell.
    ``direct``: what O_DIRECT needs for this file, None when it cannot be had.
    """

    wanted_bytes: int
    cached_fraction: float | None
    direct: libc.DirectAlignment | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PathChoice:
    """The path, and why, in words."""

    path: TransferPath
    reason: str


def choose_path(facts: FileFacts, *, wanted: TransferPath | None = None) -> PathChoice:
    """The module's rule."""
    if wanted is TransferPath.BUFFERED:
        return PathChoice(path=wanted, reason="asked for")
    if wanted is not None and wanted is not TransferPath.DIRECT:
        return PathChoice(path=TransferPath.BUFFERED, reason=f"asked for {wanted.value}, which only device memory has")
    if facts.direct is None:
        asked = "asked for direct, but " if wanted else ""
        return PathChoice(path=TransferPath.BUFFERED, reason=f"{asked}the file system has no O_DIRECT for this file")
    if wanted is TransferPath.DIRECT:
        return PathChoice(path=wanted, reason="asked for")
    if facts.wanted_bytes < _SMALL_TRANSFER_BYTES:
        return PathChoice(path=TransferPath.BUFFERED, reason=f"only {facts.wanted_bytes} bytes")
    if facts.cached_fraction is None:
        return PathChoice(path=TransferPath.DIRECT, reason="the kernel does not tell what is in the page cache")
    cached = f"{facts.cached_fraction:.0%} of the range is in the page cache"
    warm = facts.cached_fraction >= _WARM_FRACTION
    return PathChoice(path=TransferPath.BUFFERED if warm else TransferPath.DIRECT, reason=cached)


def file_facts(fd: int, ranges: Sequence[tuple[int, int]], *, wanted_bytes: int) -> FileFacts:
    """Ask the kernel about the bytes of an open file in ``ranges``, each ``[start, end)``."""
    return FileFacts(
        wanted_bytes=wanted_bytes, cached_fraction=_cached_fraction(fd, ranges), direct=_direct_alignment(fd)
    )


def _cached_fraction(fd: int, ranges: Sequence[tuple[int, int]]) -> float | None:
    page = os.sysconf("SC_PAGE_SIZE")
    pages = sum(-(-end // page) - start // page for start, end in ranges)
    try:
        cached = sum(libc.cache_stat(fd, start, end - start).cached_pages for start, end in ranges if start < end)
    except OSError:  # an older kernel (ENOSYS), or a file of somebody else's (EPERM)
        return None
    return min(1.0, cached / pages) if pages else None


def _direct_alignment(fd: int) -> libc.DirectAlignment | None:
    try:
        return libc.direct_alignment(fd)
    except OSError as error:
        # An older kernel cannot say: try, with an alignment that suits all, and fall back if refused.
        return _GUESSED_ALIGNMENT if error.errno == errno.ENOSYS else None


def num_threads_for(path: TransferPath, *, num_cores: int, asked: int = 0) -> int:
    """``asked``, or one a core up to 16; with O_DIRECT at least 8, to keep the disk busy."""
    if asked > 0:
        return asked
    fewest = _MIN_DIRECT_THREADS if path is TransferPath.DIRECT else 1
    return max(fewest, min(num_cores, _MAX_THREADS))
