"""Files and memory that many tests of this room need."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldsnap.hydrate import HostMemory

FILE_BYTES = 3 * 1024 * 1024 + 777  # ends in the middle of a block


@pytest.fixture(scope="session")
def content() -> bytes:
    """Bytes no two blocks of which are equal."""
    return random.Random(20).randbytes(FILE_BYTES)


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Callable[[bytes], int]]:
    """Write bytes to a new file and open it for reading and writing."""
    fds: list[int] = []

    def make(data: bytes) -> int:
        path = tmp_path / f"file-{len(fds)}"
        path.write_bytes(data)
        fds.append(os.open(path, os.O_RDWR))
        return fds[-1]

    yield make
    for fd in fds:
        os.close(fd)


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    """Host memory away from the default place."""
    with HostMemory(base=0x5200_0000_0000) as memory:
        yield memory
