"""vLLM's sleep-mode allocator without vLLM, torch or a GPU: its names, its books, and its sins, over `FakeDriver`.

    cumem = FakeCuMem(driver, form="0.33")     # looks like the module vllm.device_allocator.cumem
    with cumem.allocator.use_memory_pool("weights"):
        ptr = cumem.malloc(3 << 20)            # what torch.empty would do there
    cumem.free(ptr)

Two forms: "0.26" has one pair a tag, sleeps what sleeps already, and wakes what is awake; "0.33" (as 0.32) has lists
of pairs, asks first, and can `discard`. In both, a context that ends gives allocations without a live block back to
the driver while torch's pool still lists them, and C code that fails in the middle leaves what it had done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from coldsnap.hydrate.cuda.driver import DriverFailure
from coldsnap.testing.cuda import FakeDriver
from coldsnap.testing.cumem_pool import FakePool

__all__ = ["AllocationData", "CuMemAllocator26", "CuMemAllocator33", "FakeBackup", "FakeCuMem", "Form"]

Form: TypeAlias = Literal["0.26", "0.33"]
Handle: TypeAlias = tuple[int, int, int, int]
_WORDS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "out of memory",
    "CUDA_ERROR_INVALID_VALUE": "invalid argument",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an illegal memory access was encountered",
}
_DEFERRABLE_TAGS = ("weights", "kv_cache")


@dataclass(frozen=True)
class FakeBackup:
    """The pinned tensor of a sleep at level 1."""

    data: bytes

    def numel(self) -> int:
        """Elements."""
        return len(self.data)

    def element_size(self) -> int:
        """Bytes of one."""
        return 1


@dataclass
class AllocationData:
    """One row of vLLM's books."""

    handle: Handle
    tag: str
    cpu_backup_tensor: FakeBackup | None = None
    is_asleep: bool = False


class CuMemAllocator26:
    """vLLM 0.26's."""

    default_tag = "default"

    def __init__(self, cumem: FakeCuMem) -> None:
        self._cumem = cumem
        self.pointer_to_data: dict[int, AllocationData] = {}
        self.current_tag = self.default_tag
        self.allocator_and_pools: dict[str, Any] = {}

    def _python_malloc_callback(self, allocation_handle: Handle) -> None:
        self.pointer_to_data[allocation_handle[2]] = AllocationData(allocation_handle, self.current_tag)

    def _python_free_callback(self, ptr: int) -> Handle:
        return self.pointer_to_data.pop(ptr).handle

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Copies the tags to host memory, and unmaps everything."""
        wanted = (self.default_tag,) if offload_tags is None else offload_tags
        for ptr, data in self.pointer_to_data.items():
            if self._skips(data):
                continue
            if data.tag in wanted:
                data.cpu_backup_tensor = FakeBackup(self._cumem.driver.peek(ptr, data.handle[1]))
            try:
                self._cumem.unmap_and_release(data.handle)
            finally:
                data.is_asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Maps what has one of the tags."""
        for data in self.pointer_to_data.values():
            if self._wakes(data, tags):
                self._cumem.create_and_map(data.handle)
                data.is_asleep = False
                data.cpu_backup_tensor = None

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """What is allocated inside is of this tag, in a pool of its own."""
        tag = self.default_tag if tag is None else tag
        old_tag, self.current_tag = self.current_tag, tag
        pool = FakePool(self._cumem._my_malloc)
        self._remember(tag, (pool, "allocator"))
        try:
            with self._cumem._current_pool(pool):
                yield
                self._trim(pool)
        finally:
            self.current_tag = old_tag

    def get_current_usage(self) -> int:
        """Bytes of every row, mapped or not."""
        return sum(data.handle[1] for data in self.pointer_to_data.values())

    def _skips(self, data: AllocationData) -> bool:
        return False

    def _wakes(self, data: AllocationData, tags: list[str] | None) -> bool:
        return tags is None or data.tag in tags

    def _remember(self, tag: str, pair: tuple[FakePool, str]) -> None:
        self.allocator_and_pools[tag] = pair

    def _trim(self, pool: FakePool) -> None:
        for segment in pool.snapshot():
            if segment["allocated_size"] == 0:
                self._cumem._my_free(segment["address"])


