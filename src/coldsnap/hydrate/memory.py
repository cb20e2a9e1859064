"""Stable memory: allocations whose virtual addresses survive letting go of the pages.

This page is the contract, in three protocols: ``StableMemory`` is what all kinds promise, and what one can do
with the bytes depends on who can see them. ``HostAddressable`` memory is looked at through views,
``DeviceMemory`` is copied to and from. ``host.HostMemory`` is the real one for host memory,
``cuda.CudaMemory`` for a GPU, ``cuda.AdoptedMemory`` for what an engine's allocator made there,
``coldsnap.testing.memory`` has a fake, and ``coldsnap.testing.memory_suite`` is the suite that all pass.

An implementation is either *mapped* (every allocation can be read and written) or *unmapped* (no page
is held, every address is still ours). All allocations change together.

- Addresses: an allocation never moves. Where its address is taken, the answer is ``ResourceBusy`` that
  names what is there, and nothing has changed; there is no second choice of address.
- Bytes: after ``reserve`` and after ``remap`` every new byte reads as zero. ``unmap`` forgets them.
- Idempotence: ``unmap`` when unmapped, ``remap`` when mapped and ``release`` when released do nothing;
  a ``remap`` when mapped keeps the bytes.
- Failure: each call either did all it promises or raises and leaves the state it found, but for a
  failed ``unmap``, which may have forgotten bytes and can be called again.
- Threads: the calls may come from any thread and are serialised. Views are plain memory: who writes
  the same byte from two threads, or uses a view across ``unmap`` or ``release``, has a bug, and in the
  real implementations that bug is a crash of the process.
- Grain: addresses and sizes are multiples of ``PAGE_BYTES``; an address given to device memory must be a
  multiple of what the device maps at once (2 MiB), and a range there keeps its neighbours out up to the
  next such multiple.
- Freezing: the object itself is ordinary process memory. When the process is dumped while unmapped and
  restored elsewhere, the same object goes on; ``remap`` checks that the kernel still agrees with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from coldsnap.core.extents import Allocation
from coldsnap.errors import UsageError

__all__ = ["DeviceMemory", "HostAddressable", "StableMemory", "allocation_around", "host_addressable"]


@runtime_checkable
class StableMemory(Protocol):
    """What every kind promises; see the module."""

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Every allocation, by address."""
        ...

    @property
    def mapped(self) -> bool:
        """True when bytes can be had. True as well while there is no allocation."""
        ...

    def reserve(self, size: int, *, tag: str, address: int | None = None) -> Allocation:
        """A new zero-filled allocation of ``size`` bytes, a positive multiple of ``PAGE_BYTES``.

        Without ``address`` (a multiple of ``PAGE_BYTES``) the next free place above the earlier ones is
        taken, the same in every process that makes the same calls. ``tag`` says what it is for.
        Raises UsageError (size, address, or called while unmapped), ResourceBusy (address taken),
        OutOfSpace.
        """
        ...

    def unmap(self) -> None:
        """Give every page back and keep every address, so that nothing else lands there."""
        ...

    def remap(self) -> None:
        """Make every allocation readable and writable again at its own address, all bytes zero.

        Raises ResourceBusy (something else is in the way), OutOfSpace; all of them are then unmapped.
        """
        ...

    def release(self) -> None:
        """Give pages and addresses back; ``allocations`` is empty afterwards."""
        ...


@runtime_checkable
class HostAddressable(StableMemory, Protocol):
    """Stable memory that this process can look at."""

    def view(self, ptr: int, size: int) -> memoryview:
        """A writable view of ``size`` bytes at ``ptr``, all inside one allocation.

        Raises UsageError when unmapped, or naming the range when it is not inside one allocation.
        """
        ...


@runtime_checkable
class DeviceMemory(StableMemory, Protocol):
    """Stable memory on a device. Each call returns when its bytes are where they belong."""

    def copy_in(self, ptr: int, data: memoryview) -> None:
        """Write ``data`` to ``ptr``, all inside one allocation. Raises UsageError as ``view`` does, HostError."""
        ...

    def copy_out(self, ptr: int, data: memoryview) -> None:
        """Fill ``data`` from ``ptr``, all inside one allocation. Raises UsageError as ``view`` does, HostError."""
        ...

    def trim(self) -> None:
        """Let go of the locked host memory that transfers and reads leave for the next one. ``unmap`` does so too."""
        ...

    def chunks(self, ptr: int, size: int, chunk_bytes: int) -> Iterator[memoryview]:
        """``size`` bytes at ``ptr``, in order, as read-only copies of ``chunk_bytes`` each but for the last.

        The next chunk travels while one is looked at; a chunk is good until the next is asked for. Raises
        UsageError as ``view`` does, HostError.
        """
        ...


def host_addressable(memory: StableMemory) -> HostAddressable:
    """The same memory, known to have views. Raises UsageError for memory that this process cannot look at."""
    if not isinstance(memory, HostAddressable):
        raise UsageError(
            f"{type(memory).__name__} cannot be looked at from the host", cure="copy to and from device memory"
        )
    return memory


def allocation_around(allocations: Sequence[Allocation], ptr: int, size: int) -> Allocation:
    """The one of ``allocations``, which are sorted by address, that has the whole range. Raises UsageError."""
    index = bisect_right(allocations, ptr, key=lambda one: one.ptr) - 1
    found = allocations[index] if index >= 0 else None
    if found is None or size <= 0 or ptr + size > found.ptr + found.size:
        raise UsageError(
            f"{size} bytes at 0x{ptr:x} are not inside one allocation",
            cure="ask for a part of one of this memory's allocations",
            facts={"ptr": ptr, "size": size},
        )
    return found
