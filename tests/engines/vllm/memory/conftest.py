"""A vLLM that has loaded a model and its cache, without vLLM: its allocator over a driver that keeps books."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from coldsnap.engines.vllm.cumem import CuMemMemory
from coldsnap.engines.vllm.pages import CuMem
from coldsnap.testing.cuda import FakeDriver
from coldsnap.testing.cumem import CuMemAllocator26, FakeCuMem

MIB = 1 << 20


@dataclass
class LoadedVllm:
    """`tensors`: name -> (address, bytes), as they were allocated. `pinned_bytes` is what torch is said to keep."""

    driver: FakeDriver
    cumem: FakeCuMem
    tensors: dict[str, tuple[int, int]] = field(default_factory=dict)
    pinned_bytes: int = 0

    @property
    def allocator(self) -> CuMemAllocator26:
        return self.cumem.allocator

    def lent(self) -> CuMem:
        return CuMem(
            allocator=self.allocator,
            create_and_map=self.cumem.create_and_map,
            unmap_and_release=self.cumem.unmap_and_release,
            pinned_bytes=lambda: self.pinned_bytes,
            lend_to_graphs=self.cumem.lend_to_graphs,
            take=self.cumem.malloc,
        )

    def allocate(self, name: str, size: int) -> int:
        ptr = self.cumem.malloc(size)
        self.tensors[name] = (ptr, size)
        return ptr

    def free(self, name: str) -> None:
        self.cumem.free(self.tensors.pop(name)[0])

    def asleep(self) -> dict[str, list[bool]]:
        """Tag -> the flags of its rows, by address."""
        flags: dict[str, list[bool]] = {}
        for _, data in sorted(self.allocator.pointer_to_data.items()):
            flags.setdefault(data.tag, []).append(data.is_asleep)
        return flags

    def really_mapped(self) -> dict[int, bool]:
        """Address of each row -> whether the driver has memory there."""
        return {ptr: self._is_mapped(ptr) for ptr in self.allocator.pointer_to_data}

    def books_are_true(self) -> bool:
        """Every flag says what the driver says, and every handle is the one it was given."""
        rows = self.allocator.pointer_to_data
        told = {ptr: not data.is_asleep for ptr, data in rows.items()}
        return told == self.really_mapped() and all(data.handle[2] == ptr for ptr, data in rows.items())

    def _is_mapped(self, ptr: int) -> bool:
        try:
            self.driver.peek(ptr, 1)
        except KeyError:
            return False
        return True


def load(vllm: LoadedVllm, *, workspace: bool = True) -> None:
    """What a start of vLLM allocates: weights with a tensor thrown away, keys and values, scratch, and the rest."""
    with vllm.allocator.use_memory_pool("weights"):
        vllm.allocate("norm", 3000)
        vllm.allocate("bias", 100_000)
        vllm.allocate("embed", 24 * MIB)
        vllm.allocate("unpacked", 12 * MIB)
        vllm.allocate("qkv", 3 * MIB)
        vllm.free("bias")
        vllm.free("unpacked")  # its allocation goes when the context ends
    with vllm.allocator.use_memory_pool("kv_cache"):
        for layer in range(3):
            vllm.allocate(f"kv{layer}", 16 * MIB)
    if workspace:
        with vllm.allocator.use_memory_pool("workspace"):
            vllm.allocate("scratch", MIB)
    with vllm.allocator.use_memory_pool("runtime"):
        vllm.allocate("tables", MIB)


@pytest.fixture(params=["0.26", "0.33"])
def vllm(request: pytest.FixtureRequest) -> Iterator[LoadedVllm]:
    driver = FakeDriver()
    made = LoadedVllm(driver, FakeCuMem(driver, form=request.param))
    load(made)
    yield made
    assert driver.violations == []
    assert made.books_are_true()


@pytest.fixture
def empty_memory(vllm: LoadedVllm) -> Iterator[CuMemMemory]:
    with CuMemMemory(vllm.driver, ordinal=0, cumem=vllm.lent()) as made:
        yield made


@pytest.fixture
def memory(empty_memory: CuMemMemory) -> CuMemMemory:
    empty_memory.adopt_weights()
    return empty_memory