class CuMemAllocator33(CuMemAllocator26):
    """vLLM 0.32's and 0.33's."""

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Unmaps what has one of the tags."""
        for data in self.pointer_to_data.values():
            if data.tag in tags and not data.is_asleep:
                self._cumem.unmap_and_release(data.handle)
                data.is_asleep = True

    def _skips(self, data: AllocationData) -> bool:
        return data.is_asleep

    def _wakes(self, data: AllocationData, tags: list[str] | None) -> bool:
        return data.is_asleep and (tags is None or data.tag in tags or data.tag not in _DEFERRABLE_TAGS)

    def _remember(self, tag: str, pair: tuple[FakePool, str]) -> None:
        self.allocator_and_pools.setdefault(tag, []).append(pair)

    def _trim(self, pool: FakePool) -> None:
        for segment in pool.snapshot():
            data = self.pointer_to_data.get(segment["address"])
            if segment["allocated_size"] == 0 and data and not data.is_asleep:
                self._cumem._my_free(segment["address"])


class FakeCuMem:
    """The module. Its allocator exists from the start, and so does the device's context, as with torch."""

    cumem_available = True

    def __init__(self, driver: FakeDriver, *, form: Form) -> None:
        self.driver = driver
        self.allocator = CuMemAllocator26(self) if form == "0.26" else CuMemAllocator33(self)
        self._context = driver.retain_context(0)
        self._slots: dict[int, int] = {}  # where vLLM keeps a driver's handle -> the handle
        self._current: FakePool | None = None
        self._graphs: FakePool | None = None
        self._owners: dict[int, FakePool] = {}

    def create_and_map(self, allocation_handle: Handle) -> None:
        """Memory behind the row's addresses. Raises RuntimeError, and leaves what was done by then."""
        device, size, ptr, slot = allocation_handle
        with self._c_code():
            self._slots[slot] = self.driver.create(device, size)
            self.driver.map(ptr, size, self._slots[slot])
            self.driver.allow(device, ptr, size)

    def unmap_and_release(self, allocation_handle: Handle) -> None:
        """Takes it away. Raises RuntimeError, and leaves what was done by then."""
        _, size, ptr, slot = allocation_handle
        with self._c_code():
            self.driver.unmap(ptr, size)
            self.driver.destroy(self._slots[slot])

    def malloc(self, size: int) -> int:
        """What `torch.empty` does inside `use_memory_pool`: a tensor's address."""
        if self._current is None:
            raise RuntimeError("no pool is in use")
        ptr = self._current.malloc(size)
        self._owners[ptr] = self._current
        return ptr

    def free(self, ptr: int) -> None:
        """The tensor is gone; the pool keeps its block."""
        self._owners.pop(ptr).free(ptr)

    def lend_to_graphs(self) -> None:
        """Make the pool that `capturing` uses one of the allocator's."""
        self._graphs = FakePool(self._my_malloc)
        self.allocator._remember("cudagraph", (self._graphs, "allocator"))

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """A CUDA graph is captured: what is allocated comes from the pool of graphs, and nothing is given back."""
        if self._graphs is None:
            raise RuntimeError("graphs have a pool of torch's own")
        with self._current_pool(self._graphs):
            yield

    @contextlib.contextmanager
    def _current_pool(self, pool: FakePool) -> Iterator[None]:
        before, self._current = self._current, pool
        try:
            yield
        finally:
            self._current = before

    def _my_malloc(self, size: int) -> int:
        grain = self.driver.facts.granularity_bytes
        with self._c_code():
            aligned = -(-size // grain) * grain
            ptr = self.driver.reserve(aligned, alignment=0, hint=0)
            slot = 0xC000_0000 + 8 * len(self._slots)
            self._slots[slot] = 0
        handle = (0, aligned, ptr, slot)
        self.allocator._python_malloc_callback(handle)
        self.create_and_map(handle)
        return ptr

    def _my_free(self, ptr: int) -> None:
        """vLLM's own way to give one back: the addresses stay reserved."""
        self.unmap_and_release(self.allocator._python_free_callback(ptr))

    @contextlib.contextmanager
    def _c_code(self) -> Iterator[None]:
        self.driver.use_context(self._context)
        try:
            yield
        except DriverFailure as failure:
            raise RuntimeError(f"CUDA Error: {_WORDS.get(failure.code, failure.code)} at cumem.cpp:1") from failure
