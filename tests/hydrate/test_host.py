"""What the kernel says about host memory, beside what the object says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from coldsnap.core.extents import Allocation
from coldsnap.errors import OutOfSpace, ResourceBusy, UsageError
from coldsnap.hydrate import HostMemory, host, libc
from coldsnap.hydrate.maps import overlapping, read_maps

MIB = 1024 * 1024


def rights(allocation: Allocation) -> set[str]:
    return {e.rights for e in overlapping(read_maps(), allocation.ptr, allocation.ptr + allocation.size)}


def resident_bytes(allocation: Allocation) -> int:
    """What smaps counts as present in the mapping that begins at the allocation."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{allocation.ptr:x}-"))
    rss = next(line for line in lines[start:] if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024


def touch_all(memory: HostMemory, allocation: Allocation) -> None:
    memory.view(allocation.ptr, allocation.size)[:] = b"\x01" * allocation.size


def test_unmapped_memory_holds_no_page_and_keeps_its_place(memory: HostMemory) -> None:
    allocation = memory.reserve(8 * MIB, tag="weights")
    touch_all(memory, allocation)
    assert rights(allocation) == {"rw-p"}
    assert resident_bytes(allocation) == 8 * MIB
    memory.unmap()
    assert rights(allocation) == {"---p"}
    assert resident_bytes(allocation) == 0
    with pytest.raises(FileExistsError):
        libc.map_anonymous(allocation.ptr + 4 * MIB, 4096, writable=True, replace=False)
    memory.remap()
    assert rights(allocation) == {"rw-p"}
    assert resident_bytes(allocation) == 0


def test_release_gives_the_place_back(memory: HostMemory) -> None:
    allocation = memory.reserve(4096, tag="a")
    memory.release()
    assert rights(allocation) == set()


def test_nothing_is_mapped_behind_an_allocation(memory: HostMemory) -> None:
    one, two = memory.reserve(4096, tag="a"), memory.reserve(4096, tag="b")
    assert overlapping(read_maps(), one.ptr + one.size, two.ptr) == ()
    assert two.ptr == one.ptr + 2 * host.HUGE_PAGE_BYTES


def test_a_refusal_names_the_mapping_that_is_there(memory: HostMemory) -> None:
    libc_entry = next(e for e in read_maps() if e.rights == "r-xp" and "/libc" in e.name)
    with pytest.raises(ResourceBusy, match="libc") as caught:
        memory.reserve(4096, tag="a", address=libc_entry.start)
    assert caught.value.facts["ptr"] == libc_entry.start
    assert libc_entry.name in str(caught.value.facts["mapping"])


def test_unmap_never_destroys_what_is_not_ours(memory: HostMemory) -> None:
    allocation = memory.reserve(2 * MIB, tag="a")
    libc.unmap(allocation.ptr, MIB)
    stranger = Path("/proc/self/exe").open("rb")  # noqa: SIM115 - closed below, after its mapping
    fd = stranger.fileno()
    try:
        map_file_at(allocation.ptr, 4096, fd)
        with pytest.raises(ResourceBusy, match="python"):
            memory.unmap()
        assert libc.view_at(allocation.ptr, 4)[:].tobytes() == b"\x7fELF"
        memory.release()
        assert libc.view_at(allocation.ptr, 4)[:].tobytes() == b"\x7fELF"
    finally:
        libc.unmap(allocation.ptr, 4096)
        stranger.close()


def map_file_at(address: int, size: int, fd: int) -> None:
    """Map the start of a file readable at a free address, as a dynamic loader would."""
    import ctypes

    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    assert call(address, size, 1, 0x2 | 0x100000, fd, 0) == address


def test_a_reservation_that_got_lost_is_taken_back(memory: HostMemory) -> None:
    # As after a restore that did not bring the reservation back: the range is free, so it is still ours.
    one, two = memory.reserve(2 * MIB, tag="a"), memory.reserve(4 * MIB, tag="b")
    memory.unmap()
    libc.unmap(one.ptr, one.size)
    libc.unmap(two.ptr + MIB, MIB)
    memory.remap()
    assert rights(one) == rights(two) == {"rw-p"}
    touch_all(memory, two)


def test_writable_memory_in_our_reservation_is_somebody_elses(memory: HostMemory) -> None:
    allocation = memory.reserve(2 * MIB, tag="a")
    memory.unmap()
    libc.unmap(allocation.ptr, 4096)
    libc.map_anonymous(allocation.ptr, 4096, writable=True, replace=False)
    libc.view_at(allocation.ptr, 1)[0] = 0x77
    with pytest.raises(ResourceBusy):
        memory.remap()
    assert libc.view_at(allocation.ptr, 1)[0] == 0x77
    libc.unmap(allocation.ptr, 4096)
    memory.remap()


def test_a_failed_remap_leaves_all_unmapped(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = memory.reserve(MIB, tag="a"), memory.reserve(MIB, tag="b")
    memory.unmap()
    real = libc.map_anonymous

    def no_memory(address: int, size: int, *, writable: bool, replace: bool) -> None:
        if writable and address == two.ptr:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        real(address, size, writable=writable, replace=replace)

    with monkeypatch.context() as patched:
        patched.setattr(libc, "map_anonymous", no_memory)
        with pytest.raises(OutOfSpace, match=f"0x{two.ptr:x}"):
            memory.remap()
    assert not memory.mapped
    assert rights(one) == rights(two) == {"---p"}
    memory.remap()
    touch_all(memory, one)


def test_a_failed_unmap_can_be_finished(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = memory.reserve(MIB, tag="a"), memory.reserve(MIB, tag="b")
    real = libc.map_anonymous

    def no_mapping(address: int, size: int, *, writable: bool, replace: bool) -> None:
        if address == two.ptr:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        real(address, size, writable=writable, replace=replace)

    with monkeypatch.context() as patched:
        patched.setattr(libc, "map_anonymous", no_mapping)
        with pytest.raises(OutOfSpace):
            memory.unmap()
    memory.unmap()
    assert not memory.mapped
    assert rights(one) == rights(two) == {"---p"}


def test_addresses_the_kernel_never_gives(memory: HostMemory) -> None:
    with pytest.raises((UsageError, OutOfSpace), match="0x7fffffffffff000"):
        memory.reserve(4096, tag="a", address=0x7FF_FFFF_FFFF_F000)
    assert memory.allocations == ()


@pytest.mark.parametrize("base", [0, -host.HUGE_PAGE_BYTES, 4096])
def test_an_odd_base_is_refused(base: int) -> None:
    with pytest.raises(UsageError, match="base"):
        HostMemory(base=base)


def test_a_kernel_without_huge_pages_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(libc, "advise", refuse)
    with HostMemory(base=0x5400_0000_0000) as memory:
        touch_all(memory, memory.reserve(4 * MIB, tag="a"))
