"""Both kinds of stable memory keep the same promises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from coldsnap.hydrate import HostMemory, StableMemory, libc
from coldsnap.testing.memory import POISON, FakeMemory
from coldsnap.testing.memory_suite import StableMemoryContract


class TestHostMemory(StableMemoryContract):
    def make_memory(self, base: int) -> StableMemory:
        return HostMemory(base=base)

    @contextlib.contextmanager
    def occupy(self, memory: StableMemory, ptr: int, size: int) -> Iterator[None]:
        libc.unmap(ptr, size)  # a no-op where nothing is; elsewhere our reservation is lost
        libc.map_anonymous(ptr, size, writable=True, replace=False)
        yield
        libc.unmap(ptr, size)


class TestHostMemoryWithSmallPages(TestHostMemory):
    def make_memory(self, base: int) -> StableMemory:
        return HostMemory(base=base, huge_pages=False)


class TestFakeMemory(StableMemoryContract):
    def make_memory(self, base: int) -> StableMemory:
        return FakeMemory(base=base)

    @contextlib.contextmanager
    def occupy(self, memory: StableMemory, ptr: int, size: int) -> Iterator[None]:
        assert isinstance(memory, FakeMemory)
        memory.occupied.append((ptr, size))
        yield
        memory.occupied.remove((ptr, size))

    def test_a_view_that_outlived_unmap_is_poison(self) -> None:
        memory = FakeMemory()
        allocation = memory.reserve(4096, tag="a")
        view = memory.view(allocation.ptr, 4)
        view[:] = b"abcd"
        memory.unmap()
        memory.remap()
        assert view.tobytes() == bytes([POISON]) * 4
