"""Memory that an engine lends keeps the promises of stable memory, and stays the engine's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.core.extents import PAGE_BYTES, Allocation
from coldsnap.errors import ColdsnapError, HostError, ResourceBusy, UsageError
from coldsnap.hydrate import DeviceMemory, ProvedSource, Segment, StableMemory, TransferPath, hydrate_file
from coldsnap.hydrate.cuda import AdoptedMemory, DriverFailure
from coldsnap.testing.cuda import GARBAGE, FakeDriver
from coldsnap.testing.memory_suite import StableMemoryContract

GRAIN = 2 << 20
REGION = 256 << 30
BASE = 0x5100_0000_0000


class LendingEngine:
    """An engine with an allocator: places it gives out, and the one call of each kind that `Pages` is."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.sizes: dict[int, int] = {}
        self.mapped: set[int] = set()
        self._regions: set[int] = set()

    def allocate(self, ptr: int, size: int) -> None:
        region = ptr // REGION * REGION
        if region not in self._regions:
            if self.driver.reserve(REGION, alignment=GRAIN, hint=region) != region:
                self.driver.unreserve(0x7E00_0000_0000, REGION)
                raise ResourceBusy(f"0x{ptr:x} is taken")
            self._regions.add(region)
        self.sizes[ptr] = size
        self.map(ptr)

    def free(self, ptr: int) -> None:
        self.unmap(ptr)
        del self.sizes[ptr]

    def map(self, ptr: int) -> None:
        if ptr in self.mapped:
            return
        size = -(-self.sizes[ptr] // GRAIN) * GRAIN
        try:
            handle = self.driver.create(0, size)
            try:
                self.driver.map(ptr, size, handle)
            finally:
                self.driver.destroy(handle)
            self.driver.allow(0, ptr, size)
        except DriverFailure as failure:
            if failure.code == "CUDA_ERROR_INVALID_VALUE":
                raise ResourceBusy(f"0x{ptr:x} is taken") from failure
            if failure.call == "cuMemSetAccess":
                self.driver.unmap(ptr, size)
            raise HostError(str(failure)) from failure
        self.mapped.add(ptr)

    def unmap(self, ptr: int) -> None:
        if ptr not in self.mapped:
            return
        try:
            self.driver.unmap(ptr, -(-self.sizes[ptr] // GRAIN) * GRAIN)
        except DriverFailure as failure:
            raise HostError(str(failure)) from failure
        self.mapped.discard(ptr)


class ReservingMemory(AdoptedMemory):
    """Adopts what its engine allocates when asked; so the suite, which reserves, can be run."""

    def __init__(self, driver: FakeDriver, engine: LendingEngine, *, base: int) -> None:
        super().__init__(driver, ordinal=0, pages=engine)
        self._engine = engine
        self._base = base

    def reserve(self, size: int, *, tag: str, address: int | None = None) -> Allocation:  # type: ignore[override]
        with self._lock:
            self.attach()
            held = {one.ptr for one in self.allocations}
            for ptr in set(self._engine.sizes) - held:  # nobody's any more
                self._engine.free(ptr)
            ends = [one.ptr + one.size + GRAIN for one in self.allocations if one.ptr < self._base + REGION]
            ptr = max(ends, default=self._base) if address is None else address
            allocation = Allocation(ptr=ptr, size=size, tag=tag)
            new = self.mapped and ptr % GRAIN == 0 and size > 0 and size % PAGE_BYTES == 0
            if new and not any(one.ptr < ptr + size and ptr < one.ptr + one.size for one in self.allocations):
                self._engine.allocate(ptr, size)
                self._clear([(ptr, size)])
            self.adopt([allocation])
            return allocation


class TestAdoptedMemory(StableMemoryContract):
    PAGE = GRAIN

    def make_memory(self, base: int) -> StableMemory:
        driver = FakeDriver()
        return ReservingMemory(driver, LendingEngine(driver), base=base)

    def occupy(self, memory: StableMemory, ptr: int, size: int) -> contextlib.AbstractContextManager[None]:
        assert isinstance(memory, AdoptedMemory)
        assert isinstance(memory.driver, FakeDriver)
        return memory.driver.occupied(ptr, size)


@pytest.fixture
def engine(driver: FakeDriver) -> LendingEngine:
    return LendingEngine(driver)


@pytest.fixture
def memory(driver: FakeDriver, engine: LendingEngine) -> Iterator[AdoptedMemory]:
    """Two allocations of an engine, adopted. Afterwards the engine has what it had, and nothing else is left."""
    with AdoptedMemory(driver, ordinal=0, pages=engine) as adopted:
        adopted.attach()
        engine.allocate(BASE, 4 * GRAIN)
        engine.allocate(BASE + 8 * GRAIN, GRAIN)
        adopted.adopt([row(BASE + 8 * GRAIN, GRAIN), row(BASE, 4 * GRAIN)])
        yield adopted
    left = {"reservations": 1, "mappings": len(engine.mapped)}
    assert driver.leftovers() == {kind: count for kind, count in left.items() if count}
    assert driver.violations == []


def row(ptr: int, size: int) -> Allocation:
    return Allocation(ptr=ptr, size=size, tag="weights")


def test_adopting_keeps_the_bytes_and_asks_nothing_of_the_engine(driver: FakeDriver, memory: AdoptedMemory) -> None:
    assert isinstance(memory, DeviceMemory)
    assert [one.ptr for one in memory.allocations] == [BASE, BASE + 8 * GRAIN]
    assert memory.mapped
    assert driver.peek(BASE, 4) == bytes([GARBAGE]) * 4
    assert driver.count("fill_zero") == 0


def test_nothing_can_be_reserved(memory: AdoptedMemory) -> None:
    with pytest.raises(UsageError, match="4096 bytes for 'more'"):
        memory.reserve(PAGE_BYTES, tag="more")


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([row(BASE + 16 * GRAIN, GRAIN), row(BASE + GRAIN, GRAIN)], ResourceBusy),
        ([row(BASE + 16 * GRAIN, GRAIN), row(BASE + 16 * GRAIN, GRAIN)], ResourceBusy),
        ([row(BASE + 16 * GRAIN, GRAIN), row(BASE + 32 * GRAIN + 1, GRAIN)], UsageError),
        ([row(BASE + 16 * GRAIN, GRAIN + 1)], UsageError),
        ([row(BASE + 16 * GRAIN, 0)], UsageError),
    ],
)
def test_what_cannot_be_adopted_adopts_nothing(
    memory: AdoptedMemory, rows: list[Allocation], kind: type[ColdsnapError]
) -> None:
    before = memory.allocations
    with pytest.raises(kind):
        memory.adopt(rows)
    assert memory.allocations == before


def test_unmapped_memory_adopts_nothing(memory: AdoptedMemory) -> None:
    memory.unmap()
    with pytest.raises(UsageError, match="unmapped"):
        memory.adopt([row(BASE + 16 * GRAIN, GRAIN)])


def test_unmapping_waits_for_the_device_and_keeps_no_buffer(
    driver: FakeDriver, engine: LendingEngine, memory: AdoptedMemory
) -> None:
    memory.copy_in(BASE, memoryview(b"abc"))
    driver.calls.clear()
    memory.unmap()
    assert driver.calls[0] == "settle()"
    assert driver.leftovers() == {"contexts": 1, "reservations": 1}
    assert engine.mapped == set()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_remap_that_fails_leaves_all_unmapped(
    driver: FakeDriver, engine: LendingEngine, memory: AdoptedMemory, call: str, after: int
) -> None:
    memory.unmap()
    driver.fail(call, after=after)
    with pytest.raises(ColdsnapError, match=call):
        memory.remap()
    assert not memory.mapped
    assert engine.mapped == set()
    assert driver.leftovers() == {"contexts": 1, "reservations": 1}
    memory.remap()
    assert driver.peek(BASE, 4 * GRAIN) == bytes(4 * GRAIN)


@pytest.mark.parametrize("after", [0, 1])
def test_an_unmap_that_fails_can_be_called_again(
    driver: FakeDriver, engine: LendingEngine, memory: AdoptedMemory, after: int
) -> None:
    driver.fail("cuMemUnmap", after=after)
    with pytest.raises(HostError, match="cuMemUnmap"):
        memory.unmap()
    assert memory.mapped
    assert len(engine.mapped) == 2 - after
    memory.unmap()
    assert (memory.mapped, engine.mapped) == (False, set())


@pytest.mark.parametrize("unmapped", [False, True])
def test_release_leaves_all_to_the_engine(engine: LendingEngine, memory: AdoptedMemory, unmapped: bool) -> None:
    if unmapped:
        memory.unmap()
    held = set(engine.mapped)
    memory.release()
    memory.release()
    assert (memory.allocations, memory.mapped) == ((), True)
    assert engine.mapped == held


@pytest.mark.parametrize("path", list(TransferPath))
def test_a_file_arrives_in_adopted_memory_by_every_path(
    driver: FakeDriver, memory: AdoptedMemory, tmp_path: Path, path: TransferPath
) -> None:
    content = os.urandom(3 * GRAIN)
    (tmp_path / "model.pack").write_bytes(content)
    memory.unmap()
    memory.remap()
    with (tmp_path / "model.pack").open("rb") as file:
        source = ProvedSource(fd=file.fileno(), bytes=len(content), evidence="test")
        segments = [
            Segment(file_offset=0, ptr=BASE + GRAIN, size=2 * GRAIN),
            Segment(file_offset=2 * GRAIN, ptr=BASE + 8 * GRAIN, size=GRAIN),
        ]
        report = hydrate_file(source, segments, memory, path=path)
    assert report.bytes == len(content)
    assert driver.peek(BASE + GRAIN, 2 * GRAIN) == content[: 2 * GRAIN]
    assert driver.peek(BASE + 8 * GRAIN, GRAIN) == content[2 * GRAIN :]
    assert driver.peek(BASE, GRAIN) == bytes(GRAIN)


def test_a_device_that_fails_while_it_settles_has_unmapped_nothing(
    driver: FakeDriver, engine: LendingEngine, memory: AdoptedMemory
) -> None:
    driver.fail("cuCtxSynchronize")
    with pytest.raises(HostError, match="cuCtxSynchronize"):
        memory.unmap()
    assert memory.mapped
    assert len(engine.mapped) == 2
