"""What device memory asks of the driver, in which order, and what is left when the driver says no."""

from __future__ import annotations

import pytest

from coldsnap.core.extents import PAGE_BYTES
from coldsnap.errors import ColdsnapError, HostError, MissingCapability, OutOfSpace, ResourceBusy, UsageError
from coldsnap.hydrate.cuda import DEFAULT_DEVICE_BASE, CudaMemory
from coldsnap.testing.cuda import GARBAGE, FakeDriver

GRAIN = 2 << 20
BASE = DEFAULT_DEVICE_BASE
REGION = 256 << 30


def test_steps_of_one_allocation(driver: FakeDriver, device: CudaMemory) -> None:
    driver.calls.clear()
    device.reserve(PAGE_BYTES, tag="a")
    device.unmap()
    device.remap()
    device.release()
    mapped = [
        f"create({GRAIN})",
        f"map({BASE:#x}, {GRAIN})",
        "destroy()",
        f"allow({BASE:#x}, {GRAIN})",
        "create_stream()",
        f"fill_zero({BASE:#x}, {GRAIN})",
        "synchronize()",
        "destroy_stream()",
    ]
    assert driver.calls == [
        f"reserve({BASE:#x}, {REGION})",
        *mapped,
        "settle()",
        f"unmap({BASE:#x}, {GRAIN})",
        *mapped,
        "settle()",
        f"unmap({BASE:#x}, {GRAIN})",
        f"unreserve({BASE:#x}, {REGION})",
    ]


def test_unmapped_memory_costs_the_device_nothing(driver: FakeDriver, device: CudaMemory) -> None:
    device.reserve(3 * GRAIN, tag="a")
    device.copy_in(BASE, memoryview(b"abc"))
    device.unmap()
    assert driver.leftovers() == {"contexts": 1, "reservations": 1}


def test_neighbours_are_a_grain_apart_whatever_their_size(device: CudaMemory) -> None:
    one = device.reserve(PAGE_BYTES, tag="a")
    two = device.reserve(GRAIN + PAGE_BYTES, tag="b")
    three = device.reserve(PAGE_BYTES, tag="c")
    assert (one.ptr, two.ptr, three.ptr) == (BASE, BASE + 2 * GRAIN, BASE + 5 * GRAIN)
    with pytest.raises(ResourceBusy):
        device.reserve(PAGE_BYTES, tag="d", address=two.ptr + GRAIN)  # behind its bytes, inside its last grain


def test_allocations_share_a_region_and_never_cross_into_the_next(driver: FakeDriver, device: CudaMemory) -> None:
    device.reserve(GRAIN, tag="a", address=BASE + REGION - 2 * GRAIN)
    with pytest.raises(UsageError, match=str(REGION)):
        device.reserve(2 * GRAIN, tag="b", address=BASE + 2 * REGION - GRAIN)
    assert device.reserve(GRAIN, tag="c", address=BASE).ptr == BASE
    assert driver.leftovers()["reservations"] == 1
    assert device.reserve(GRAIN, tag="d").ptr == BASE + REGION  # a grain of nothing, and no room behind it
    assert driver.leftovers()["reservations"] == 2


def test_an_address_inside_a_grain_is_refused(device: CudaMemory) -> None:
    with pytest.raises(UsageError, match=str(GRAIN)):
        device.reserve(PAGE_BYTES, tag="a", address=BASE + PAGE_BYTES)


def test_another_address_than_the_wished_one_is_given_back(driver: FakeDriver, device: CudaMemory) -> None:
    driver.elsewhere = True
    with pytest.raises(ResourceBusy, match="the driver offered 0x7e0000000000"):
        device.reserve(PAGE_BYTES, tag="a", address=BASE)
    assert driver.leftovers() == {"contexts": 1}
    assert device.allocations == ()


@pytest.mark.parametrize(
    "call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuStreamCreate", "cuMemsetD8Async"]
)
def test_a_reserve_that_fails_leaves_nothing(driver: FakeDriver, device: CudaMemory, call: str) -> None:
    driver.fail(call)
    with pytest.raises(HostError, match=call) as caught:
        device.reserve(PAGE_BYTES, tag="a")
    assert caught.value.facts["code"] == "CUDA_ERROR_UNKNOWN"
    assert driver.leftovers() == {"contexts": 1}
    assert device.reserve(PAGE_BYTES, tag="a").ptr == BASE


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_remap_that_fails_leaves_all_unmapped(driver: FakeDriver, device: CudaMemory, call: str, after: int) -> None:
    for tag in ("a", "b"):
        device.reserve(GRAIN, tag=tag)
    device.unmap()
    driver.fail(call, after=after)
    with pytest.raises(ColdsnapError, match=call):
        device.remap()
    assert not device.mapped
    assert driver.leftovers() == {"contexts": 1, "reservations": 1}
    device.remap()
    assert device.mapped


def test_a_full_device_is_out_of_space() -> None:
    driver = FakeDriver(total_bytes=4 * GRAIN)
    with CudaMemory(driver) as device:
        device.reserve(3 * GRAIN, tag="a")
        with pytest.raises(OutOfSpace, match="allocation 'b'"):
            device.reserve(2 * GRAIN, tag="b")
        device.reserve(GRAIN, tag="b")
    assert driver.leftovers() == {}


def test_an_unmap_that_fails_can_be_called_again(driver: FakeDriver, device: CudaMemory) -> None:
    for tag in ("a", "b"):
        device.reserve(GRAIN, tag=tag)
    driver.fail("cuMemUnmap", after=1)
    with pytest.raises(HostError, match="cuMemUnmap"):
        device.unmap()
    device.unmap()
    assert driver.leftovers() == {"contexts": 1, "reservations": 1}


