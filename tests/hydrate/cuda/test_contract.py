"""Device memory keeps the promises of stable memory."""

from __future__ import annotations

import contextlib

from coldsnap.hydrate import DeviceMemory, HostAddressable, StableMemory
from coldsnap.hydrate.cuda import CudaMemory
from coldsnap.testing.cuda import FakeDriver
from coldsnap.testing.memory_suite import StableMemoryContract


class TestCudaMemory(StableMemoryContract):
    PAGE = 2 << 20

    def make_memory(self, base: int) -> StableMemory:
        return CudaMemory(FakeDriver(), base=base)

    def occupy(self, memory: StableMemory, ptr: int, size: int) -> contextlib.AbstractContextManager[None]:
        assert isinstance(memory, CudaMemory)
        assert isinstance(memory.driver, FakeDriver)
        return memory.driver.occupied(ptr, size)


def test_is_device_memory_and_nothing_to_look_at() -> None:
    with CudaMemory(FakeDriver()) as memory:
        assert isinstance(memory, DeviceMemory)
        assert not isinstance(memory, HostAddressable)
