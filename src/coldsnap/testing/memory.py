"""A stand-in for stable memory without system calls.

``FakeMemory`` keeps its bytes in ordinary Python buffers and only says it has addresses. It is stricter
than the real thing where that is a gentler way to find a bug: a view kept across ``unmap`` does not
crash the process, it shows ``POISON`` bytes for ever.
"""

from __future__ import annotations

import threading

from coldsnap.core.extents import PAGE_BYTES, Allocation
from coldsnap.errors import ResourceBusy, UsageError

__all__ = ["POISON", "FakeMemory"]

POISON = 0xDD
"""What a view that outlived ``unmap`` shows, in every byte."""


class FakeMemory:
    """``StableMemory`` in name and behaviour, anywhere in fact.

    ``occupied`` are ranges ``(ptr, size)`` that somebody else holds; a test may change it at any time.
    """

    def __init__(self, *, base: int = 0x1000_0000) -> None:
        self._base = base
        self._lock = threading.RLock()
        self._buffers: dict[Allocation, bytearray | None] = {}
        self._mapped = True
        self.occupied: list[tuple[int, int]] = []

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Every allocation, by address."""
        return tuple(sorted(self._buffers, key=lambda a: a.ptr))

    @property
    def mapped(self) -> bool:
        """True when views can be had."""
        return self._mapped

    def reserve(self, size: int, *, tag: str, address: int | None = None) -> Allocation:
        """See ``StableMemory.reserve``."""
        if size <= 0 or size % PAGE_BYTES or (address is not None and (address <= 0 or address % PAGE_BYTES)):
            raise UsageError(f"size {size} and address {address} must be positive multiples of {PAGE_BYTES}")
        with self._lock:
            if not self._mapped:
                raise UsageError("memory is unmapped: nothing can be reserved now", cure="remap it first")
            if address is None:
                ends = [a.ptr + a.size + PAGE_BYTES for a in self._buffers if a.ptr >= self._base]
                address = max(ends, default=self._base)
            allocation = Allocation(ptr=address, size=size, tag=tag)
            for taken in (*self.occupied, *((a.ptr, a.size) for a in self._buffers)):
                _require_free(allocation, taken)
            self._buffers[allocation] = bytearray(size)
            return allocation

    def view(self, ptr: int, size: int) -> memoryview:
        """See ``StableMemory.view``."""
        with self._lock:
            for allocation, buffer in self._buffers.items():
                inside = size > 0 and allocation.ptr <= ptr and ptr + size <= allocation.ptr + allocation.size
                if inside and buffer is not None:
                    return memoryview(buffer)[ptr - allocation.ptr : ptr - allocation.ptr + size]
            state = "not inside one allocation" if self._mapped else "unmapped"
            raise UsageError(f"{size} bytes at 0x{ptr:x} are {state}", facts={"ptr": ptr, "size": size})

    def unmap(self) -> None:
        """See ``StableMemory.unmap``."""
        with self._lock:
            for allocation, buffer in self._buffers.items():
                if buffer is not None:
                    buffer[:] = bytes([POISON]) * len(buffer)
                    self._buffers[allocation] = None
            self._mapped = not self._buffers

    def remap(self) -> None:
        """See ``StableMemory.remap``."""
        with self._lock:
            if self._mapped:
                return
            for allocation in self._buffers:
                for taken in self.occupied:
                    _require_free(allocation, taken)
            for allocation in self._buffers:
                self._buffers[allocation] = bytearray(allocation.size)
            self._mapped = True

    def release(self) -> None:
        """See ``StableMemory.release``."""
        with self._lock:
            self.unmap()
            self._buffers = {}
            self._mapped = True


def _require_free(allocation: Allocation, taken: tuple[int, int]) -> None:
    ptr, size = taken
    if ptr < allocation.ptr + allocation.size and allocation.ptr < ptr + size:
        raise ResourceBusy(
            f"0x{allocation.ptr:x} (allocation {allocation.tag!r}) is taken by 0x{ptr:x}-0x{ptr + size:x}",
            cure="free that range, or reserve at another address; an allocation never moves",
            facts={"ptr": allocation.ptr, "size": allocation.size, "tag": allocation.tag},
        )
