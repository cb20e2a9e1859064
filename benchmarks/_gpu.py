"""What the GPU benchmark works on, and the plain ways to move bytes that it compares with."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from coldsnap.core.digest import Digest
from coldsnap.core.extents import Allocation, file_layout, pack_order, residual_ranges
from coldsnap.hydrate import Segment, StableMemory, hash_ranges, libc, read_chunks
from coldsnap.hydrate.cuda import CudaMemory, Driver
from coldsnap.store.pack import HashedSource, PackedExtent, PackSource, ResidualSource, write_residual
from coldsnap.store.residual import WrittenResidual

__all__ = [
    "Counting",
    "copy_file",
    "driver_version",
    "lay_out_pack",
    "plain_read",
    "plain_write",
    "tensor_sizes",
    "warm",
]

MIB = 1 << 20
PAGE = 4096
OTHER_BYTES = 128 * MIB


def tensor_sizes(shrink: int) -> list[int]:
    """Bytes of the tensors of a Qwen3-8B in bf16, each divided by ``shrink``."""
    layer = [4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, *[12288 * 4096] * 3, 4096, 4096, 128, 128]
    elements = [151936 * 4096] * 2 + layer * 36 + [4096]
    return [max(1, 2 * count // shrink) for count in elements]


class Counting:
    """The driver, and how many bytes were read from the device."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self.read_bytes = 0

    def copy_out(self, address: int, ptr: int, size: int, stream: int) -> None:
        with self._lock:
            self.read_bytes += size
        self._driver.copy_out(address, ptr, size, stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


class Model:
    """Tensors of a Qwen3-8B in device memory, filled with bytes no two blocks of which are equal; where they lie in
    files, once these are written."""

    def __init__(self, memory: CudaMemory, shrink: int) -> None:
        self.memory, self.shrink = memory, shrink
        self.ranges = self._reserve(tensor_sizes(shrink))
        self.bytes = sum(size for _, size in self.ranges)
        self.extents: Sequence[PackedExtent] = ()
        self.residual: WrittenResidual
        self.residual_digests: list[Digest] = []
        self._fill()

    def _reserve(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        ranges, at = [], 0
        for size in sorted(sizes, key=lambda one: one < PAGE):  # large ones first, at pages
            alignment = PAGE if size >= PAGE else 64
            at = -(-at // alignment) * alignment
            ranges.append((at, size))
            at += size
        weights = self.memory.reserve(-(-at // PAGE) * PAGE, tag="weights")
        self.memory.reserve(max(PAGE, OTHER_BYTES // self.shrink // PAGE * PAGE), tag="other")
        return [(weights.ptr + at, size) for at, size in ranges]

    def _fill(self) -> None:
        block = random.Random(1).randbytes(4 * MIB)

        def fill(start: int, allocation: Allocation) -> None:
            end = min(start + len(block), allocation.ptr + allocation.size)
            data = bytearray(block[: end - start])
            data[:8] = start.to_bytes(8, "little")
            self.memory.copy_in(start, memoryview(data))

        with ThreadPoolExecutor(8) as threads:
            for one in self.memory.allocations:
                starts = range(one.ptr, one.ptr + one.size, len(block))
                list(threads.map(partial(fill, allocation=one), starts))
        self.memory.trim()

    def _read(self, ptr: int, size: int) -> Iterator[memoryview]:
        return read_chunks(self.memory, ptr, size)

    def sources(self) -> list[PackSource]:
        return [
            PackSource(ptr=ptr, size=size, semantic_id=f"{ptr:064x}", read=partial(self._read, ptr, size))
            for ptr, size in self.ranges
        ]

    def write_residual(self, path: Path) -> None:
        rest = residual_ranges(self.memory.allocations[:2], self.ranges)
        sources = [ResidualSource(ptr=ptr, size=size, read=partial(self._read, ptr, size)) for ptr, size, _ in rest]
        residual = write_residual(path, sources)
        if residual is None:
            raise RuntimeError("a model without a residual")
        self.residual = residual
        self.residual_digests = hash_ranges(self.memory, [(one.ptr, one.size) for one in residual.extents])

    def segments(self) -> list[Segment]:
        return [Segment(ptr=one.ptr, size=one.size, file_offset=one.offset, sha256=one.sha256) for one in self.extents]

    def rest(self) -> list[Segment]:
        return [Segment(ptr=one.ptr, size=one.size, file_offset=one.offset) for one in self.residual.extents]

    def verified(self, run: Callable[[], float]) -> bool:
        """Clear the device, run, and compare the digest of every extent of pack and residual."""
        self.memory.unmap()
        self.memory.remap()
        run()
        ranges = [(one.ptr, one.size) for one in self.extents]
        ranges += [(one.ptr, one.size) for one in self.residual.extents]
        wanted = [one.sha256 for one in self.extents] + self.residual_digests
        return hash_ranges(self.memory, ranges) == wanted


def lay_out_pack(memory: StableMemory, hashed: Sequence[HashedSource], path: Path) -> tuple[list[PackedExtent], int]:
    """The file that ``write_hashed`` makes, without its digest, and so in many threads; extents and bytes."""
    ordered = pack_order(hashed)
    layout = file_layout(one.size for one in ordered)
    extents = [
        PackedExtent(
            ptr=one.ptr, size=one.size, semantic_id=one.semantic_id, sha256=one.sha256, crc32=one.crc32, offset=offset
        )
        for one, offset in zip(ordered, layout.offsets, strict=True)
    ]
    with path.open("wb", buffering=0) as file:
        os.ftruncate(file.fileno(), layout.bytes)

        def write(extent: PackedExtent) -> None:
            at = extent.offset
            for chunk in read_chunks(memory, extent.ptr, extent.size):
                os.pwrite(file.fileno(), chunk, at)
                at += len(chunk)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, sorted(extents, key=lambda one: -one.size)))
    return extents, layout.bytes


def driver_version() -> str | None:
    """The kernel module's, which is the driver's."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def plain_write(path: Path, data: bytes, total: int) -> None:
    """Write ``total`` bytes in one thread, with fsync, and remove the file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for at in range(0, total, len(data)):
            os.pwrite(fd, data[: total - at], at)
        os.fsync(fd)
    finally:
        os.close(fd)
        path.unlink()


def plain_read(fd: int, total: int, num_threads: int) -> None:
    """Read ``total`` bytes into buffers of 8 MiB, each thread its own."""
    piece = 8 * MIB
    starts, lock = iter(range(0, total, piece)), threading.Lock()

    def read() -> None:
        address = libc.map_anywhere(piece)
        while True:
            with lock:
                at = next(starts, None)
            if at is None:
                libc.unmap(address, piece)
                return
            os.preadv(fd, [libc.view_at(address, piece)], at)

    with ThreadPoolExecutor(num_threads) as threads:
        for done in [threads.submit(read) for _ in range(num_threads)]:
            done.result()


def warm(fd: int, total: int) -> None:
    """Bring ``total`` bytes into the page cache."""
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda at: len(os.pread(fd, 4 * MIB, at)), range(0, total, 4 * MIB)))


def copy_file(source: Path, target: Path) -> None:
    """Copy with 8 threads."""
    total = source.stat().st_size
    with source.open("rb", buffering=0) as opened, target.open("wb", buffering=0) as made:
        os.ftruncate(made.fileno(), total)

        def copy(at: int) -> None:
            os.pwrite(made.fileno(), os.pread(opened.fileno(), 8 * MIB, at), at)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(copy, range(0, total, 8 * MIB)))
