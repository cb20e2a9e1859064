"""The contract of ``ship/base.py`` as tests that every store runs.

A test module subclasses ``SourceContract`` (reading) or ``SinkContract`` (both) and gives the fixture ``ground``.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

from coldsnap.core.digest import Digest
from coldsnap.errors import OperationInterrupted, PayloadRejected, RemoteError
from coldsnap.ship.base import PIECE_BYTES, Item, Kind, Outgoing, Sink, Source
from coldsnap.ship.pull import pulled

__all__ = ["Ground", "SinkContract", "SourceContract", "objects_for", "outgoing"]

MIB = 1 << 20


class Ground(Protocol):
    """What the contract's tests stand on."""

    @property
    def store(self) -> Sink:
        """The store under test, empty at first."""

    def put(self, objects: Sequence[Outgoing]) -> Source:
        """Bring objects there and give a source that has them (the store, or it at a revision)."""

    def moved_bytes(self) -> int | None:
        """Bytes of bodies the place has received, where somebody counts."""


def outgoing(folder: Path, kind: Kind, data: bytes) -> Outgoing:
    """A local file of these bytes, ready to be written."""
    item = Item(kind, Digest.of(data))
    path = folder / f"{kind}-{item.digest.hex}"
    path.write_bytes(data)
    return Outgoing(item=item, bytes=len(data), path=path)


