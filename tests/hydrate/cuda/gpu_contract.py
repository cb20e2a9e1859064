"""The same promises on a real GPU. Not collected by name: `pytest tests/hydrate/cuda/gpu_contract.py` runs it there."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.errors import ResourceBusy
from coldsnap.hydrate import (
    ProvedSource,
    Segment,
    StableMemory,
    TransferPath,
    UnprovedSource,
    hash_ranges,
    hydrate_file,
    libc,
)
from coldsnap.hydrate.cuda import CudaMemory, RegisteredFile, open_driver
from coldsnap.testing.memory_suite import StableMemoryContract

MIB = 1 << 20


class TestCudaMemory(StableMemoryContract):
    PAGE = 2 << 20

    def make_memory(self, base: int) -> StableMemory:
        return CudaMemory(open_driver(), base=base)

    @contextlib.contextmanager
    def occupy(self, memory: StableMemory, ptr: int, size: int) -> Iterator[None]:
        assert isinstance(memory, CudaMemory)
        memory.attach()
        driver = memory.driver
        if any(one.ptr <= ptr < one.ptr + one.size for one in memory.allocations):
            handle = driver.create(0, size)
            driver.map(ptr, size, handle)
            driver.destroy(handle)
            yield
            driver.unmap(ptr, size)
        else:
            libc.map_anonymous(ptr, size, writable=False, replace=False)
            yield
            libc.unmap(ptr, size)


@pytest.fixture
def device() -> Iterator[CudaMemory]:
    with CudaMemory(open_driver()) as memory:
        yield memory


@pytest.fixture
def content() -> bytes:
    return random.Random(1).randbytes(40 * MIB + 777)


def segments_of(content: bytes, base: int) -> list[Segment]:
    segments, offset, at = [], 0, 5
    for size in (100, 20 * MIB + 1, 8192, 3, 15 * MIB):
        digest = Digest.of(content[offset : offset + size])
        segments.append(Segment(ptr=base + at, size=size, file_offset=offset, sha256=digest))
        offset += -(-size // 4096) * 4096
        at += size + 1
    return segments


@pytest.mark.parametrize("path", [None, *TransferPath])
@pytest.mark.parametrize("folder", ["/dev/shm", "/var/tmp"])
def test_files_arrive_by_every_path(device: CudaMemory, content: bytes, folder: str, path: TransferPath | None) -> None:
    base = device.reserve(64 * MIB, tag="weights").ptr
    name = Path(folder) / f"coldsnap-gpu-{os.getpid()}"
    name.write_bytes(content)
    fd = os.open(name, os.O_RDONLY)
    name.unlink()
    segments = segments_of(content, base)
    wanted = [one.sha256 for one in segments]
    source = ProvedSource(fd=fd, bytes=len(content), evidence="test")
    hydrate_file(source, segments, device, path=path)
    assert hash_ranges(device, [(one.ptr, one.size) for one in segments]) == wanted
    device.unmap()
    device.remap()
    report = hydrate_file(UnprovedSource(fd=fd, bytes=len(content)), segments, device, path=path)
    assert report.verified_bytes == report.bytes
    assert hash_ranges(device, [(one.ptr, one.size) for one in segments]) == wanted
    with RegisteredFile(device, fd, file_bytes=len(content)) as ahead:
        ahead.register_all()
        device.unmap()
        device.remap()
        hydrate_file(source, segments, device, registered=ahead)
    assert hash_ranges(device, [(one.ptr, one.size) for one in segments]) == wanted
    os.close(fd)


def test_an_address_that_a_host_mapping_holds_is_refused(device: CudaMemory) -> None:
    held = mmap.mmap(-1, 16 * MIB)
    inside = -(-libc.address_of(memoryview(held)) // (2 * MIB)) * (2 * MIB)
    with pytest.raises(ResourceBusy, match="taken by"):
        device.reserve(4 * MIB, tag="a", address=inside)


def test_torch_looks_at_the_same_bytes(device: CudaMemory) -> None:
    torch = pytest.importorskip("torch")
    allocation = device.reserve(2 * MIB, tag="a")
    tensor = torch.as_tensor(device.array(allocation.ptr, 4096), device="cuda:0")
    assert tensor.data_ptr() == allocation.ptr
    tensor.fill_(7)
    torch.cuda.synchronize()
    assert b"".join(device.chunks(allocation.ptr, 8, 4096)) == bytes([7]) * 8
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    device.unmap()
    device.remap()
    device.copy_in(allocation.ptr, memoryview(bytes([40]) * 4096))
    graph.replay()
    torch.cuda.synchronize()
    assert tensor.tolist() == [41] * 4096
