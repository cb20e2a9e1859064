"""Stable memory that an engine's own allocator has made: its addresses, its mappings, our contract.

An engine that computes on a GPU has captured addresses in its graphs and keeps books about who owns what. So nothing
is reserved here. The engine says where its allocations are (``adopt``) and lends two acts (``Pages``), by which
memory goes and comes behind each of them while its books stay true. What a transfer or an export does with the bytes
is the same as for memory of our own (``window``).

Whoever lends keeps the ownership: ``release`` forgets the allocations and leaves all as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn, Protocol

from coldsnap.core.extents import PAGE_BYTES, Allocation
from coldsnap.errors import ColdsnapError, ResourceBusy, UsageError
from coldsnap.hydrate.cuda.driver import Driver, DriverFailure, translated_failure
from coldsnap.hydrate.cuda.window import DeviceWindow

__all__ = ["AdoptedMemory", "Pages"]


class Pages(Protocol):
    """The engine's allocator, one call an allocation. Both calls do nothing where it is so already.

    A call either did what it says, the engine's own books included, or raises and has changed nothing. Calls come
    from one thread at a time, which has the device's primary context.
    """

    def map(self, ptr: int) -> None:
        """Memory behind the whole allocation at ``ptr``, content unknown.

        Raises OutOfSpace, ResourceBusy (something else is mapped there), HostError, and EngineError when the engine
        knows of no such allocation.
        """
        ...

    def unmap(self, ptr: int) -> None:
        """Take the memory away, keep the addresses. The device has nothing to do there any more. Raises as ``map``."""
        ...


class AdoptedMemory(DeviceWindow):
    """``DeviceMemory`` over allocations of an engine on device ``ordinal``, except that nothing can be reserved."""

    def __init__(self, driver: Driver, *, ordinal: int, pages: Pages) -> None:
        super().__init__(driver, ordinal=ordinal)
        self._pages = pages

    def reserve(self, size: int, *, tag: str, address: int | None = None) -> NoReturn:
        """The engine allocates, nobody else. Raises UsageError."""
        raise UsageError(
            f"{size} bytes for {tag!r} cannot be reserved in memory that belongs to an engine",
            cure="let the engine allocate, and adopt what it got",
            facts={"size": size, "tag": tag},
        )

    def adopt(self, allocations: Sequence[Allocation]) -> None:
        """Take on allocations that the engine has mapped, beside the earlier ones; their bytes stay as they are.

        Addresses are fixed from here on. Raises UsageError (called while unmapped, or an address or size that is no
        multiple of ``PAGE_BYTES``) and ResourceBusy (two of them overlap); none of them is taken on then.
        """
        for one in allocations:
            for name, value in (("ptr", one.ptr), ("size", one.size)):
                if value <= 0 or value % PAGE_BYTES:
                    raise UsageError(
                        f"{name} of allocation {one.tag!r} must be a positive multiple of {PAGE_BYTES}, not {value}",
                        facts={name: value, "tag": one.tag},
                    )
        with self._lock:
            if not self._mapped:
                raise UsageError("memory is unmapped: nothing can be adopted now", cure="remap it first")
            together = sorted((*self._allocations, *allocations), key=lambda a: a.ptr)
            for before, after in pairwise(together):
                if after.ptr < before.ptr + before.size:
                    raise ResourceBusy(
                        f"allocation {after.tag!r} at 0x{after.ptr:x} overlaps {before.tag!r} at 0x{before.ptr:x}",
                        cure="adopt each allocation once, whole",
                        facts={"ptr": after.ptr, "size": after.size, "tag": after.tag},
                    )
            self._hold(together)

    def unmap(self) -> None:
        """See ``StableMemory.unmap``. Waits for the device first, and lets go of copy buffers."""
        with self._lock:
            if not self._mapped or not self._allocations:
                return
            self.attach()
            try:
                self.driver.settle()
                self.buffers.trim()
            except DriverFailure as failure:
                raise translated_failure(failure, "unmapping device memory", device=self.ordinal) from failure
            for allocation in self._allocations:
                self._pages.unmap(allocation.ptr)
            self._mapped = False

    def remap(self) -> None:
        """See ``StableMemory.remap``."""
        with self._lock:
            if self._mapped:
                return
            self.attach()
            self._map([(allocation.ptr, allocation.size) for allocation in self._allocations])
            self._mapped = True

    def release(self) -> None:
        """Forget every allocation, and leave each as it is, mapped or not: it is the engine's. Idempotent."""
        with self._lock:
            if not self._open:
                return
            try:
                self.trim()
            finally:
                self._hold(())
                self._mapped = True

    def _map(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Zero-filled memory behind whole allocations, each ``(ptr, size)``; behind none of them when it raises."""
        with contextlib.ExitStack() as undo:
            for ptr, _ in ranges:
                self._pages.map(ptr)
                undo.callback(self._take_back, ptr)
            try:
                self._clear(ranges)
            except DriverFailure as failure:
                raise translated_failure(failure, "clearing device memory", device=self.ordinal) from failure
            undo.pop_all()

    def _take_back(self, ptr: int) -> None:
        """Undo one step without hiding the error that made it necessary."""
        with contextlib.suppress(ColdsnapError):
            self._pages.unmap(ptr)
