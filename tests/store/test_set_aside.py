"""Setting a damaged pack aside: only what a second proof finds damaged is moved, and nothing is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.errors import UnsafePath
from coldsnap.store.admission import record_path
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.stateroot import StateRoot

DATA = b"a pack" * 1000
DIGEST = Digest.of(DATA)


@pytest.fixture
def store(tmp_path: Path) -> PayloadStore:
    return PayloadStore(StateRoot.open(tmp_path / "state"))


def put(store: PayloadStore) -> Path:
    with store.stage(len(DATA)) as staged:
        os.pwrite(staged.fd, DATA, 0)
        return store.commit(staged, DIGEST)


def damaged(store: PayloadStore, data: bytes) -> Path:
    path = put(store)
    path.chmod(0o600)
    path.write_bytes(data)
    return path


def test_nothing_there_and_a_whole_pack_stay_as_they_are(store: PayloadStore) -> None:
    assert store.set_aside(DIGEST, len(DATA)) is None
    path = put(store)
    assert store.set_aside(DIGEST, len(DATA)) is None
    assert path.read_bytes() == DATA
    assert record_path(path).is_file()


@pytest.mark.parametrize("data", [DATA[:-1], DATA[:-1] + b"x", b""])
def test_a_damaged_pack_is_moved_with_its_record(store: PayloadStore, data: bytes) -> None:
    path = damaged(store, data)
    aside = store.set_aside(DIGEST, len(DATA))
    assert aside == store.state_root.quarantine / f"{path.name}.0"
    assert aside is not None
    assert aside.read_bytes() == data
    assert list(store.state_root.payloads.iterdir()) == []
    assert put(store).read_bytes() == DATA, "its name is free again"


def test_several_are_kept_side_by_side(store: PayloadStore) -> None:
    for number in range(3):
        path = damaged(store, b"%d" % number)
        assert store.set_aside(DIGEST, len(DATA)) == store.state_root.quarantine / f"{path.name}.{number}"
    assert len(list(store.state_root.quarantine.iterdir())) == 3


def test_a_record_that_lies_does_not_save_a_damaged_pack(store: PayloadStore) -> None:
    """Damage that keeps size and time: the record still vouches, and a proof that believed it would find nothing."""
    path = put(store)
    times = path.stat()
    path.chmod(0o600)
    path.write_bytes(DATA[:-1] + b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert store.set_aside(DIGEST, len(DATA)) is not None


def test_what_is_no_file_of_ours_is_left_alone(store: PayloadStore, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_bytes(b"other")
    store.path(DIGEST).symlink_to(real)
    assert store.set_aside(DIGEST, len(DATA)) is None
    assert store.path(DIGEST).is_symlink()
    store.path(DIGEST).unlink()
    store.path(DIGEST).mkdir()
    assert store.set_aside(DIGEST, len(DATA)) is None
    assert store.path(DIGEST).is_dir()


def test_an_unsafe_root_moves_nothing(store: PayloadStore) -> None:
    path = damaged(store, b"x")
    store.state_root.locks.chmod(0o777)
    with pytest.raises(UnsafePath):
        store.set_aside(DIGEST, len(DATA))
    assert path.exists()
