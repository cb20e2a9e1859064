"""Copies of packs in memory: every byte proved on the way, and nothing that could be taken for a copy otherwise."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.errors import InvalidDocument, OperationInterrupted, OutOfSpace, PayloadRejected, UnsafePath
from coldsnap.store.admission import admit_file, record_path
from coldsnap.store.copies import MemoryCopies
from coldsnap.store.stateroot import StateRoot

PAGE = 4096
SIZES = (10_000, 1, PAGE, 9 << 20, 70_001)


class Pack:
    """A file with the layout of a pack: extents at pages, zeros between."""

    def __init__(self, path: Path) -> None:
        chooser = random.Random(1)
        data, self.extents = bytearray(), []
        for size in SIZES:
            part = chooser.randbytes(size)
            self.extents.append((len(data), size, Digest.of(part)))
            data += part + bytes(-size % PAGE)
        self.path, self.data, self.digest = path, bytes(data), Digest.of(bytes(data))
        path.write_bytes(data)


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    return Pack(tmp_path / "given.pack")


@pytest.fixture
def state(tmp_path: Path) -> StateRoot:
    return StateRoot.open(tmp_path / "state")


@pytest.fixture
def opened(pack: Pack) -> Iterator[int]:
    fd = os.open(pack.path, os.O_RDONLY)
    yield fd
    os.close(fd)


def fill(state: StateRoot, pack: Pack, fd: int, **more: object) -> Path:
    state.make_in_memory(pack.digest.hex)
    copies = MemoryCopies(state)
    return copies.fill(pack.digest, len(pack.data), fd, extents=pack.extents, **more)  # type: ignore[arg-type]


def test_a_copy_is_the_pack_and_is_believed_by_its_record(state: StateRoot, pack: Pack, opened: int) -> None:
    copies = MemoryCopies(state)
    assert not copies.is_there(pack.digest, len(pack.data))
    seen: list[int] = []
    path = fill(state, pack, opened, progress=seen.append)
    assert path.read_bytes() == pack.data
    assert sum(seen) == len(pack.data)
    assert copies.is_there(pack.digest, len(pack.data))
    assert not copies.is_there(pack.digest, len(pack.data) + 1)
    with admit_file(path, pack.digest, len(pack.data)) as admitted:
        assert admitted.from_record
    assert path.stat().st_mode & 0o777 == 0o400
    assert copies.digests() == (pack.digest,)
    assert copies.bytes(pack.digest) >= len(pack.data)


def test_a_changed_copy_is_no_copy(state: StateRoot, pack: Pack, opened: int) -> None:
    path = fill(state, pack, opened)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(1, 1))
    assert not MemoryCopies(state).is_there(pack.digest, len(pack.data))


def test_what_was_read_may_leave_the_page_cache(
    state: StateRoot, pack: Pack, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, int]] = []

    def advise(fd: int, offset: int, size: int, advice: int) -> None:
        assert (fd, advice) == (opened, os.POSIX_FADV_DONTNEED)
        advised.append((offset, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    fill(state, pack, opened, drop_behind=True)
    end = 0
    for offset, size in sorted(advised):
        assert offset == end
        end += size
    assert end == len(pack.data)


@pytest.mark.parametrize("at", [0, 9_999, 10_001, 20_000, 9 << 20])
def test_damage_of_any_byte_is_seen_on_the_way(state: StateRoot, pack: Pack, at: int) -> None:
    with pack.path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([pack.data[at] ^ 1]))
    with pack.path.open("rb") as file, pytest.raises(PayloadRejected, match="damaged"):
        fill(state, pack, file.fileno())
    assert list(MemoryCopies(state).folder(pack.digest).iterdir()) == []


def test_a_cancelled_copy_leaves_nothing(state: StateRoot, pack: Pack, opened: int) -> None:
    cancel = threading.Event()
    with pytest.raises(OperationInterrupted):
        fill(state, pack, opened, cancel=cancel, progress=lambda _: cancel.set(), num_threads=1)
    assert list(MemoryCopies(state).folder(pack.digest).iterdir()) == []


def test_what_a_killed_copy_left_is_replaced(state: StateRoot, pack: Pack, opened: int) -> None:
    folder = state.make_in_memory(pack.digest.hex)
    (folder / f"{pack.digest.hex}.partial").write_bytes(b"half")
    path = fill(state, pack, opened)
    assert {one.name for one in folder.iterdir()} == {path.name, record_path(path).name}


def test_a_layout_that_is_not_the_packs_is_refused_before_a_byte(state: StateRoot, pack: Pack, opened: int) -> None:
    del pack.extents[2]
    with pytest.raises(InvalidDocument):
        fill(state, pack, opened)


def test_no_room_is_an_error_of_its_own(
    state: StateRoot, pack: Pack, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutOfSpace):
        fill(state, pack, opened)
    assert list(MemoryCopies(state).folder(pack.digest).iterdir()) == []


def test_emptying_frees_all_and_may_be_done_again(state: StateRoot, pack: Pack, opened: int) -> None:
    fill(state, pack, opened)
    copies = MemoryCopies(state)
    assert copies.empty(pack.digest) >= len(pack.data)
    assert list(copies.folder(pack.digest).iterdir()) == []
    assert copies.empty(pack.digest) == 0


def test_without_any_copy_there_is_no_folder(state: StateRoot) -> None:
    assert MemoryCopies(state).digests() == ()
    assert not state.in_memory.exists()


def test_the_folder_is_private_and_no_link(state: StateRoot, tmp_path: Path) -> None:
    assert state.make_in_memory("0" * 64).stat().st_mode & 0o777 == 0o700
    (state.in_memory / ("1" * 64)).symlink_to(tmp_path)
    with pytest.raises(UnsafePath):
        state.make_in_memory("1" * 64)
