"""The suite every implementation of ``coldsnap.hydrate.memory.StableMemory`` passes.

A pytest base class. Derive from it and give it ``make_memory`` and ``occupy``::

    class TestMine(StableMemoryContract):
        def make_memory(self, base): ...
        def occupy(self, memory, ptr, size): ...
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from coldsnap.core.extents import PAGE_BYTES
from coldsnap.errors import ResourceBusy, UsageError
from coldsnap.hydrate.memory import DeviceMemory, StableMemory, host_addressable

__all__ = ["StableMemoryContract"]


class StableMemoryContract(abc.ABC):
    """The promises of ``coldsnap.hydrate.memory``, as tests."""

    #: Free addresses, the same in every run. Each test starts here and leaves nothing behind.
    BASE = 0x5100_0000_0000
    ELSEWHERE = 0x5180_0000_0000
    #: What addresses are multiples of.
    PAGE = PAGE_BYTES

    @abc.abstractmethod
    def make_memory(self, base: int) -> StableMemory:
        """New, empty memory whose first allocation goes to ``base``."""

    @abc.abstractmethod
    def occupy(self, memory: StableMemory, ptr: int, size: int) -> contextlib.AbstractContextManager[None]:
        """Let somebody else hold a range, even one that ``memory`` believes is reserved for it."""

    def read(self, memory: StableMemory, ptr: int, size: int) -> bytes:
        """What lies there, whatever kind of memory it is."""
        if isinstance(memory, DeviceMemory):
            return b"".join(bytes(chunk) for chunk in memory.chunks(ptr, size, 1 << 20))
        return host_addressable(memory).view(ptr, size).tobytes()

    def write(self, memory: StableMemory, ptr: int, data: bytes) -> None:
        """Put bytes there."""
        if isinstance(memory, DeviceMemory):
            memory.copy_in(ptr, memoryview(data))
        else:
            host_addressable(memory).view(ptr, len(data))[:] = data

    @pytest.fixture
    def memory(self) -> Iterator[StableMemory]:
        memory = self.make_memory(self.BASE)
        yield memory
        memory.release()

    def test_is_the_protocol(self, memory: StableMemory) -> None:
        assert isinstance(memory, StableMemory)

    def test_new_memory_is_mapped_and_empty(self, memory: StableMemory) -> None:
        assert memory.mapped
        assert memory.allocations == ()
        memory.unmap()
        memory.remap()
        assert memory.mapped

    def test_reserved_bytes_are_zero_and_writable(self, memory: StableMemory) -> None:
        allocation = memory.reserve(3 * self.PAGE, tag="weights")
        assert (allocation.ptr, allocation.size, allocation.tag) == (self.BASE, 3 * self.PAGE, "weights")
        assert self.read(memory, allocation.ptr, allocation.size) == bytes(3 * self.PAGE)
        self.write(memory, allocation.ptr + 5, b"abc")
        assert self.read(memory, allocation.ptr + 4, 5) == b"\0abc\0"

    def test_same_calls_give_same_addresses(self) -> None:
        layouts = []
        for _ in range(2):
            memory = self.make_memory(self.BASE)
            memory.reserve(self.PAGE, tag="a")
            memory.reserve(5 * self.PAGE, tag="b", address=self.ELSEWHERE)
            memory.reserve(2 * self.PAGE, tag="c")
            layouts.append(memory.allocations)
            memory.release()
        assert layouts[0] == layouts[1]
        ends = [(a.ptr, a.ptr + a.size) for a in layouts[0]]
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))

    def test_an_address_is_taken_as_given(self, memory: StableMemory) -> None:
        allocation = memory.reserve(self.PAGE, tag="a", address=self.ELSEWHERE)
        assert allocation.ptr == self.ELSEWHERE
        self.write(memory, self.ELSEWHERE, b"1")

    @pytest.mark.parametrize("size", [0, -PAGE_BYTES, 1, PAGE_BYTES + 1])
    def test_sizes_that_are_no_pages_are_refused(self, memory: StableMemory, size: int) -> None:
        with pytest.raises(UsageError, match=str(size)):
            memory.reserve(size, tag="a")
        assert memory.allocations == ()

    def test_addresses_that_are_no_pages_are_refused(self, memory: StableMemory) -> None:
        with pytest.raises(UsageError, match=str(self.BASE + 1)):
            memory.reserve(self.PAGE, tag="a", address=self.BASE + 1)

    def test_a_taken_address_is_refused_and_nothing_changes(self, memory: StableMemory) -> None:
        with (
            self.occupy(memory, self.ELSEWHERE + self.PAGE, self.PAGE),
            pytest.raises(ResourceBusy, match=f"0x{self.ELSEWHERE:x}"),
        ):
            memory.reserve(2 * self.PAGE, tag="a", address=self.ELSEWHERE)
        assert memory.allocations == ()
        memory.reserve(2 * self.PAGE, tag="a", address=self.ELSEWHERE)

    def test_its_own_allocations_are_taken_too(self, memory: StableMemory) -> None:
        first = memory.reserve(4 * self.PAGE, tag="a")
        with pytest.raises(ResourceBusy):
            memory.reserve(self.PAGE, tag="b", address=first.ptr + self.PAGE)
        assert memory.allocations == (first,)

    def test_bytes_are_had_inside_one_allocation_only(self, memory: StableMemory) -> None:
        allocation = memory.reserve(2 * self.PAGE, tag="a")
        end = allocation.ptr + allocation.size
        for ptr, size in ((end - 1, 2), (end, 1), (allocation.ptr - 1, 2), (allocation.ptr, 0), (allocation.ptr, -1)):
            with pytest.raises(UsageError):
                self.read(memory, ptr, size)

    def test_unmap_keeps_addresses_and_forgets_bytes(self, memory: StableMemory) -> None:
        one = memory.reserve(self.PAGE, tag="a")
        two = memory.reserve(2 * self.PAGE, tag="b", address=self.ELSEWHERE)
        self.write(memory, one.ptr, b"abc")
        memory.unmap()
        assert not memory.mapped
        assert memory.allocations == (one, two)
        with pytest.raises(UsageError, match="unmapped"):
            self.read(memory, one.ptr, 1)
        with pytest.raises(UsageError, match="unmapped"):
            memory.reserve(self.PAGE, tag="c")
        memory.unmap()
        memory.remap()
        assert memory.mapped
        assert memory.allocations == (one, two)
        assert self.read(memory, one.ptr, one.size) == bytes(one.size)
        self.write(memory, two.ptr + two.size - 1, b"7")

    def test_remap_when_mapped_keeps_bytes(self, memory: StableMemory) -> None:
        allocation = memory.reserve(self.PAGE, tag="a")
        self.write(memory, allocation.ptr, b"9")
        memory.remap()
        assert self.read(memory, allocation.ptr, 1) == b"9"

    def test_many_rounds(self, memory: StableMemory) -> None:
        allocation = memory.reserve(self.PAGE, tag="a")
        for value in range(1, 6):
            assert self.read(memory, allocation.ptr, allocation.size) == bytes(allocation.size)
            self.write(memory, allocation.ptr, bytes([value]) * allocation.size)
            memory.unmap()
            memory.remap()

    def test_remap_refuses_a_taken_range_and_can_be_tried_again(self, memory: StableMemory) -> None:
        one = memory.reserve(self.PAGE, tag="a")
        two = memory.reserve(2 * self.PAGE, tag="b", address=self.ELSEWHERE)
        memory.unmap()
        with (
            self.occupy(memory, self.ELSEWHERE + self.PAGE, self.PAGE),
            pytest.raises(ResourceBusy, match=f"0x{self.ELSEWHERE:x}"),
        ):
            memory.remap()
        assert not memory.mapped
        with pytest.raises(UsageError, match="unmapped"):
            self.read(memory, one.ptr, 1)
        memory.remap()
        assert memory.mapped
        assert memory.allocations == (one, two)
        assert self.read(memory, two.ptr, two.size) == bytes(two.size)

    @pytest.mark.parametrize("unmapped", [False, True])
    def test_release_forgets_all_and_can_be_repeated(self, memory: StableMemory, unmapped: bool) -> None:
        memory.reserve(self.PAGE, tag="a")
        if unmapped:
            memory.unmap()
        memory.release()
        memory.release()
        assert memory.allocations == ()
        assert memory.mapped
        with pytest.raises(UsageError):
            self.read(memory, self.BASE, 1)
        assert memory.reserve(self.PAGE, tag="a").ptr == self.BASE

    def test_threads_never_share_an_address(self, memory: StableMemory) -> None:
        start = threading.Barrier(4)

        def reserve_some() -> None:
            start.wait()
            for _ in range(5):
                memory.reserve(self.PAGE, tag="t")

        threads = [threading.Thread(target=reserve_some) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        allocations = memory.allocations
        assert len(allocations) == 20
        assert all(a.ptr + a.size <= b.ptr for a, b in pairwise(allocations))
