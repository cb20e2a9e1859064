"""What goes wrong while bytes move: the right error with its facts, no thread left, and a second try works."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from coldsnap.core.digest import Digest
from coldsnap.errors import HostError, IntegrityError, OperationInterrupted
from coldsnap.hydrate import (
    HostMemory,
    ProvedSource,
    Segment,
    TransferPath,
    UnprovedSource,
    hydrate_file,
    transfer,
)

PIECE = 64 * 1024
OpenFile = Callable[[bytes], int]
PATHS = [TransferPath.DIRECT, TransferPath.BUFFERED]
Preadv = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith(("hydrate", "hash"))] == []


@pytest.fixture
def segment(content: bytes, memory: HostMemory) -> Segment:
    allocation = memory.reserve(4 * 1024 * 1024, tag="weights")
    return Segment(ptr=allocation.ptr, size=len(content), file_offset=0, sha256=Digest.of(content))


def source_of(fd: int) -> UnprovedSource:
    return UnprovedSource(fd=fd, bytes=os.fstat(fd).st_size)


def assert_second_try_works(fd: int, segment: Segment, memory: HostMemory, content: bytes) -> None:
    before = memory.allocations
    assert memory.mapped
    assert hydrate_file(source_of(fd), [segment], memory).verified_bytes == segment.size
    assert memory.view(segment.ptr, segment.size).tobytes() == content
    assert memory.allocations == before


def patch_reads(monkeypatch: pytest.MonkeyPatch, replacement: Preadv) -> None:
    monkeypatch.setattr(os, "preadv", replacement)


@pytest.mark.parametrize("path", PATHS)
def test_a_flipped_bit_names_its_segment(
    path: TransferPath, content: bytes, open_file: OpenFile, memory: HostMemory
) -> None:
    allocation = memory.reserve(4 * 1024 * 1024, tag="weights")
    half = 1024 * 1024
    segments = [
        Segment(ptr=allocation.ptr + at, size=half, file_offset=at, sha256=Digest.of(content[at : at + half]))
        for at in (0, half, 2 * half)
    ]
    damaged = bytearray(content)
    damaged[half + 700_000] ^= 0x10
    fd = open_file(bytes(damaged))
    with pytest.raises(IntegrityError, match=f"0x{allocation.ptr + half:x}") as caught:
        hydrate_file(source_of(fd), segments, memory, path=path, piece_bytes=PIECE)
    assert caught.value.facts["ptr"] == allocation.ptr + half
    assert caught.value.facts["file_offset"] == half
    assert caught.value.facts["expected_sha256"] == str(segments[1].sha256)
    assert caught.value.facts["found_sha256"] == str(Digest.of(damaged[half : 2 * half]))
    os.pwrite(fd, content, 0)
    assert hydrate_file(source_of(fd), segments, memory).verified_bytes == 3 * half


def test_a_file_of_another_size_is_refused_before_a_byte_moves(
    content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment
) -> None:
    fd = open_file(content[:-1])
    with pytest.raises(IntegrityError, match=f"{len(content) - 1} bytes, and {len(content)} were promised"):
        hydrate_file(ProvedSource(fd=fd, bytes=len(content), evidence="x"), [segment], memory)
    assert memory.view(segment.ptr, 4096).tobytes() == bytes(4096)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("end", [1024 * 1024, 1024 * 1024 + 100])
def test_a_file_that_is_cut_while_it_is_read(
    path: TransferPath, end: int, content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment
) -> None:
    fd = open_file(content)

    def cut(_: int) -> None:
        os.ftruncate(fd, end)

    with pytest.raises(IntegrityError, match=f"ends at offset {end}") as caught:
        hydrate_file(source_of(fd), [segment], memory, path=path, piece_bytes=PIECE, num_threads=1, progress=cut)
    assert caught.value.facts["file_offset"] == end
    os.pwrite(fd, content, 0)
    assert_second_try_works(fd, segment, memory, content)


def test_a_file_that_changes_while_it_is_read(
    content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment
) -> None:
    fd = open_file(content)

    def touch(_: int) -> None:
        os.utime(fd, ns=(1, 1))

    with pytest.raises(IntegrityError, match="changed while it was read"):
        hydrate_file(source_of(fd), [segment], memory, progress=touch)
    assert_second_try_works(fd, segment, memory, content)


@pytest.mark.parametrize("path", PATHS)
def test_a_device_that_fails(
    path: TransferPath,
    content: bytes,
    open_file: OpenFile,
    memory: HostMemory,
    segment: Segment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fd = open_file(content)
    real = os.preadv

    def fail_late(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset >= 2 * 1024 * 1024:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    with monkeypatch.context() as patched:
        patch_reads(patched, fail_late)
        with pytest.raises(HostError, match=os.strerror(errno.EIO)) as caught:
            hydrate_file(source_of(fd), [segment], memory, path=path, piece_bytes=PIECE, num_threads=1)
    assert caught.value.facts["errno"] == errno.EIO
    assert caught.value.facts["file_offset"] == 2 * 1024 * 1024
    assert isinstance(caught.value.__cause__, OSError)
    assert_second_try_works(fd, segment, memory, content)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("most", [512, 4096, 5000])
def test_short_reads_go_on(
    path: TransferPath,
    most: int,
    content: bytes,
    open_file: OpenFile,
    memory: HostMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocation = memory.reserve(4 * 1024 * 1024, tag="weights")
    sizes = [100, 8000, 300_000, 3, 70_000]
    segments, at = [], 0
    for size in sizes:
        digest = Digest.of(content[at : at + size])
        segments.append(Segment(ptr=allocation.ptr + at, size=size, file_offset=at, sha256=digest))
        at += -(-size // 4096) * 4096
    real, calls = os.preadv, []

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        # The kernel may fill less than it was asked for: here, at most `most` bytes of the first buffer.
        calls.append(offset)
        return real(fd, [buffers[0][:most]], offset)

    fd = open_file(content)
    patch_reads(monkeypatch, short)
    report = hydrate_file(source_of(fd), segments, memory, path=path)
    assert report.verified_bytes == sum(sizes)
    assert len(calls) > sum(sizes) / most
    if most % 4096 == 0:  # otherwise O_DIRECT may refuse the length that this test made
        assert report.path is path


def test_a_file_system_that_refuses_the_first_direct_read(
    content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = open_file(content)
    real = os.preadv

    def refuse_direct(at: int, buffers: Sequence[memoryview], offset: int) -> int:
        if at != fd:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(at, buffers, offset)

    patch_reads(monkeypatch, refuse_direct)
    report = hydrate_file(source_of(fd), [segment], memory, path=TransferPath.DIRECT, piece_bytes=PIECE)
    assert report.path is TransferPath.BUFFERED
    assert "EINVAL" in report.reason
    assert memory.view(segment.ptr, segment.size).tobytes() == content


def test_a_file_system_that_refuses_to_open_for_direct_reads(
    content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(transfer, "open_direct", refuse)
    report = hydrate_file(source_of(open_file(content)), [segment], memory, path=TransferPath.DIRECT)
    assert report.path is TransferPath.BUFFERED
    assert "O_DIRECT" in report.reason
    assert memory.view(segment.ptr, segment.size).tobytes() == content


def test_cancelled_before_it_begins(content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment) -> None:
    cancel = threading.Event()
    cancel.set()
    fd = open_file(content)
    with pytest.raises(OperationInterrupted):
        hydrate_file(source_of(fd), [segment], memory, cancel=cancel)
    assert memory.view(segment.ptr, 4096).tobytes() == bytes(4096)
    assert_second_try_works(fd, segment, memory, content)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_cancelled_on_the_way(
    num_threads: int, content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment
) -> None:
    cancel, told = threading.Event(), []

    def stop_after_three(count: int) -> None:
        told.append(count)
        if len(told) == 3:
            cancel.set()

    fd = open_file(content)
    with pytest.raises(OperationInterrupted, match="cancelled"):
        hydrate_file(
            source_of(fd),
            [segment],
            memory,
            cancel=cancel,
            progress=stop_after_three,
            piece_bytes=PIECE,
            num_threads=num_threads,
        )
    assert len(told) <= 3 + num_threads - 1  # pieces in hand are finished, no other is begun
    assert_second_try_works(fd, segment, memory, content)


def test_an_error_of_the_progress_callback_comes_through(
    content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment
) -> None:
    def broken(_: int) -> None:
        raise ZeroDivisionError

    fd = open_file(content)
    with pytest.raises(ZeroDivisionError):
        hydrate_file(source_of(fd), [segment], memory, progress=broken, piece_bytes=PIECE)
    assert_second_try_works(fd, segment, memory, content)


def test_ctrl_c_waits_for_the_threads(
    content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment
) -> None:
    interrupts = iter(range(2))  # once more than it takes, and not so often that one hits the test itself

    def interrupt(_: int) -> None:
        if next(interrupts, None) is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    fd = open_file(content)
    with pytest.raises(KeyboardInterrupt):
        hydrate_file(source_of(fd), [segment], memory, progress=interrupt, piece_bytes=PIECE, num_threads=2)
    assert_second_try_works(fd, segment, memory, content)


def test_a_thread_that_cannot_be_started(
    content: bytes, open_file: OpenFile, memory: HostMemory, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = open_file(content)
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    for num_threads in (2, 4):  # the third thread is the hasher, then a reader
        started.clear()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="new thread"):
                hydrate_file(source_of(fd), [segment], memory, num_threads=num_threads, piece_bytes=PIECE)
        assert len(started) == 2
        assert not any(thread.is_alive() for thread in started)
    assert_second_try_works(fd, segment, memory, content)


def test_a_descriptor_that_is_closed(memory: HostMemory, segment: Segment) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.close(write_end)
    with pytest.raises(HostError, match=os.strerror(errno.EBADF)):
        hydrate_file(ProvedSource(fd=read_end, bytes=1, evidence="x"), [segment], memory)
