"""Reading and hashing what memory holds."""

from __future__ import annotations

import hashlib
import threading

import pytest

from coldsnap.errors import OperationInterrupted, UsageError
from coldsnap.hydrate import HostMemory, hash_ranges, read_chunks, scan


def test_chunks_are_the_bytes_in_order(memory: HostMemory, content: bytes) -> None:
    ptr = memory.reserve(4 * 1024 * 1024, tag="a").ptr
    memory.view(ptr, len(content))[:] = content
    chunks = list(read_chunks(memory, ptr + 1, len(content) - 1, 1_000_000))
    assert [len(chunk) for chunk in chunks] == [1_000_000, 1_000_000, 1_000_000, len(content) - 1 - 3_000_000]
    assert b"".join(chunks) == content[1:]
    assert all(chunk.readonly for chunk in chunks)


def test_a_chunk_needs_bytes(memory: HostMemory) -> None:
    ptr = memory.reserve(4096, tag="a").ptr
    with pytest.raises(UsageError, match="chunk_bytes"):
        list(read_chunks(memory, ptr, 1, 0))


@pytest.mark.parametrize("num_threads", [0, 1, 5])
def test_ranges_are_hashed_in_the_order_given(
    num_threads: int, memory: HostMemory, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "CHUNK_BYTES", 4096)
    ptr = memory.reserve(4 * 1024 * 1024, tag="a").ptr
    memory.view(ptr, len(content))[:] = content
    ranges = [(5, 1), (0, len(content)), (100_000, 70_000), (100_000, 70_000), (4096, 8192)]
    told: list[int] = []
    digests = hash_ranges(
        memory, [(ptr + at, size) for at, size in ranges], num_threads=num_threads, progress=told.append
    )
    expected = [hashlib.sha256(content[at : at + size]).hexdigest() for at, size in ranges]
    assert [digest.hex for digest in digests] == expected
    assert sum(told) == sum(size for _, size in ranges)


def test_no_ranges(memory: HostMemory) -> None:
    assert hash_ranges(memory, []) == []


def test_a_range_outside_is_refused(memory: HostMemory) -> None:
    ptr = memory.reserve(4096, tag="a").ptr
    with pytest.raises(UsageError, match="not inside one allocation"):
        hash_ranges(memory, [(ptr, 4096), (ptr + 4000, 97)])


def test_hashing_is_cancelled(memory: HostMemory) -> None:
    ptr = memory.reserve(64 * 1024 * 1024, tag="a").ptr
    cancel, told = threading.Event(), []

    def stop(count: int) -> None:
        told.append(count)
        cancel.set()

    with pytest.raises(OperationInterrupted):
        hash_ranges(memory, [(ptr, 64 * 1024 * 1024)], progress=stop, cancel=cancel)
    assert told == [scan.CHUNK_BYTES]
