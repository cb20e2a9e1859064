"""Each way to damage a file does what it says, and is undone without a trace."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from coldsnap.testing.faults.damage import HOWS

DATA = bytes(range(256)) * 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "file"
    found.write_bytes(DATA)
    found.chmod(0o600)
    os.utime(found, ns=(1_000_000_000, 1_000_000_000))
    return found


def differing_bits(data: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(DATA, data, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_a_flip_is_one_bit_and_a_quiet_one_leaves_the_time(path: Path, seed: int) -> None:
    HOWS["flip"](path, random.Random(seed))
    assert differing_bits(path.read_bytes()) == 1
    assert path.stat().st_mtime_ns != 1_000_000_000
    path.write_bytes(DATA)
    os.utime(path, ns=(1_000_000_000, 1_000_000_000))
    HOWS["flip-quiet"](path, random.Random(seed))
    assert differing_bits(path.read_bytes()) == 1
    assert path.stat().st_mtime_ns == 1_000_000_000


@pytest.mark.parametrize("how", sorted(set(HOWS) - {"foreign"}))
def test_every_way_changes_something(path: Path, how: str) -> None:
    before = path.lstat()
    HOWS[how](path, random.Random(1))
    if how == "gone":
        assert not path.exists()
        return
    after = path.lstat()
    same = (before.st_mode, before.st_size) == (after.st_mode, after.st_size)
    assert not same or path.read_bytes() != DATA
    kinds = {"folder": stat.S_ISDIR, "link": stat.S_ISLNK, "pipe": stat.S_ISFIFO}
    assert kinds.get(how, stat.S_ISREG)(after.st_mode)
    if how == "link":
        assert path.read_bytes() == DATA  # the bytes are right; it is the way to them that is not to be trusted
    if how == "cut":
        assert DATA.startswith(path.read_bytes())
    if how == "public":
        assert stat.S_IMODE(after.st_mode) == 0o666
