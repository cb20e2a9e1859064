"""Stable memory on a GPU: the driver's virtual memory management, many allocations in one reserved region.

    cuMemAddressReserve   a region of addresses, kept from the first ``reserve`` in it to ``release``
    cuMemCreate + cuMemMap + cuMemSetAccess   memory behind an allocation, from ``remap`` to ``unmap``

The address given to ``cuMemAddressReserve`` is a wish. The driver answers with another place when that one is
taken, and says nothing; so the answer is compared, given back when it differs, and refused. It also does as it likes
with small wishes: driver 580 rounds every reservation up to 32 MiB, so that the next 2 MiB behind one are taken, and
puts 6 MiB somewhere else altogether. Hence large regions at large multiples, in which places are ours to give out,
2 MiB apart; a region costs addresses and nothing else. An allocation lies inside one region. The memory's own
handle is let go of as soon as it is mapped: from then on the mapping alone keeps it, and there is one thing less
to get wrong in ``unmap``. New device memory holds whatever was there before, so it is cleared. Nothing here is
managed memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from coldsnap.core.extents import PAGE_BYTES, Allocation
from coldsnap.errors import ResourceBusy, UsageError
from coldsnap.hydrate.cuda.driver import Driver, DriverFailure, translated_failure
from coldsnap.hydrate.cuda.window import DeviceWindow
from coldsnap.hydrate.maps import overlapping, read_maps

__all__ = ["DEFAULT_DEVICE_BASE", "CudaMemory"]

DEFAULT_DEVICE_BASE = 0x4000_0000_0000
"""Below ``host.DEFAULT_BASE`` and every place where Linux puts anything: a device address is a host address too."""

_REGION_BYTES = 256 << 30


class CudaMemory(DeviceWindow):
    """``DeviceMemory`` on one GPU; a context manager that lets go of everything, its context included.

    ``base``: where the first allocation without an address goes. Two objects in one process need two bases.
    Raises MissingCapability for a device without virtual memory management, HostError when the driver fails.
    """

    def __init__(self, driver: Driver, *, ordinal: int = 0, base: int = DEFAULT_DEVICE_BASE) -> None:
        super().__init__(driver, ordinal=ordinal)
        self._grain = self.facts.granularity_bytes
        if base <= 0 or base % self._grain:
            driver.release_context(ordinal)
            raise UsageError(f"base must be a positive multiple of {self._grain}, not 0x{base:x}", facts={"base": base})
        self._base = base
        self._regions: set[int] = set()  # where they start
        self._behind: set[int] = set()  # ptr of allocations that have memory behind them

    def reserve(self, size: int, *, tag: str, address: int | None = None) -> Allocation:
        """See ``StableMemory.reserve``. Without an address: above the others, one grain of nothing between."""
        if size <= 0 or size % PAGE_BYTES:
            raise _uneven("size", size, PAGE_BYTES)
        with self._lock:
            if not self._mapped:
                raise UsageError("memory is unmapped: nothing can be reserved now", cure="remap it first")
            ptr = self._next_address(size) if address is None else address
            allocation = Allocation(ptr=ptr, size=size, tag=tag)
            self._require_apart(allocation)
            if ptr <= 0 or ptr % self._grain:
                raise _uneven("address", ptr, self._grain)
            if ptr // _REGION_BYTES != (ptr + self._span(allocation) - 1) // _REGION_BYTES:
                raise UsageError(
                    f"{_named(allocation)} crosses a multiple of {_REGION_BYTES} bytes",
                    cure="reserve it at a multiple of that, or in smaller parts",
                    facts={"ptr": ptr, "size": size},
                )
            self.attach()
            with contextlib.ExitStack() as undo:
                region = self._reserve_region(undo, allocation)
                self._put_behind(undo, [allocation])
                undo.pop_all()
            self._regions.add(region)
            self._hold((*self._allocations, allocation))
            return allocation

    def unmap(self) -> None:
        """See ``StableMemory.unmap``. Waits for the device first, and lets go of copy buffers."""
        with self._lock:
            if not self._mapped or not self._allocations:
                return
            self.attach()
            try:
                self.driver.settle()
                for allocation in self._allocations:
                    if allocation.ptr in self._behind:
                        self.driver.unmap(allocation.ptr, self._span(allocation))
                        self._behind.discard(allocation.ptr)
                self.buffers.trim()
            except DriverFailure as failure:
                raise translated_failure(failure, "unmapping device memory", device=self.ordinal) from failure
            self._mapped = False

    def remap(self) -> None:
        """See ``StableMemory.remap``."""
        with self._lock:
            if self._mapped:
                return
            self.attach()
            with contextlib.ExitStack() as undo:
                self._put_behind(undo, self._allocations)
                undo.pop_all()
            self._mapped = True

    def release(self) -> None:
        """See ``StableMemory.release``. What the driver refuses to take back is forgotten, and raised at the end."""
        with self._lock:
            if not self._open:
                return
            self.attach()
            try:
                with contextlib.ExitStack() as closing:
                    closing.callback(self.buffers.trim)
                    for region in self._regions:
                        closing.callback(self.driver.unreserve, region, _REGION_BYTES)
                    for allocation in self._allocations:
                        if allocation.ptr in self._behind:
                            closing.callback(self.driver.unmap, allocation.ptr, self._span(allocation))
                    if self._behind:
                        closing.callback(self.driver.settle)
            except DriverFailure as failure:
                raise translated_failure(failure, "releasing device memory", device=self.ordinal) from failure
            finally:
                self._hold(())
                self._regions, self._behind = set(), set()
                self._mapped = True

    def _next_address(self, size: int) -> int:
        ends = [a.ptr + self._span(a) for a in self._allocations if a.ptr >= self._base]
        ptr = max(ends) + self._grain if ends else self._base
        crosses = ptr // _REGION_BYTES != (ptr + size - 1) // _REGION_BYTES
        return -(-ptr // _REGION_BYTES) * _REGION_BYTES if crosses else ptr

    def _span(self, allocation: Allocation) -> int:
        """The bytes that are really mapped: whole grains."""
        return -(-allocation.size // self._grain) * self._grain

    def _require_apart(self, allocation: Allocation) -> None:
        end = allocation.ptr + allocation.size
        for other in self._allocations:
            if other.ptr < end and allocation.ptr < other.ptr + self._span(other):
                raise _busy(allocation, f"allocation {other.tag!r} at 0x{other.ptr:x}")

    def _reserve_region(self, undo: contextlib.ExitStack, allocation: Allocation) -> int:
        """Where the allocation's region starts; reserved now unless it was before."""
        start = allocation.ptr // _REGION_BYTES * _REGION_BYTES
        if start in self._regions:
            return start
        try:
            got = self.driver.reserve(_REGION_BYTES, alignment=self._grain, hint=start)
        except DriverFailure as failure:
            if failure.code == "CUDA_ERROR_OUT_OF_MEMORY":  # of addresses: nothing else is asked for here
                raise _busy(allocation, f"{_there(start)} (the driver has no other place)") from failure
            raise translated_failure(failure, f"reserving {_named(allocation)}", ptr=allocation.ptr) from failure
        undo.callback(self._give_up, self.driver.unreserve, got, _REGION_BYTES)
        if got != start:
            raise _busy(allocation, f"{_there(start)} (the driver offered 0x{got:x})")
        return start

    def _put_behind(self, undo: contextlib.ExitStack, allocations: Sequence[Allocation]) -> None:
        """Memory behind reserved addresses, readable, writable and zero; what takes it back goes on ``undo``."""
        for allocation in allocations:
            span = self._span(allocation)
            try:
                handle = self.driver.create(self.ordinal, span)
                try:
                    self.driver.map(allocation.ptr, span, handle)
                    undo.callback(self._give_up, self.driver.unmap, allocation.ptr, span)
                finally:
                    self.driver.destroy(handle)
                self.driver.allow(self.ordinal, allocation.ptr, span)
            except DriverFailure as failure:
                if (failure.call, failure.code) == ("cuMemMap", "CUDA_ERROR_INVALID_VALUE"):
                    # Address, size and handle are sound, so that is how the driver says that something is mapped there.
                    raise _busy(allocation, "another mapping of this process") from failure
                raise translated_failure(failure, f"mapping {_named(allocation)}", ptr=allocation.ptr) from failure
        try:
            self._clear((allocation.ptr, self._span(allocation)) for allocation in allocations)
        except DriverFailure as failure:
            raise translated_failure(failure, "clearing device memory", device=self.ordinal) from failure
        self._behind.update(allocation.ptr for allocation in allocations)

    @staticmethod
    def _give_up(call: Callable[..., None], *arguments: int) -> None:
        """Undo one step without hiding the error that made it necessary."""
        with contextlib.suppress(DriverFailure):
            call(*arguments)


def _there(region: int) -> str:
    found = overlapping(read_maps(), region, region + _REGION_BYTES)
    known = ", ".join(str(entry) for entry in found[:3]) or "something that only the driver knows"
    return f"{known}, in its region at 0x{region:x}"


def _named(allocation: Allocation) -> str:
    return f"{allocation.size} bytes at 0x{allocation.ptr:x} (allocation {allocation.tag!r})"


def _busy(allocation: Allocation, by: str) -> ResourceBusy:
    return ResourceBusy(
        f"0x{allocation.ptr:x}-0x{allocation.ptr + allocation.size:x} (allocation {allocation.tag!r}) is taken by {by}",
        cure="free that range, or reserve at another address; an allocation never moves",
        facts={"ptr": allocation.ptr, "size": allocation.size, "tag": allocation.tag},
    )


def _uneven(name: str, value: int, grain: int) -> UsageError:
    return UsageError(
        f"{name} must be a positive multiple of {grain}, not {value}",
        cure=f"round it to a multiple of {grain}",
        facts={name: value},
    )
