"""Is a pack copied into memory before a restore reads it? Two pure rules.

A device that is filled from memory in huge pages is filled at the speed of its link; a disk is twenty times slower.
But the copy takes memory from everybody else until it goes, and a machine that runs out of memory ends processes. So:

1. Where the device shares the host's memory, never: the bytes would be held twice in it, and no link is saved.
2. The copy and ``reserve_bytes`` fit into what is available now: 4 GiB, or a sixteenth of the memory if that is more.

Ahead of a restore that is all. Beside one, which waits for the copy, it must also be worth it: not when half of the
pack or more is in the page cache. (One H200, 16.4 GB: read from there at 41 GB/s, from a copy at 45; a copy takes
seconds. From a disk at 1.7 GB/s a copy costs nothing, and begins before the process is back.)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CopyVerdict", "HostMemory", "may_copy", "reserve_bytes", "worth_copying"]

GIB = 1 << 30
_LEAST_RESERVE_BYTES = 4 * GIB
_RESERVE_FRACTION = 16
_WARM_FRACTION = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """What the rule looks at. ``unified``: a device of this machine has no memory of its own."""

    total_bytes: int
    available_bytes: int
    unified: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyVerdict:
    """Whether, and why, in words."""

    allowed: bool
    reason: str


def reserve_bytes(memory: HostMemory) -> int:
    """What a copy must leave to everybody else."""
    return max(_LEAST_RESERVE_BYTES, memory.total_bytes // _RESERVE_FRACTION)


def may_copy(num_bytes: int, memory: HostMemory) -> CopyVerdict:
    """The module's rule."""
    if memory.unified:
        return CopyVerdict(allowed=False, reason="the device shares the host's memory, which would hold it twice")
    reserve = reserve_bytes(memory)
    left = memory.available_bytes - num_bytes
    said = f"{_gib(num_bytes)} of the {_gib(memory.available_bytes)} available"
    if left < reserve:
        return CopyVerdict(allowed=False, reason=f"{said} would leave less than {_gib(reserve)} to others")
    return CopyVerdict(allowed=True, reason=said)


def worth_copying(cached_fraction: float | None) -> CopyVerdict:
    """Whether a restore gains by a copy that begins with it. None: the kernel does not tell what is in the cache."""
    if cached_fraction is None:
        return CopyVerdict(allowed=True, reason="the kernel does not tell what is in the page cache")
    said = f"{cached_fraction:.0%} of it is in the page cache"
    if cached_fraction >= _WARM_FRACTION:
        return CopyVerdict(allowed=False, reason=f"{said}, which is read sooner than it could be copied")
    return CopyVerdict(allowed=True, reason=said)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
