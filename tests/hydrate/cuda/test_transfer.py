"""Every way from a file to the device: the bytes, the order of calls, and what is left when something fails."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence

import pytest

from coldsnap.core.digest import Digest
from coldsnap.errors import HostError, IntegrityError, OperationInterrupted, UsageError
from coldsnap.hydrate import (
    ExtentsProof,
    ExtentsSource,
    ProvedSource,
    Segment,
    TransferPath,
    UnprovedSource,
    hash_ranges,
    hydrate_file,
)
from coldsnap.hydrate.cuda import CudaMemory, RegisteredFile, registered, transfer
from coldsnap.testing.cuda import FakeDriver

PIECE = 64 * 1024
PATHS = list(TransferPath)
RESTING = {"contexts": 1, "reservations": 1, "mappings": 1}
OpenFile = Callable[[bytes], int]


def proved(fd: int) -> ProvedSource:
    return ProvedSource(fd=fd, bytes=os.fstat(fd).st_size, evidence="test")


def unproved(fd: int) -> UnprovedSource:
    return UnprovedSource(fd=fd, bytes=os.fstat(fd).st_size)


def at_rest(device: CudaMemory, driver: FakeDriver) -> bool:
    """Nothing is left of a transfer but buffers, and nothing at all after ``trim``."""
    device.trim()
    return driver.leftovers() == RESTING


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file of 3 MiB has several."""
    monkeypatch.setattr(transfer, "WINDOW_BYTES", 4 * PIECE)
    monkeypatch.setattr(transfer, "_SHARED_WINDOW_BYTES", 2 * PIECE)
    monkeypatch.setattr(registered, "WINDOW_BYTES", 32 * PIECE)  # of a file registered ahead; holds some of the others


@pytest.fixture
def base(device: CudaMemory) -> int:
    return device.reserve(8 << 20, tag="weights").ptr


