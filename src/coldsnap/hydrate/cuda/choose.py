"""Which way bytes take from a file to a GPU: one pure rule, printed with every transfer.

    buffered    page cache --preadv--> locked slots of many threads --copy--> device ("the ring")
    mapped      the file's pages in memory --memmove--> locked slots --copy--> device
    direct      disk --O_DIRECT--> locked slots --copy--> device
    registered  the file's own pages are locked, window by window, and copied from where they are
    mixed       registered from the front of the file while the ring works from its back, until they meet

First match wins:

1. The source is not proved: through the ring, buffered or direct, because its bytes are hashed in the slot.
2. The caller names a path: that one. (A path that the kernel or the driver refuses falls back to the ring.)
3. The file lies in memory with huge pages. Where the GPU shares that memory, registered: there is no link to fill.
   With 10 cores or more, mapped. With fewer, mixed: locking pages is little work for a core, and copying is much.
4. O_DIRECT can be had, at least 16 MiB are wanted, and less than half of them are in the page cache: direct. On a
   machine whose GPU shares its memory also because cached bytes would be held twice.
5. Otherwise buffered.

The figures behind 3 (one H200, link 54.5 GB/s, 16.4 GB in 399 tensors, everything inside the clock, that is locking
and unlocking too): mapped 31 GB/s with 6 threads, 39 with 8, 48 with 12; mixed 34 with 5, 41 with 8, no more with
more; registered 28; buffered 40 with 8, less with more. Registered ahead: 54. 4 KiB pages are registered at a
seventh of the speed of huge ones, hence buffered for them.

The ring's memory is ``slots * block``, a slot a thread and a few more; where the GPU shares the host's memory it is
kept under ``UNIFIED_BUDGET_BYTES``, and what was read through the page cache is dropped from it behind the reader.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldsnap.hydrate.backing import Backing
from coldsnap.hydrate.choose import FileFacts, PathChoice, TransferPath

__all__ = ["UNIFIED_BUDGET_BYTES", "RingShape", "choose_device_path", "ring_shape"]

UNIFIED_BUDGET_BYTES = 64 << 20
"""Copy buffers of one transfer where the device shares the host's memory."""

_SMALL_TRANSFER_BYTES = 16 << 20
_WARM_FRACTION = 0.5
_MANY_CORES = 10
_MAX_READERS = 8
_MAX_MOVERS = 14
_DIRECT_THREADS = 16
_SPARE_SLOTS = 4  # a copy to the device takes a tenth of the time that filling its slot took


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShape:
    """How many threads fill slots, and how many slots there are for all of them."""

    num_threads: int
    num_slots: int


def choose_device_path(
    facts: FileFacts,
    backing: Backing,
    *,
    proved: bool,
    unified: bool,
    num_cores: int,
    wanted: TransferPath | None = None,
) -> PathChoice:
    """The module's rule. ``unified``: the device shares the host's memory."""
    ring = _ring_path(facts, unified=unified)
    if not proved:
        if wanted is TransferPath.BUFFERED:
            return PathChoice(path=wanted, reason="asked for")
        if wanted is TransferPath.DIRECT and facts.direct is not None:
            return PathChoice(path=wanted, reason="asked for")
        return PathChoice(path=ring.path, reason=f"hashed on the way, and {ring.reason}")
    if wanted is TransferPath.DIRECT and facts.direct is None:
        reason = "asked for direct, but the file system has no O_DIRECT for this file"
        return PathChoice(path=TransferPath.BUFFERED, reason=reason)
    if wanted is not None:
        return PathChoice(path=wanted, reason="asked for")
    if backing.in_memory and backing.huge_pages:
        if unified:
            path, beside = TransferPath.REGISTERED, "which the device shares"
        elif num_cores >= _MANY_CORES:
            path, beside = TransferPath.MAPPED, f"and there are {num_cores} cores"
        else:
            path, beside = TransferPath.MIXED, f"and there are only {num_cores} cores"
        return PathChoice(path=path, reason=f"the file lies in memory with huge pages, {beside}")
    return ring


def _ring_path(facts: FileFacts, *, unified: bool) -> PathChoice:
    if facts.direct is None:
        reason = "the file system has no O_DIRECT for this file"
        return PathChoice(path=TransferPath.BUFFERED, reason=reason)
    if facts.wanted_bytes < _SMALL_TRANSFER_BYTES:
        return PathChoice(path=TransferPath.BUFFERED, reason=f"only {facts.wanted_bytes} bytes")
    if facts.cached_fraction is None:
        return PathChoice(path=TransferPath.DIRECT, reason="the kernel does not tell what is in the page cache")
    cached = f"{facts.cached_fraction:.0%} of the range is in the page cache"
    if facts.cached_fraction >= _WARM_FRACTION:
        return PathChoice(path=TransferPath.BUFFERED, reason=cached)
    twice = ", and memory that the device shares would hold it twice" if unified else ""
    return PathChoice(path=TransferPath.DIRECT, reason=cached + twice)


def ring_shape(
    path: TransferPath, *, num_cores: int, unified: bool, hashing: bool, block_bytes: int, asked: int = 0
) -> RingShape:
    """``asked`` threads, or one a core to hash, 16 to keep a disk busy, 14 to copy out of a mapping, 8 to read.

    The thread that talks to the driver keeps a core. More than 8 readers are slower (20 GB/s with 16 where 8 make
    40): they fight for Python's lock. For them more than 128 MiB of slots are slower too (28 where 40): the device then
    finds none of them in the processor's cache. Out of a mapping it is the other way round, 45 GB/s with 16 slots and
    48 with 24: nearly as fast as the link, its threads wait for slots. They make 44.5 GB/s with 10 threads, 44.7 with
    12 and 45.2 with 14 in one run with everything inside the clock.
    """
    if asked > 0:
        num_threads = asked
    elif hashing:
        num_threads = num_cores
    elif path is TransferPath.DIRECT:
        num_threads = _DIRECT_THREADS
    elif path is TransferPath.MAPPED:
        num_threads = max(1, min(num_cores - 2, _MAX_MOVERS))
    else:
        num_threads = max(1, min(num_cores - 1, _MAX_READERS))
    if unified:
        num_slots = max(2, UNIFIED_BUDGET_BYTES // block_bytes)
        return RingShape(num_threads=min(num_threads, num_slots // 2), num_slots=num_slots)
    spare = num_threads if path is TransferPath.MAPPED else _SPARE_SLOTS
    return RingShape(num_threads=num_threads, num_slots=num_threads + spare)
