"""What every kind of device memory here has: a device, its context, and copies to and from mapped allocations.

A transfer looks through this window and no further: it is the same whether the allocations are our own
(``memory.CudaMemory``) or an engine's (``adopted.AdoptedMemory``). How they come and go is the kind's business; it
says which allocations there are with ``_hold``, and whether they are mapped with ``_mapped``, both under ``_lock``.

The context is the device's primary one, which the CUDA runtime uses and with it torch: both see the same addresses.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from coldsnap.core.extents import Allocation
from coldsnap.errors import MissingCapability, UsageError
from coldsnap.hydrate.cuda.arrays import DeviceArray
from coldsnap.hydrate.cuda.buffers import Buffers
from coldsnap.hydrate.cuda.driver import Driver, DriverFailure, translated_failure
from coldsnap.hydrate.memory import allocation_around

__all__ = ["DeviceWindow"]

_SMALL_COPY_BYTES = 4 << 20


class DeviceWindow(abc.ABC):
    """``DeviceMemory`` without a way to get any; a context manager that lets go of everything, its context included.

    Raises MissingCapability for a device without virtual memory management, HostError when the driver fails.
    """

    def __init__(self, driver: Driver, *, ordinal: int = 0) -> None:
        try:
            self.facts = driver.device_facts(ordinal)
            if not self.facts.virtual_memory:
                raise MissingCapability(
                    f"{self.facts.name} has no virtual memory management",
                    cure="use a GPU and a driver that map memory at fixed addresses",
                )
            self._context = driver.retain_context(ordinal)
        except DriverFailure as failure:
            raise translated_failure(failure, f"opening device {ordinal}", device=ordinal) from failure
        self.driver = driver
        self.ordinal = ordinal
        self.buffers = Buffers(driver)
        self._lock = threading.RLock()
        self._allocations: tuple[Allocation, ...] = ()
        self._mapped = True
        self._open = True

    @abc.abstractmethod
    def reserve(self, size: int, *, tag: str, address: int | None = None) -> Allocation:
        """See ``StableMemory.reserve``."""

    @abc.abstractmethod
    def unmap(self) -> None:
        """See ``StableMemory.unmap``."""

    @abc.abstractmethod
    def remap(self) -> None:
        """See ``StableMemory.remap``."""

    @abc.abstractmethod
    def release(self) -> None:
        """See ``StableMemory.release``."""

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Every allocation, by address."""
        return self._allocations

    @property
    def mapped(self) -> bool:
        """True when bytes can be had."""
        return self._mapped

    def attach(self) -> None:
        """Make the device's context the calling thread's; every thread that uses ``driver`` does so first."""
        try:
            self.driver.use_context(self._context)
        except DriverFailure as failure:
            raise translated_failure(failure, "using the device's context", device=self.ordinal) from failure

    def close(self) -> None:
        """``release``, and let go of the context. The object is of no use afterwards. Idempotent."""
        with self._lock:
            if not self._open:
                return
            try:
                self.release()
            finally:
                self._open = False
                try:
                    self.driver.release_context(self.ordinal)
                except DriverFailure as failure:
                    raise translated_failure(failure, "letting go of the device", device=self.ordinal) from failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def trim(self) -> None:
        """See ``DeviceMemory.trim``."""
        self.attach()
        try:
            self.buffers.trim()
        except DriverFailure as failure:
            raise translated_failure(failure, "unlocking copy buffers", device=self.ordinal) from failure

    def array(self, ptr: int, size: int) -> DeviceArray:
        """``size`` bytes at ``ptr`` as an object that torch, CuPy and others take without a copy.

        It does not keep the memory mapped: after ``unmap`` and ``remap`` it shows the new bytes, in between
        nobody may touch it. Raises UsageError as ``copy_in`` does.
        """
        self._require_inside(ptr, size)
        return DeviceArray(ptr=ptr, size=size, owner=self)

    def copy_in(self, ptr: int, data: memoryview) -> None:
        """See ``DeviceMemory.copy_in``."""
        self._require_inside(ptr, len(data))
        self.attach()
        with self.buffers.lane(slot_bytes=_SMALL_COPY_BYTES) as lane:
            for start in range(0, len(data), _SMALL_COPY_BYTES):
                part = data[start : start + _SMALL_COPY_BYTES]
                slot = lane.next_slot()
                lane.view(slot)[: len(part)] = part
                lane.send(slot, ptr + start, len(part))

    def copy_out(self, ptr: int, data: memoryview) -> None:
        """See ``DeviceMemory.copy_out``."""
        done = 0
        for chunk in self.chunks(ptr, len(data), _SMALL_COPY_BYTES):
            data[done : done + len(chunk)] = chunk
            done += len(chunk)

    def chunks(self, ptr: int, size: int, chunk_bytes: int) -> Iterator[memoryview]:
        """See ``DeviceMemory.chunks``."""
        self._require_inside(ptr, size)
        return self._chunks(ptr, size, chunk_bytes)

    def _chunks(self, ptr: int, size: int, chunk_bytes: int) -> Iterator[memoryview]:
        parts = [(start, min(chunk_bytes, size - start)) for start in range(0, size, chunk_bytes)]
        self.attach()
        with self.buffers.lane(slot_bytes=chunk_bytes) as lane:
            slot = lane.next_slot()
            lane.fetch(slot, ptr, parts[0][1])
            for number, (_, count) in enumerate(parts):
                following = None
                if number + 1 < len(parts):
                    following = lane.next_slot()
                    lane.fetch(following, ptr + parts[number + 1][0], parts[number + 1][1])
                lane.arrived(slot)
                yield lane.view(slot)[:count].toreadonly()
                slot = following if following is not None else slot

    def _hold(self, allocations: Iterable[Allocation]) -> None:
        """These are the allocations from now on."""
        self._allocations = tuple(sorted(allocations, key=lambda a: a.ptr))

    def _require_inside(self, ptr: int, size: int) -> None:
        with self._lock:
            if not self._mapped:
                raise UsageError(f"memory is unmapped: nothing at 0x{ptr:x}", cure="remap it first")
            allocation_around(self._allocations, ptr, size)

    def _clear(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Zero the ``(ptr, size)``, all mapped, and wait. Raises DriverFailure."""
        stream = self.driver.create_stream()
        try:
            try:
                for ptr, size in ranges:
                    self.driver.fill_zero(ptr, size, stream)
            finally:  # what is unmapped after an error must not be written to any more
                self.driver.synchronize(stream)
        finally:
            self.driver.destroy_stream(stream)