def objects_for(kinds: frozenset[Kind], folder: Path, *, seed: int = 1, size: int = 3 * MIB + 17) -> list[Outgoing]:
    """Some objects that a store of these kinds takes together: packs, or an image's blobs and then its manifest."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(seed)  # noqa: S311 - test data
    if Kind.MANIFEST not in kinds:
        return [outgoing(folder, Kind.PACK, draw.randbytes(one)) for one in (size, 5, MIB)]
    blobs = [outgoing(folder, Kind.BLOB, draw.randbytes(one)) for one in (40, size, 1)]
    entries = [{"mediaType": "application/octet-stream", "digest": str(b.item.digest), "size": b.bytes} for b in blobs]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": entries[0],
        "layers": entries[1:],
    }
    return [*blobs, outgoing(folder, Kind.MANIFEST, json.dumps(manifest).encode())]


def _all(source: Source, one: Outgoing) -> bytes:
    return b"".join(bytes(piece) for piece in source.read(one.item, 0, one.bytes))


class SourceContract:
    """Reading: list, stat, read."""

    @pytest.fixture
    def ground(self) -> Ground:
        """Provided by the subclass."""
        raise NotImplementedError

    def test_an_empty_store_has_nothing(self, ground: Ground) -> None:
        assert list(ground.store.list()) == []
        for kind in Kind:
            assert ground.store.stat(Item(kind, Digest.of(b"absent"))) is None

    def test_reading_what_is_not_there_is_named(self, ground: Ground, tmp_path: Path) -> None:
        source = ground.put(objects_for(ground.store.kinds, tmp_path / "files"))
        kind = min(source.kinds)
        with pytest.raises(RemoteError) as caught:
            list(source.read(Item(kind, Digest.of(b"absent")), 0, 4))
        assert caught.value.reason == "not_found"

    def test_what_was_put_is_listed_once_with_its_size(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        source = ground.put(objects)
        listed = [(one.item, one.bytes) for one in source.list()]
        assert sorted(listed) == sorted((one.item, one.bytes) for one in objects)
        for one in objects:
            found = source.stat(one.item)
            assert found is not None
            assert (found.item, found.bytes) == (one.item, one.bytes)

    def test_bytes_come_back_whole_and_in_small_pieces(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        source = ground.put(objects)
        for one in objects:
            state, total = hashlib.sha256(), 0
            for piece in source.read(one.item, 0, one.bytes):
                assert 0 < len(piece) <= PIECE_BYTES
                state.update(piece)
                total += len(piece)
            assert (Digest.from_hash(state), total) == (one.item.digest, one.bytes)

    @pytest.mark.parametrize(("offset", "size"), [(0, 1), (1, 2), (MIB - 1, MIB + 2), (3 * MIB, 17), (7, 0)])
    def test_a_range_is_exactly_those_bytes(self, ground: Ground, tmp_path: Path, offset: int, size: int) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        source = ground.put(objects)
        one = max(objects, key=lambda one: one.bytes)
        found = b"".join(bytes(piece) for piece in source.read(one.item, offset, size))
        assert found == one.path.read_bytes()[offset : offset + size]

    def test_a_range_past_the_end_is_refused(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        source = ground.put(objects)
        one = max(objects, key=lambda one: one.bytes)
        for offset in (one.bytes - 1, one.bytes + 10):
            with pytest.raises(RemoteError) as caught:
                list(source.read(one.item, offset, 5))
            assert caught.value.reason in ("wrong_length", "truncated")

    def test_many_threads_read_at_once(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        source = ground.put(objects)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda one: _all(source, one), objects * 3))
        assert found == [one.path.read_bytes() for one in objects * 3]

    def test_an_object_is_pulled_and_proved(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        source = ground.put(objects)
        for one in objects:
            with pulled(source, one.item, one.bytes, tmp_path) as staged:
                assert staged.path.read_bytes() == one.path.read_bytes()
            assert not staged.path.exists()

    def test_its_name_is_short_text_for_people(self, ground: Ground) -> None:
        assert 0 < len(ground.store.name) < 500
        assert ground.store.name.isprintable()


class SinkContract(SourceContract):
    """Writing as well."""

    def test_writing_says_what_was_sent_and_again_moves_nothing(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        first = ground.store.write(objects)
        assert first.sent == tuple(one.item for one in objects)
        assert first.sent_bytes == sum(one.bytes for one in objects)
        before = ground.moved_bytes()
        again = ground.store.write(objects)
        assert (again.sent, again.sent_bytes, again.revision) == ((), 0, first.revision)
        assert sorted(again.present) == sorted(first.sent)
        if before is not None:
            assert ground.moved_bytes() - before < 4096  # type: ignore[operator] # questions have bodies too

    def test_one_object_named_twice_is_sent_once(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        written = ground.store.write([*objects, *objects])
        assert sorted(set(written.sent)) == sorted(one.item for one in objects)
        assert written.sent_bytes == sum(one.bytes for one in objects)

    def test_progress_ends_at_the_whole(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        for _ in range(2):
            told: list[int] = []
            ground.store.write(objects, progress=told.append)
            assert sum(told) == sum(one.bytes for one in objects)

    def test_a_file_that_is_not_its_item_is_refused_and_not_there(self, ground: Ground, tmp_path: Path) -> None:
        good = max(objects_for(ground.store.kinds, tmp_path / "files"), key=lambda one: one.bytes)
        data = bytearray(good.path.read_bytes())
        data[len(data) // 2] ^= 1
        good.path.write_bytes(data)
        with pytest.raises(PayloadRejected) as caught:
            ground.store.write([good])
        assert caught.value.reason == "digest_mismatch"
        assert ground.store.stat(good.item) is None
        good.path.write_bytes(data[:-1])
        with pytest.raises(PayloadRejected) as caught:
            ground.store.write([good])
        assert caught.value.reason == "size_mismatch"
        assert ground.store.stat(good.item) is None

    def test_a_cancelled_write_leaves_nothing_in_part(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(OperationInterrupted):
            ground.store.write(objects, cancel=cancel)
        for one in objects:
            found = ground.store.stat(one.item)
            assert found is None or found.bytes == one.bytes
        ground.store.write(objects)
        assert sum(one.bytes for one in ground.put(objects).list()) == sum(one.bytes for one in objects)

    def test_two_writers_of_the_same_objects_agree(self, ground: Ground, tmp_path: Path) -> None:
        objects = objects_for(ground.store.kinds, tmp_path / "files")
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _: ground.store.write(objects), range(2)))
        source = ground.put(objects)
        assert [_all(source, one) for one in objects] == [one.path.read_bytes() for one in objects]
