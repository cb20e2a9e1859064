"""Filling memory from a file: the right bytes, in the right place, and nowhere else."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.errors import InvalidDocument, UsageError
from coldsnap.hydrate import (
    HostAddressable,
    HostMemory,
    ProvedSource,
    Segment,
    TransferPath,
    UnprovedSource,
    hydrate_file,
)
from coldsnap.testing.memory import FakeMemory

CANARY = 0xC5
PATHS = [TransferPath.DIRECT, TransferPath.BUFFERED, None]
OpenFile = Callable[[bytes], int]


def proved(fd: int) -> ProvedSource:
    return ProvedSource(fd=fd, bytes=os.fstat(fd).st_size, evidence="written by this test")


def unproved(fd: int) -> UnprovedSource:
    return UnprovedSource(fd=fd, bytes=os.fstat(fd).st_size)


def segment_of(content: bytes, *, ptr: int, size: int, file_offset: int) -> Segment:
    digest = Digest.of(content[file_offset : file_offset + size])
    return Segment(ptr=ptr, size=size, file_offset=file_offset, sha256=digest)


def fill_with_canaries(memory: HostAddressable) -> None:
    for allocation in memory.allocations:
        memory.view(allocation.ptr, allocation.size)[:] = bytes([CANARY]) * allocation.size


def expected_image(memory: HostAddressable, segments: list[Segment], content: bytes) -> list[bytes]:
    """What each allocation should hold: the file inside segments, canaries everywhere else."""
    images = []
    for allocation in memory.allocations:
        image = bytearray([CANARY]) * allocation.size
        for s in segments:
            if allocation.ptr <= s.ptr < allocation.ptr + allocation.size:
                start = s.ptr - allocation.ptr
                image[start : start + s.size] = content[s.file_offset : s.file_offset + s.size]
        images.append(bytes(image))
    return images


def image(memory: HostAddressable) -> list[bytes]:
    return [memory.view(a.ptr, a.size).tobytes() for a in memory.allocations]


def offsets_for(position: int, size: int, follows: int) -> st.SearchStrategy[int]:
    """Where in the file: at a page, in step with memory, anywhere, or right behind the last segment."""
    last = 3 * 1024 * 1024 + 777 - size
    pages = st.integers(0, last // 4096 - 1)
    return st.one_of(
        pages.map(lambda n: n * 4096),
        pages.map(lambda n: n * 4096 + position % 4096),
        st.integers(0, last),
        st.just(min(follows, last)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int, int]:
    """``(offset in memory, size, file offset)`` without overlap in memory, a piece size and a thread count."""
    memory_bytes = 256 * 1024
    near_page = st.builds(lambda page, off: page * 4096 + off, st.integers(0, 20), st.integers(-2, 2))
    sizes = st.one_of(st.integers(1, 600), st.integers(1, 60_000), near_page).filter(lambda n: n > 0)
    gaps = st.one_of(st.just(0), st.integers(0, 5000), st.sampled_from([512, 4096]))
    found: list[tuple[int, int, int]] = []
    position = 0
    for _ in range(draw(st.integers(1, 12))):
        position += draw(gaps)
        size = draw(sizes)
        if position + size > memory_bytes:
            break
        offset = draw(offsets_for(position, size, found[-1][2] + found[-1][1] if found else 0))
        found.append((position, size, offset))
        position += size
    found = draw(st.permutations(found))
    return found, draw(st.sampled_from([4096, 16 * 1024, 4 * 1024 * 1024])), draw(st.integers(0, 5))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None)
@given(layout=layouts())
def test_any_layout_fills_segments_and_nothing_else(
    layout: tuple[list[tuple[int, int, int]], int, int],
    path: TransferPath | None,
    content: bytes,
    tmp_path: Path,
) -> None:
    pieces, piece_bytes, num_threads = layout
    file = tmp_path / "pack"
    if not file.exists():
        file.write_bytes(content)
    fd = os.open(file, os.O_RDONLY)
    try:
        for make in (unproved, proved):
            with HostMemory(base=0x5300_0000_0000, huge_pages=False) as memory:
                allocation = memory.reserve(256 * 1024, tag="weights")
                segments = [
                    segment_of(content, ptr=allocation.ptr + at, size=size, file_offset=offset)
                    for at, size, offset in pieces
                ]
                fill_with_canaries(memory)
                report = hydrate_file(
                    make(fd), segments, memory, path=path, piece_bytes=piece_bytes, num_threads=num_threads
                )
                assert image(memory) == expected_image(memory, segments, content)
                total = sum(size for _, size, _ in pieces)
                assert report.bytes == total
                assert report.verified_bytes == (total if make is unproved else 0)
                assert report.path == (path or TransferPath.BUFFERED)
    finally:
        os.close(fd)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shift", [0, 1, 512, 4095])
def test_a_segment_up_to_the_end_of_an_allocation(
    path: TransferPath, shift: int, content: bytes, open_file: OpenFile, memory: HostMemory
) -> None:
    # Nothing is mapped behind an allocation: one byte too many kills this process, or fails the read.
    allocation = memory.reserve(1024 * 1024, tag="weights")
    fill_with_canaries(memory)
    size = 700_001
    segment = segment_of(
        content, ptr=allocation.ptr + allocation.size - size, size=size, file_offset=2 * 1024 * 1024 + shift
    )
    hydrate_file(unproved(open_file(content)), [segment], memory, path=path)
    assert image(memory) == expected_image(memory, [segment], content)


@pytest.mark.parametrize("path", PATHS)
def test_the_last_bytes_of_a_file_that_ends_inside_a_block(
    path: TransferPath, content: bytes, open_file: OpenFile, memory: HostMemory
) -> None:
    allocation = memory.reserve(4 * 1024 * 1024, tag="weights")
    fill_with_canaries(memory)
    segments = [
        segment_of(content, ptr=allocation.ptr, size=len(content) - 4096, file_offset=4096),
        segment_of(content, ptr=allocation.ptr + len(content), size=1, file_offset=len(content) - 1),
    ]
    hydrate_file(unproved(open_file(content)), segments, memory, path=path)
    assert image(memory) == expected_image(memory, segments, content)


@pytest.mark.parametrize("path", PATHS)
def test_several_allocations_and_shared_file_bytes(
    path: TransferPath, content: bytes, open_file: OpenFile, memory: HostMemory
) -> None:
    one = memory.reserve(1024 * 1024, tag="a")
    two = memory.reserve(1024 * 1024, tag="b")
    fill_with_canaries(memory)
    segments = [
        segment_of(content, ptr=two.ptr + 64, size=500_000, file_offset=8192),
        segment_of(content, ptr=one.ptr, size=500_000, file_offset=8192),
        segment_of(content, ptr=one.ptr + 500_000, size=100, file_offset=9000),
    ]
    hydrate_file(unproved(open_file(content)), segments, memory, path=path, num_threads=3)
    assert image(memory) == expected_image(memory, segments, content)


@pytest.mark.parametrize("path", PATHS)
def test_fake_memory_is_filled_as_well(path: TransferPath, content: bytes, open_file: OpenFile) -> None:
    memory = FakeMemory()
    allocation = memory.reserve(2 * 1024 * 1024, tag="weights")
    fill_with_canaries(memory)
    segments = [segment_of(content, ptr=allocation.ptr + 7, size=1024 * 1024, file_offset=4096)]
    hydrate_file(unproved(open_file(content)), segments, memory, path=path)
    assert image(memory) == expected_image(memory, segments, content)


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Let Python change threads as often as it can, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless_threads")
def test_many_small_and_large_segments_under_many_threads(
    content: bytes, open_file: OpenFile, memory: HostMemory
) -> None:
    allocation = memory.reserve(4 * 1024 * 1024, tag="weights")
    randomness = random.Random(1)
    fd = open_file(content)
    for _ in range(10):
        segments, at = [], 0
        while True:
            size = randomness.choice([1, 100, 4096, 5000, 300_000])
            if at + size > len(content):
                break
            segments.append(segment_of(content, ptr=allocation.ptr + at, size=size, file_offset=at))
            at += size
        randomness.shuffle(segments)
        fill_with_canaries(memory)
        report = hydrate_file(unproved(fd), segments, memory, num_threads=8, piece_bytes=4096)
        assert report.verified_bytes == at
        assert image(memory) == expected_image(memory, segments, content)


def test_nothing_to_do(content: bytes, open_file: OpenFile, memory: HostMemory) -> None:
    for make in (proved, unproved):
        report = hydrate_file(make(open_file(content)), [], memory)
        assert (report.bytes, report.num_threads, report.verified_bytes) == (0, 0, 0)


def test_a_proved_source_is_not_verified_again(content: bytes, open_file: OpenFile, memory: HostMemory) -> None:
    allocation = memory.reserve(4096, tag="a")
    wrong = Segment(ptr=allocation.ptr, size=4096, file_offset=0, sha256=Digest.of(b"something else"))
    assert hydrate_file(proved(open_file(content)), [wrong], memory).verified_bytes == 0


def test_progress_adds_up(content: bytes, open_file: OpenFile, memory: HostMemory) -> None:
    allocation = memory.reserve(4 * 1024 * 1024, tag="a")
    told: list[int] = []
    segment = segment_of(content, ptr=allocation.ptr, size=len(content), file_offset=0)
    hydrate_file(unproved(open_file(content)), [segment], memory, piece_bytes=65536, progress=told.append)
    assert sum(told) == len(content)
    assert len(told) == 49  # 3 MiB + 777 bytes in pieces of 64 KiB


def test_every_problem_is_reported_at_once(content: bytes, open_file: OpenFile, memory: HostMemory) -> None:
    allocation = memory.reserve(8192, tag="a")
    digest = Digest.of(b"")
    segments = [
        Segment(ptr=allocation.ptr, size=100, file_offset=0, sha256=digest),
        Segment(ptr=allocation.ptr + 99, size=10, file_offset=0, sha256=digest),
        Segment(ptr=allocation.ptr + 4096, size=0, file_offset=0, sha256=digest),
        Segment(ptr=allocation.ptr + 8000, size=193, file_offset=0, sha256=digest),
        Segment(ptr=allocation.ptr + 200, size=10, file_offset=len(content) - 9, sha256=digest),
        Segment(ptr=allocation.ptr + 300, size=10, file_offset=-1, sha256=digest),
        Segment(ptr=allocation.ptr + 400, size=10, file_offset=0),
        Segment(ptr=allocation.ptr - 1, size=1, file_offset=0, sha256=digest),
    ]
    fill_with_canaries(memory)
    with pytest.raises(InvalidDocument) as caught:
        hydrate_file(unproved(open_file(content)), segments, memory)
    assert sorted(problem.field for problem in caught.value.problems) == [
        "segments[1].ptr",
        "segments[2].size",
        "segments[3].ptr",
        "segments[4].file_offset",
        "segments[5].file_offset",
        "segments[6].sha256",
        "segments[7].ptr",
    ]
    assert image(memory) == expected_image(memory, [], content)


def test_an_overlap_with_a_segment_that_is_not_the_neighbour(
    content: bytes, open_file: OpenFile, memory: HostMemory
) -> None:
    allocation = memory.reserve(8192, tag="a")
    segments = [
        Segment(ptr=allocation.ptr, size=5000, file_offset=0),
        Segment(ptr=allocation.ptr + 10, size=10, file_offset=0),
        Segment(ptr=allocation.ptr + 4999, size=10, file_offset=0),
    ]
    with pytest.raises(InvalidDocument) as caught:
        hydrate_file(proved(open_file(content)), segments, memory)
    assert [problem.field for problem in caught.value.problems] == ["segments[1].ptr", "segments[2].ptr"]
    assert "segments[0]" in caught.value.problems[1].message


def test_unmapped_memory_is_refused_and_stays_unmapped(content: bytes, open_file: OpenFile, memory: HostMemory) -> None:
    allocation = memory.reserve(4096, tag="a")
    memory.unmap()
    with pytest.raises(UsageError, match="remap"):
        hydrate_file(proved(open_file(content)), [Segment(ptr=allocation.ptr, size=1, file_offset=0)], memory)
    assert not memory.mapped


@pytest.mark.parametrize("piece_bytes", [0, -4096, 100, 4097])
def test_odd_piece_sizes_are_refused(piece_bytes: int, content: bytes, open_file: OpenFile, memory: HostMemory) -> None:
    with pytest.raises(UsageError, match=str(piece_bytes)):
        hydrate_file(proved(open_file(content)), [], memory, piece_bytes=piece_bytes)
