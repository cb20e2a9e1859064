"""The residual's bytes and what its writer refuses."""

from __future__ import annotations

import os
import stat
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.errors import IntegrityError, OperationInterrupted, ResourceBusy, UsageError
from coldsnap.store.residual import ResidualSource, write_residual
from coldsnap.store.staging import HOLE_BYTES


def source(ptr: int, data: bytes) -> ResidualSource:
    return ResidualSource(ptr=ptr, size=len(data), read=lambda: iter([data]))


def test_golden_bytes_are_in_address_order_padded_to_pages(tmp_path: Path) -> None:
    parts = {0x3000: b"c" * 4097, 0x1000: b"a", 0x2000: b"b" * 4096}
    written = write_residual(tmp_path / "weights.blob", [source(ptr, data) for ptr, data in parts.items()])
    wanted = b"a" + bytes(4095) + b"b" * 4096 + b"c" * 4097 + bytes(4095)
    assert written is not None
    assert written.path.read_bytes() == wanted
    assert written.bytes == len(wanted) == 4 * 4096
    assert written.sha256 == Digest.of(wanted)
    rows = [(one.ptr, one.size, one.offset, one.crc32) for one in written.extents]
    assert rows == [
        (0x1000, 1, 0, zlib.crc32(b"a")),
        (0x2000, 4096, 4096, zlib.crc32(b"b" * 4096)),
        (0x3000, 4097, 8192, zlib.crc32(b"c" * 4097)),
    ]
    row = written.extents[2].in_allocation(0x3000)
    assert (row.ptr, row.size, row.allocation_ptr, row.offset) == (0x3000, 4097, 0x3000, 8192)


def test_zeros_are_not_written(tmp_path: Path) -> None:
    """Their space is reserved; whoever looks for holes finds them all the same, until somebody has read them."""
    parts = [b"a" * 4096, bytes(9 << 20), b"b" * 4096]
    written = write_residual(tmp_path / "weights.blob", [source(n << 30, data) for n, data in enumerate(parts)])
    assert written is not None
    whole = b"".join(parts)
    with written.path.open("rb") as file:
        hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        data = os.lseek(file.fileno(), hole, os.SEEK_DATA)
    assert hole <= HOLE_BYTES
    assert len(whole) - data <= HOLE_BYTES
    assert (written.path.read_bytes(), written.sha256) == (whole, Digest.of(whole))
    assert [one.crc32 for one in written.extents] == [zlib.crc32(part) for part in parts]


def test_is_private_and_the_only_file(tmp_path: Path) -> None:
    write_residual(tmp_path / "weights.blob", [source(0, b"x")])
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_empty_residual_is_no_file(tmp_path: Path) -> None:
    assert write_residual(tmp_path / "weights.blob", []) is None
    assert list(tmp_path.iterdir()) == []


def test_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "weights.blob").write_bytes(b"precious")
    with pytest.raises(ResourceBusy, match="never overwritten"):
        write_residual(tmp_path / "weights.blob", [source(0, b"x")])
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == b"precious"


def test_refuses_an_empty_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0x20 has 0 bytes"):
        write_residual(tmp_path / "weights.blob", [source(0x20, b"")])


def test_refuses_a_source_that_does_not_give_its_bytes(tmp_path: Path) -> None:
    short = ResidualSource(ptr=0x20, size=9, read=lambda: iter([b"12345678"]))
    with pytest.raises(IntegrityError, match="gave 8 bytes instead of 9"):
        write_residual(tmp_path / "weights.blob", [short])
    assert list(tmp_path.iterdir()) == []


def test_cancel_leaves_nothing(tmp_path: Path) -> None:
    cancel = threading.Event()

    def read() -> Iterator[bytes]:
        cancel.set()
        yield b"1234"

    with pytest.raises(OperationInterrupted, match="residual was removed"):
        write_residual(tmp_path / "weights.blob", [ResidualSource(ptr=0, size=4, read=read)], cancel=cancel)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    counts: list[int] = []
    write_residual(tmp_path / "weights.blob", [source(0, b"x" * 10), source(99, b"y" * 5)], progress=counts.append)
    assert sum(counts) == 15


@given(st.lists(st.binary(min_size=1, max_size=9000), min_size=1, max_size=5))
@settings(max_examples=20)
def test_any_parts(tmp_path: Path, parts: list[bytes]) -> None:
    path = tmp_path / "weights.blob"
    path.unlink(missing_ok=True)
    written = write_residual(path, [source(n * 0x10000, data) for n, data in reversed(list(enumerate(parts)))])
    assert written is not None
    assert path.read_bytes() == b"".join(data + bytes(-len(data) % 4096) for data in parts)
    assert written.sha256 == Digest.of(path.read_bytes())
    assert [one.crc32 for one in written.extents] == [zlib.crc32(data) for data in parts]
