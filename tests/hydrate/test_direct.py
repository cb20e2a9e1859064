"""That the direct path is direct: no copy where none is needed, and O_DIRECT on every read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence

import pytest

from coldsnap.hydrate import HostMemory, ProvedSource, Segment, TransferPath, hydrate_file, libc

KIB = 1024


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
    """Every read of a transfer: whether it was O_DIRECT, its file offset and its length."""
    seen: list[tuple[bool, int, int]] = []
    real = os.preadv

    def watched(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        seen.append((is_direct, offset, sum(len(buffer) for buffer in buffers)))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    return seen


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every copy out of a bounce buffer."""
    seen: list[int] = []
    real = libc.copy_bytes

    def watched(destination: int, source: int, size: int) -> None:
        seen.append(size)
        real(destination, source, size)

    monkeypatch.setattr(libc, "copy_bytes", watched)
    return seen


def read_direct(fd: int, segments: list[Segment], memory: HostMemory) -> None:
    source = ProvedSource(fd=fd, bytes=os.fstat(fd).st_size, evidence="written by this test")
    report = hydrate_file(source, segments, memory, path=TransferPath.DIRECT, num_threads=1)
    assert report.path is TransferPath.DIRECT


def test_an_aligned_segment_goes_straight_into_place(
    content: bytes,
    open_file: Callable[[bytes], int],
    memory: HostMemory,
    reads: list[tuple[bool, int, int]],
    copies: list[int],
) -> None:
    ptr = memory.reserve(1024 * KIB, tag="a").ptr
    read_direct(open_file(content), [Segment(ptr=ptr, size=1024 * KIB, file_offset=8 * KIB)], memory)
    assert reads == [(True, 8 * KIB, 1024 * KIB)]
    assert copies == []


def test_head_and_tail_are_copied_and_the_body_is_not(
    content: bytes,
    open_file: Callable[[bytes], int],
    memory: HostMemory,
    reads: list[tuple[bool, int, int]],
    copies: list[int],
) -> None:
    # In step with the file: byte 100 of a page to byte 100 of a page.
    ptr = memory.reserve(1024 * KIB, tag="a").ptr
    segment = Segment(ptr=ptr + 100, size=512 * KIB, file_offset=4096 + 100)
    read_direct(open_file(content), [segment], memory)
    assert all(is_direct for is_direct, _, _ in reads)
    assert all(offset % 512 == 0 and size % 512 == 0 for _, offset, size in reads)
    assert len(copies) == 2
    assert sum(copies) <= 2 * 4096
    assert memory.view(segment.ptr, segment.size).tobytes() == content[4196 : 4196 + 512 * KIB]


def test_an_address_out_of_step_is_copied_whole(
    content: bytes,
    open_file: Callable[[bytes], int],
    memory: HostMemory,
    reads: list[tuple[bool, int, int]],
    copies: list[int],
) -> None:
    ptr = memory.reserve(1024 * KIB, tag="a").ptr
    segment = Segment(ptr=ptr + 1, size=512 * KIB, file_offset=4096)
    read_direct(open_file(content), [segment], memory)
    assert reads == [(True, 4096, 512 * KIB)]
    assert copies == [512 * KIB]
    assert memory.view(segment.ptr, segment.size).tobytes() == content[4096 : 4096 + 512 * KIB]


def test_small_neighbours_are_one_read(
    content: bytes,
    open_file: Callable[[bytes], int],
    memory: HostMemory,
    reads: list[tuple[bool, int, int]],
    copies: list[int],
) -> None:
    ptr = memory.reserve(1024 * KIB, tag="a").ptr
    segments = [Segment(ptr=ptr + 9000 * n, size=5000, file_offset=8192 * n) for n in range(10)]
    read_direct(open_file(content), segments, memory)
    assert len(reads) == 1
    assert copies == [5000] * 10
