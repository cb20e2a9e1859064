"""What the tests of this room share."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coldsnap.capsule.criu import Criu
from coldsnap.core.points import install
from coldsnap.testing.gpu import GpuRack
from coldsnap.testing.yard import Yard


class Clock:
    """What a deadline of this room reads instead of the real clock; ``skip`` makes it later at once."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped_s


# Gives the first entry of each pagemap a field that no CRIU has today, as another CRIU might.
_NEWER = """
import struct, sys
for pid in sys.argv[1:]:
    path = f"/proc/self/fd/10/pagemap-{pid}.img"
    data = open(path, "rb").read()
    size, = struct.unpack_from("<I", data, 14)
    entry = data[18 : 18 + size] + bytes([15 << 3, 1])
    open(path, "wb").write(data[:14] + struct.pack("<I", len(entry)) + entry + data[18 + size :])
"""


def newer_criu(folder: Path, criu: Criu, pids: Iterable[int]) -> Criu:
    """A CRIU for dumps that writes images of these processes which are not understood."""
    newer, script = folder / "newer-criu", folder / "newer.py"
    script.write_text(_NEWER)
    words = " ".join(map(str, pids))
    newer.write_text(f'#!/bin/sh\n{criu.path} "$@" || exit\nexec {sys.executable} -I -S {script} {words}\n')
    newer.chmod(0o700)
    return Criu(path=newer, version=criu.version)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("coldsnap.capsule.deadline.time", found)
    return found


@contextmanager
def at(point: str, act: Callable[[], object]) -> Iterator[None]:
    """Do something whenever a point is reached."""

    def hook(name: str) -> None:
        if name == point:
            act()

    install(hook)
    try:
        yield
    finally:
        install(None)


@pytest.fixture
def yard(criu: Criu, tmp_path: Path) -> Iterator[Yard]:
    """A yard; afterwards its units are ended and nothing of it may be left on the machine."""
    yard = Yard(folder=tmp_path)
    yield yard
    yard.sweep()


@pytest.fixture
def rack() -> Iterator[GpuRack]:
    """Two fake GPUs, in a folder whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="cs-") as folder:
        yield GpuRack.make(Path(folder), 2)