@pytest.fixture
def segments(content: bytes, base: int) -> list[Segment]:
    """Sizes and places that suit nobody: odd bytes, small ones side by side, a file order that is not memory's."""
    sizes = [100, 4096, 300_000, 3, 70_000, 1_200_000, 8192, 1, 250_000]
    places, at = [], 5
    for size in sizes:
        places.append((at, size))
        at += size + 1
    random.Random(3).shuffle(places)
    segments, offset = [], 0
    for start, size in places:
        digest = Digest.of(content[offset : offset + size])
        segments.append(Segment(ptr=base + start, size=size, file_offset=offset, sha256=digest))
        offset += -(-size // 4096) * 4096
    return segments


def expected(content: bytes, base: int, segments: Sequence[Segment]) -> bytes:
    image = bytearray(8 << 20)
    for segment in segments:
        start = segment.ptr - base
        image[start : start + segment.size] = content[segment.file_offset : segment.file_offset + segment.size]
    return bytes(image)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_threads", [0, 1, 5])
def test_every_byte_of_every_segment_and_no_other(
    path: TransferPath,
    num_threads: int,
    content: bytes,
    open_file: OpenFile,
    driver: FakeDriver,
    device: CudaMemory,
    base: int,
    segments: list[Segment],
) -> None:
    told: list[int] = []
    report = hydrate_file(
        proved(open_file(content)),
        segments,
        device,
        path=path,
        piece_bytes=PIECE,
        num_threads=num_threads,
        progress=told.append,
    )
    assert report.path is path
    assert report.reason == "asked for"
    assert driver.peek(base, 8 << 20) == expected(content, base, segments)
    total = sum(segment.size for segment in segments)
    assert (report.bytes, report.verified_bytes, sum(told)) == (total, 0, total)
    assert driver.pageable_copies == 0
    assert at_rest(device, driver)
    if path is TransferPath.REGISTERED:
        assert report.registered_bytes == total
    elif path is not TransferPath.MIXED:
        assert report.registered_bytes == 0


@pytest.mark.parametrize("path", [None, TransferPath.BUFFERED, TransferPath.DIRECT, TransferPath.REGISTERED])
def test_an_unproved_source_is_hashed_on_the_way(
    path: TransferPath | None,
    content: bytes,
    open_file: OpenFile,
    driver: FakeDriver,
    device: CudaMemory,
    base: int,
    segments: list[Segment],
) -> None:
    report = hydrate_file(unproved(open_file(content)), segments, device, path=path, piece_bytes=PIECE, num_threads=3)
    assert report.verified_bytes == report.bytes == sum(segment.size for segment in segments)
    assert report.path in (TransferPath.BUFFERED, TransferPath.DIRECT)
    assert driver.peek(base, 8 << 20) == expected(content, base, segments)
    assert driver.count("copy_out") == 0  # hashed in the buffer, not read back
    assert at_rest(device, driver)


@pytest.mark.parametrize("path", [TransferPath.BUFFERED, TransferPath.DIRECT])
def test_a_flipped_bit_names_its_segment(
    path: TransferPath,
    content: bytes,
    open_file: OpenFile,
    driver: FakeDriver,
    device: CudaMemory,
    segments: list[Segment],
) -> None:
    broken = max(segments, key=lambda segment: segment.size)
    damaged = bytearray(content)
    damaged[broken.file_offset + broken.size - 1] ^= 1
    fd = open_file(bytes(damaged))
    with pytest.raises(IntegrityError, match=f"0x{broken.ptr:x}") as caught:
        hydrate_file(unproved(fd), segments, device, path=path, piece_bytes=PIECE)
    assert caught.value.facts["file_offset"] == broken.file_offset
    assert at_rest(device, driver)
    os.pwrite(fd, content, 0)
    assert hydrate_file(unproved(fd), segments, device).verified_bytes == sum(s.size for s in segments)


def test_extents_from_two_files_are_proved_from_the_device(
    content: bytes, open_file: OpenFile, driver: FakeDriver, device: CudaMemory, base: int
) -> None:
    half = 700_000
    whole = Digest.of(content[: 2 * half])
    one, two = open_file(content[:half]), open_file(content[half : 2 * half])
    with ExtentsProof([(base, 2 * half, whole)]) as proof:
        for fd, ptr in ((two, base + half), (one, base)):  # the second half first
            source = ExtentsSource(fd=fd, bytes=half, proof=proof)
            hydrate_file(source, [Segment(ptr=ptr, size=half, file_offset=0)], device, piece_bytes=PIECE)
    assert driver.peek(base, 2 * half) == content[: 2 * half]
    assert at_rest(device, driver)


def test_a_wrong_extent_of_two_files_is_told(
    content: bytes, open_file: OpenFile, device: CudaMemory, base: int
) -> None:
    proof = ExtentsProof([(base, 100_000, Digest.of(b"something else"))])
    source = ExtentsSource(fd=open_file(content[:100_000]), bytes=100_000, proof=proof)
    with pytest.raises(IntegrityError, match=f"{base:#x}"), proof:
        hydrate_file(source, [Segment(ptr=base, size=100_000, file_offset=0)], device, piece_bytes=PIECE)


def test_hashing_device_memory(content: bytes, device: CudaMemory, base: int) -> None:
    device.copy_in(base, memoryview(content))
    found = hash_ranges(device, [(base, len(content)), (base + 7, 1000)], num_threads=2)
    assert found == [Digest.of(content), Digest.of(content[7:1007])]


@pytest.mark.parametrize(
    "call",
    [
        "cuMemHostRegister",
        "cuStreamCreate",
        "cuEventCreate",
        "cuMemcpyHtoDAsync",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuStreamSynchronize",
    ],
)
@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("path", [TransferPath.MAPPED, TransferPath.MIXED])
def test_a_driver_call_that_fails_leaves_nothing_behind(
    call: str,
    after: int,
    path: TransferPath,
    content: bytes,
    open_file: OpenFile,
    driver: FakeDriver,
    device: CudaMemory,
    base: int,
    segments: list[Segment],
) -> None:
    source = proved(open_file(content))
    driver.fail(call, after=after)
    try:
        hydrate_file(source, segments, device, path=path, piece_bytes=PIECE, num_threads=2)
    except HostError as error:
        assert call in str(error)  # noqa: PT017 - it may also work: another way was found, or it was not called so often
    assert at_rest(device, driver)
    assert driver.violations == []
    driver.heal()
    hydrate_file(source, segments, device, path=path, piece_bytes=PIECE, num_threads=2)
    assert driver.peek(base, 8 << 20) == expected(content, base, segments)


@pytest.mark.parametrize("path", [TransferPath.REGISTERED, TransferPath.MIXED])
def test_pages_that_cannot_be_registered_go_through_the_ring(
    path: TransferPath,
    content: bytes,
    open_file: OpenFile,
    device: CudaMemory,
    driver: FakeDriver,
    base: int,
    segments: list[Segment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from coldsnap.hydrate.cuda.driver import DriverFailure

    def refuse(*_: object) -> None:
        raise DriverFailure("cuMemHostRegister", "CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(RegisteredFile, "register", refuse)
    report = hydrate_file(proved(open_file(content)), segments, device, path=path, piece_bytes=PIECE)
    assert report.registered_bytes == 0
    if path is TransferPath.REGISTERED:  # of a mixed transfer the ring may have done all before anybody noticed
        assert report.path is TransferPath.BUFFERED
        assert "CUDA_ERROR_NOT_SUPPORTED" in report.reason
    assert driver.peek(base, 8 << 20) == expected(content, base, segments)


@pytest.mark.parametrize("read_only", [True, False])
def test_pages_are_registered_as_the_driver_can(
    read_only: bool, content: bytes, open_file: OpenFile, tmp_path: object
) -> None:
    driver = FakeDriver(read_only_register=read_only)
    with CudaMemory(driver) as device:
        base = device.reserve(4 << 20, tag="weights").ptr
        segment = Segment(ptr=base, size=len(content), file_offset=0)
        fd = open_file(content)
        hydrate_file(proved(fd), [segment], device, path=TransferPath.REGISTERED, piece_bytes=PIECE)
        assert driver.peek(base, len(content)) == content
    registrations = [call for call in driver.calls if call.startswith("register_host")]
    assert registrations
    assert all(f"read_only={read_only}" in call for call in registrations)
    assert os.pread(fd, len(content), 0) == content


def test_a_file_registered_ahead_is_not_registered_again(
    content: bytes, open_file: OpenFile, driver: FakeDriver, device: CudaMemory, base: int, segments: list[Segment]
) -> None:
    source = proved(open_file(content))
    device.attach()
    with RegisteredFile(device, source.fd, file_bytes=source.bytes) as ahead:
        ahead.register_all()
        assert driver.registered_bytes == ahead.registered_bytes == -(-len(content) // 4096) * 4096
        before = driver.count("register_host")
        report = hydrate_file(source, segments, device, piece_bytes=PIECE, registered=ahead)
        assert driver.count("register_host") == before
        assert report.registered_bytes == report.bytes
        assert "ahead" in report.reason
        assert driver.registered_bytes == ahead.registered_bytes  # it stays the caller's
    assert driver.peek(base, 8 << 20) == expected(content, base, segments)
    assert at_rest(device, driver)


@pytest.mark.parametrize("path", PATHS)
def test_cancelled_on_the_way(
    path: TransferPath,
    content: bytes,
    open_file: OpenFile,
    driver: FakeDriver,
    device: CudaMemory,
    base: int,
    segments: list[Segment],
) -> None:
    cancel = threading.Event()

    def stop(_: int) -> None:
        cancel.set()

    source = proved(open_file(content))
    with pytest.raises(OperationInterrupted):
        hydrate_file(source, segments, device, path=path, piece_bytes=4096, num_threads=1, progress=stop, cancel=cancel)
    assert at_rest(device, driver)
    assert driver.violations == []
    hydrate_file(source, segments, device, path=path)
    assert driver.peek(base, 8 << 20) == expected(content, base, segments)


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_is_cut_while_it_is_read(
    path: TransferPath, content: bytes, open_file: OpenFile, driver: FakeDriver, device: CudaMemory, base: int
) -> None:
    fd = open_file(content)
    source = proved(fd)
    segment = Segment(ptr=base, size=len(content), file_offset=0)
    os.ftruncate(fd, len(content) - 1)
    with pytest.raises(IntegrityError):
        hydrate_file(source, [segment], device, path=path, piece_bytes=PIECE)
    assert at_rest(device, driver)


def test_a_disk_that_fails(
    content: bytes,
    open_file: OpenFile,
    driver: FakeDriver,
    device: CudaMemory,
    segments: list[Segment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    source = proved(open_file(content))
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        for path in (TransferPath.BUFFERED, TransferPath.DIRECT):
            with pytest.raises(HostError, match=os.strerror(errno.EIO)):
                hydrate_file(source, segments, device, path=path, piece_bytes=PIECE)
    assert at_rest(device, driver)


def test_a_file_system_that_refuses_the_first_direct_read(
    content: bytes,
    open_file: OpenFile,
    driver: FakeDriver,
    device: CudaMemory,
    base: int,
    segments: list[Segment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fd = open_file(content)
    real = os.preadv

    def refuse_direct(at: int, buffers: Sequence[memoryview], offset: int) -> int:
        if at != fd:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(at, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse_direct)
    report = hydrate_file(proved(fd), segments, device, path=TransferPath.DIRECT, piece_bytes=PIECE)
    assert report.path is TransferPath.BUFFERED
    assert "EINVAL" in report.reason
    assert driver.peek(base, 8 << 20) == expected(content, base, segments)


def test_unmapped_memory_is_refused(
    content: bytes, open_file: OpenFile, device: CudaMemory, segments: list[Segment]
) -> None:
    device.unmap()
    with pytest.raises(UsageError, match="unmapped"):
        hydrate_file(proved(open_file(content)), segments, device)
    device.remap()


def test_the_next_transfer_uses_the_same_buffers(
    content: bytes, open_file: OpenFile, driver: FakeDriver, device: CudaMemory, segments: list[Segment]
) -> None:
    source = proved(open_file(content))
    hydrate_file(source, segments, device, path=TransferPath.BUFFERED, num_threads=2)
    registrations = driver.count("register_host")
    hydrate_file(source, segments[:3], device, path=TransferPath.BUFFERED, num_threads=1)
    assert driver.count("register_host") == registrations
    device.unmap()
    assert driver.leftovers() == {"contexts": 1, "reservations": 1}
    device.remap()


def test_memory_shared_with_the_device_gets_few_and_small_buffers(content: bytes, open_file: OpenFile) -> None:
    driver = FakeDriver(integrated=True)
    with CudaMemory(driver) as device:
        base = device.reserve(4 << 20, tag="weights").ptr
        segment = Segment(ptr=base, size=len(content), file_offset=0)
        report = hydrate_file(proved(open_file(content)), [segment], device, num_threads=64, path=TransferPath.BUFFERED)
        assert driver.peek(base, len(content)) == content
        assert report.num_threads <= 8  # of 8 MiB and a little each
    assert driver.leftovers() == {}
