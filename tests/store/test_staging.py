"""Writing around zeros."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap.store.staging import HOLE_BYTES, write_around_zeros

DATA = random.Random(5).randbytes(2 * HOLE_BYTES)


def zeros(blocks: float) -> bytes:
    return bytes(int(blocks * HOLE_BYTES))


@pytest.mark.parametrize("kind", [bytes, memoryview])
@pytest.mark.parametrize("offset", [0, 3 * HOLE_BYTES])
@pytest.mark.parametrize(
    ("data", "written_blocks"),
    [
        (b"", 0),
        (DATA, 2),
        (zeros(3), 0),
        (zeros(2.5), 0),
        (zeros(1) + DATA + zeros(1), 2),
        (DATA + zeros(4) + DATA, 4),
        (zeros(0.5) + DATA + zeros(0.5), 3),
        (DATA[:HOLE_BYTES] + zeros(0.999) + b"x", 2),
        (DATA[:1], 1),
    ],
)
def test_every_byte_is_there_and_zeros_take_no_space(
    tmp_path: Path, data: bytes, written_blocks: int, offset: int, kind: Callable[[bytes], bytes | memoryview]
) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(offset + len(data))
        write_around_zeros(file.fileno(), kind(data), offset)
        assert os.pread(file.fileno(), offset + len(data) + 1, 0) == bytes(offset) + data
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_blocks * 512 <= written_blocks * HOLE_BYTES
