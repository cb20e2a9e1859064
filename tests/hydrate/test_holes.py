"""Holes of a file: found where the kernel says, cut out of segments, and left alone only in memory that is zero."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.hydrate import HostMemory, ProvedSource, Segment, Source, UnprovedSource, hydrate_file
from coldsnap.hydrate.cuda import CudaMemory
from coldsnap.hydrate.holes import LEAST_HOLE_BYTES, around_holes, data_ranges
from coldsnap.testing.cuda import FakeDriver

MIB = 1 << 20
PAGE = 4096
OpenFile = Callable[[bytes], int]


def proved(fd: int) -> ProvedSource:
    return ProvedSource(fd=fd, bytes=os.fstat(fd).st_size, evidence="written by this test")


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """A new file of so many bytes with data in these (start, end) and holes elsewhere."""
    fds: list[int] = []

    def make(size: int, *data: tuple[int, int]) -> int:
        fds.append(os.open(tmp_path / f"sparse-{len(fds)}", os.O_RDWR | os.O_CREAT | os.O_EXCL))
        os.ftruncate(fds[-1], size)
        for start, end in data:
            os.pwrite(fds[-1], random.Random(start).randbytes(end - start), start)
        return fds[-1]

    yield make
    for fd in fds:
        os.close(fd)


def test_the_file_systems_of_these_tests_make_holes(sparse: Callable[..., int]) -> None:
    """Else the other tests would say nothing."""
    assert os.fstat(sparse(4 * MIB, (0, PAGE))).st_blocks * 512 < MIB


def test_data_is_told_from_holes_in_whole_pages(sparse: Callable[..., int]) -> None:
    fd = sparse(16 * MIB, (2 * MIB, 2 * MIB + 100), (8 * MIB, 9 * MIB))
    assert data_ranges(fd, 0, 16 * MIB) == [(2 * MIB, 2 * MIB + PAGE), (8 * MIB, 9 * MIB)]
    assert data_ranges(fd, 2 * MIB + 50, 8 * MIB + 60) == [(2 * MIB + 50, 2 * MIB + PAGE), (8 * MIB, 8 * MIB + 60)]
    assert data_ranges(fd, 10 * MIB, 12 * MIB) == []


def test_a_small_hole_is_read(sparse: Callable[..., int]) -> None:
    least = LEAST_HOLE_BYTES
    fd = sparse(8 * MIB, (least - PAGE, least), (2 * least - PAGE, 2 * least), (8 * MIB - PAGE, 8 * MIB))
    assert data_ranges(fd, 0, 8 * MIB) == [(0, 2 * least), (8 * MIB - PAGE, 8 * MIB)]
    assert data_ranges(fd, 4 * MIB, 4 * MIB + PAGE) == [(4 * MIB, 4 * MIB + PAGE)]


def test_a_file_without_holes_is_data(sparse: Callable[..., int]) -> None:
    assert data_ranges(sparse(3 * MIB, (0, 3 * MIB)), 5, 3 * MIB - 5) == [(5, 3 * MIB - 5)]


def test_a_file_system_that_does_not_tell(sparse: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    fd = sparse(4 * MIB)

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "lseek", refuse)
    assert data_ranges(fd, 0, 4 * MIB) == [(0, 4 * MIB)]


@given(
    cuts=st.lists(st.integers(0, 60), unique=True).map(sorted),
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=6),
)
def test_what_is_left_out_is_what_no_data_range_has(cuts: list[int], sizes: list[tuple[int, int]]) -> None:
    data = list(zip(cuts[::2], cuts[1::2], strict=False))
    segments = [
        Segment(ptr=1000 * number, size=size, file_offset=offset, sha256=Digest.of(b"x"))
        for number, (offset, size) in enumerate(sizes)
    ]
    bytes_in = {byte for start, end in data for byte in range(start, end)}
    wanted = {
        (s.ptr + at, s.file_offset + at) for s in segments for at in range(s.size) if s.file_offset + at in bytes_in
    }
    parts = around_holes(segments, data)
    moved = [(part.ptr + at, part.file_offset + at) for part in parts for at in range(part.size)]
    assert len(moved) == len(set(moved))
    assert set(moved) == wanted
    assert all(part in segments or part.sha256 is None for part in parts)


SPARSE_BYTES = 12 * MIB
SPARSE_DATA = ((0, 3 * PAGE), (5 * MIB, 5 * MIB + 777), (9 * MIB, 12 * MIB))


@pytest.fixture
def fd(sparse: Callable[..., int]) -> int:
    return sparse(SPARSE_BYTES, *SPARSE_DATA)


def segments_at(ptr: int) -> list[Segment]:
    """Three: with a hole behind its data, all hole, and with holes around its data."""
    cuts = (0, 2 * MIB, 4 * MIB, 12 * MIB)
    return [Segment(ptr=ptr + start, size=end - start, file_offset=start) for start, end in pairwise(cuts)]


def test_holes_are_left_alone_in_zeroed_memory(memory: HostMemory, fd: int) -> None:
    ptr = memory.reserve(SPARSE_BYTES, tag="weights").ptr
    told: list[int] = []
    report = hydrate_file(proved(fd), segments_at(ptr), memory, zeroed=True, progress=told.append)
    assert bytes(memory.view(ptr, SPARSE_BYTES)) == os.pread(fd, SPARSE_BYTES, 0)
    data_bytes = 3 * PAGE + PAGE + 3 * MIB  # 777 bytes are a page of data
    assert (report.bytes, report.hole_bytes) == (SPARSE_BYTES, SPARSE_BYTES - data_bytes)
    assert sum(told) == SPARSE_BYTES


@pytest.mark.parametrize("zeroed", [True, False])
def test_nonzero_memory_gets_its_zeros(memory: HostMemory, fd: int, zeroed: bool) -> None:
    """`zeroed` alone decides: a caller who says so and lies is the one thing that leaves anything else there."""
    ptr = memory.reserve(SPARSE_BYTES, tag="weights").ptr
    memory.view(ptr, SPARSE_BYTES)[:] = b"\xc5" * SPARSE_BYTES
    report = hydrate_file(proved(fd), segments_at(ptr), memory, zeroed=zeroed)
    assert (bytes(memory.view(ptr, SPARSE_BYTES)) == os.pread(fd, SPARSE_BYTES, 0)) is not zeroed
    assert (report.hole_bytes > 0) is zeroed


def test_what_is_not_proved_is_read_whole(memory: HostMemory, fd: int) -> None:
    ptr = memory.reserve(SPARSE_BYTES, tag="weights").ptr
    content = os.pread(fd, SPARSE_BYTES, 0)
    segment = Segment(ptr=ptr, size=SPARSE_BYTES, file_offset=0, sha256=Digest.of(content))
    source: Source = UnprovedSource(fd=fd, bytes=SPARSE_BYTES)
    report = hydrate_file(source, [segment], memory, zeroed=True)
    assert (report.hole_bytes, report.verified_bytes) == (0, SPARSE_BYTES)


def test_a_file_of_nothing_but_a_hole(memory: HostMemory, sparse: Callable[..., int]) -> None:
    ptr = memory.reserve(4 * MIB, tag="weights").ptr
    segment = Segment(ptr=ptr, size=4 * MIB, file_offset=0)
    assert hydrate_file(proved(sparse(4 * MIB)), [segment], memory, zeroed=True).hole_bytes == 4 * MIB


def test_on_a_device_nothing_is_copied_for_a_hole(fd: int, sparse: Callable[..., int]) -> None:
    driver = FakeDriver()
    with CudaMemory(driver) as device:
        ptr = device.reserve(SPARSE_BYTES, tag="weights").ptr
        report = hydrate_file(proved(fd), segments_at(ptr), device, zeroed=True)
        assert report.hole_bytes == SPARSE_BYTES - 4 * PAGE - 3 * MIB
        content = b"".join(bytes(chunk) for chunk in device.chunks(ptr, SPARSE_BYTES, MIB))
        assert content == os.pread(fd, SPARSE_BYTES, 0)
        empty = proved(sparse(4 * MIB))
        segment = Segment(ptr=ptr, size=4 * MIB, file_offset=0)
        assert hydrate_file(empty, [segment], device, zeroed=True).hole_bytes == 4 * MIB