def test_release_goes_on_after_a_call_that_fails(driver: FakeDriver) -> None:
    device = CudaMemory(driver)
    for tag in ("a", "b"):
        device.reserve(GRAIN, tag=tag)
    driver.fail("cuMemAddressFree")
    with pytest.raises(HostError, match="cuMemAddressFree"):
        device.close()
    assert driver.leftovers() == {"reservations": 1}
    device.close()


def test_the_context_is_held_once_and_given_back_at_the_end(driver: FakeDriver) -> None:
    with CudaMemory(driver) as device:
        assert driver.leftovers() == {"contexts": 1}
        device.release()
        assert driver.leftovers() == {"contexts": 1}
    assert driver.leftovers() == {}


def test_no_room_for_addresses_is_told_as_such(driver: FakeDriver, device: CudaMemory) -> None:
    driver.fail("cuMemAddressReserve", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(ResourceBusy, match=f"0x{BASE:x}"):
        device.reserve(GRAIN, tag="a")


def test_a_device_without_virtual_memory_is_refused() -> None:
    driver = FakeDriver(virtual_memory=False)
    with pytest.raises(MissingCapability, match="virtual memory"):
        CudaMemory(driver)
    assert driver.leftovers() == {}


def test_an_absent_device_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(MissingCapability, match="CUDA_ERROR_INVALID_DEVICE"):
        CudaMemory(driver, ordinal=3)


def test_a_base_inside_a_grain_is_refused_and_holds_no_context(driver: FakeDriver) -> None:
    with pytest.raises(UsageError, match="base"):
        CudaMemory(driver, base=BASE + PAGE_BYTES)
    assert driver.leftovers() == {}


def test_copies_both_ways_and_nothing_beside_them(driver: FakeDriver, device: CudaMemory) -> None:
    allocation = device.reserve(GRAIN, tag="a")
    data = bytes(range(256)) * 40
    device.copy_in(allocation.ptr + 100, memoryview(data))
    assert driver.peek(allocation.ptr + 99, len(data) + 2) == b"\0" + data + b"\0"
    out = bytearray(len(data))
    device.copy_out(allocation.ptr + 100, memoryview(out))
    assert bytes(out) == data
    assert driver.pageable_copies == 0


@pytest.mark.parametrize("size", [1, 4096, 10_000, 3 * 4096])
def test_chunks_are_the_bytes_in_order(driver: FakeDriver, device: CudaMemory, size: int) -> None:
    allocation = device.reserve(GRAIN, tag="a")
    data = bytes((7 * i) % 251 for i in range(size))
    device.copy_in(allocation.ptr, memoryview(data))
    sizes = []
    joined = b""
    for chunk in device.chunks(allocation.ptr, size, 4096):
        assert chunk.readonly
        sizes.append(len(chunk))
        joined += chunk
    assert joined == data
    assert sizes == [4096] * (size // 4096) + ([size % 4096] if size % 4096 else [])


def test_reading_that_is_given_up_leaves_no_buffer_in_use(driver: FakeDriver, device: CudaMemory) -> None:
    allocation = device.reserve(GRAIN, tag="a")
    chunks = device.chunks(allocation.ptr, GRAIN, 4096)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert driver.leftovers() == {"contexts": 1, "reservations": 1, "mappings": 1}


def test_buffers_are_used_again(driver: FakeDriver, device: CudaMemory) -> None:
    allocation = device.reserve(GRAIN, tag="a")
    for _ in range(5):
        device.copy_in(allocation.ptr, memoryview(b"abc"))
    assert driver.count("register_host") == 2  # a lane's two slots


def test_a_copy_that_fails_is_told_and_its_buffer_is_gone(driver: FakeDriver, device: CudaMemory) -> None:
    allocation = device.reserve(GRAIN, tag="a")
    driver.fail("cuMemcpyHtoDAsync")
    with pytest.raises(HostError, match="cuMemcpyHtoDAsync"):
        device.copy_in(allocation.ptr, memoryview(b"abc"))
    assert driver.leftovers() == {"contexts": 1, "reservations": 1, "mappings": 1}


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuStreamCreate", "cuEventCreate"])
def test_a_buffer_that_cannot_be_made_leaves_nothing(driver: FakeDriver, device: CudaMemory, call: str) -> None:
    allocation = device.reserve(GRAIN, tag="a")
    driver.fail(call)
    with pytest.raises(HostError, match=call):
        device.copy_in(allocation.ptr, memoryview(b"abc"))
    assert driver.leftovers() == {"contexts": 1, "reservations": 1, "mappings": 1}


def test_new_bytes_are_cleared_though_the_device_is_not(driver: FakeDriver, device: CudaMemory) -> None:
    allocation = device.reserve(GRAIN, tag="a")
    assert GARBAGE != 0
    assert driver.peek(allocation.ptr, GRAIN) == bytes(GRAIN)


def test_an_array_is_described_as_libraries_read_it(device: CudaMemory) -> None:
    allocation = device.reserve(GRAIN, tag="a")
    array = device.array(allocation.ptr + 4096, 512)
    assert array.__cuda_array_interface__ == {
        "version": 3,
        "shape": (512,),
        "typestr": "|u1",
        "data": (allocation.ptr + 4096, False),
        "strides": None,
        "stream": None,
    }
    with pytest.raises(UsageError):
        device.array(allocation.ptr, GRAIN + 1)
