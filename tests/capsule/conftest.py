"""What the tests of this room share."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
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
