"""One file out of a capsule: exactly its bytes, or a refusal; and nothing else is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldsnap.capsule.frames import CHUNK_BYTES
from coldsnap.capsule.image import CapsuleFile, open_capsule, write_capsule
from coldsnap.capsule.index import Layer
from coldsnap.capsule.layout import blob_path
from coldsnap.capsule.member import FilePlace, find_member, find_members, read_member
from coldsnap.core.digest import Digest
from coldsnap.errors import PayloadRejected, UsageError

LIMIT = 1 << 30
CONTENTS = {
    "process/core-1.img": ("process-image", b"core" * 1000),
    "process/empty.img": ("process-image", b""),
    "process/pages-1.img": ("process-image", os.urandom(4096) * (CHUNK_BYTES // 4096) + b"a second chunk"),
    "workers/w0/manifest.json": ("recovery-manifest", b'{"a":1}\n'),
    "workers/w0/native-manifest.json": ("native-manifest", b"x" * 1025),
    "workers/w0/weights.blob": ("residual", bytes(4096)),
    "cache/kernels.bin": ("cache-seed", b"compiled"),
}


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Digest]:
    folder = tmp_path_factory.mktemp("capsule")
    files = []
    for number, (path, (role, data)) in enumerate(CONTENTS.items()):
        source = folder / f"{number}.src"
        source.write_bytes(data)
        files.append(CapsuleFile(role=role, owner="unit/u0", path=path, source=source))
    made = write_capsule(folder / "layout", unit="u0", files=files, annotations={})
    return folder / "layout", made.digest


def places(layout: tuple[Path, Digest]) -> dict[str, FilePlace]:
    return find_members(layout[0], open_capsule(*layout))


@pytest.mark.parametrize("path", CONTENTS)
def test_every_file_comes_out_as_it_went_in(layout: tuple[Path, Digest], path: str) -> None:
    place = find_member(layout[0], open_capsule(*layout), path)
    assert read_member(place, limit_bytes=LIMIT) == CONTENTS[path][1]


def test_all_files_are_found(layout: tuple[Path, Digest]) -> None:
    assert set(places(layout)) == set(CONTENTS)


def test_a_file_that_is_not_there(layout: tuple[Path, Digest]) -> None:
    with pytest.raises(UsageError, match=r"has no file 'workers/w1/manifest\.json'"):
        find_member(layout[0], open_capsule(*layout), "workers/w1/manifest.json")


def test_a_file_larger_than_it_may_be_is_not_read(layout: tuple[Path, Digest]) -> None:
    place = places(layout)["workers/w0/native-manifest.json"]
    with pytest.raises(PayloadRejected, match="1025 bytes, more than the 1024") as caught:
        read_member(place, limit_bytes=1024)
    assert caught.value.reason == "size_mismatch"


@pytest.mark.parametrize("path", [path for path, (_, data) in CONTENTS.items() if data])
def test_a_flipped_bit_is_noticed(layout: tuple[Path, Digest], tmp_path: Path, path: str) -> None:
    place = places(layout)[path]
    blob = bytearray(place.path.read_bytes())
    offset, stored, _ = place.pieces[-1]
    blob[offset + stored // 2] ^= 4
    damaged = tmp_path / "blob"
    damaged.write_bytes(blob)
    moved = FilePlace(
        path=damaged, name=path, pieces=place.pieces, zstd=place.zstd, bytes=place.bytes, sha256=place.sha256
    )
    with pytest.raises(PayloadRejected) as caught:
        read_member(moved, limit_bytes=LIMIT)
    assert caught.value.reason == "digest_mismatch"
    assert path in caught.value.message
    assert caught.value.cure


def test_damage_elsewhere_in_the_layer_does_not_matter(layout: tuple[Path, Digest], tmp_path: Path) -> None:
    found = places(layout)
    manifest, other = found["workers/w0/manifest.json"], found["workers/w0/native-manifest.json"]
    assert manifest.path == other.path == blob_path(layout[0], open_capsule(*layout).layers[Layer.PAYLOAD][0])
    blob = bytearray(other.path.read_bytes())
    blob[other.pieces[0][0]] ^= 1
    damaged = tmp_path / "blob"
    damaged.write_bytes(blob)
    for place, whole in ((manifest, True), (other, False)):
        moved = FilePlace(
            path=damaged, name=place.name, pieces=place.pieces, zstd=False, bytes=place.bytes, sha256=place.sha256
        )
        if whole:
            assert read_member(moved, limit_bytes=LIMIT) == CONTENTS[place.name][1]
        else:
            with pytest.raises(PayloadRejected, match="has digest"):
                read_member(moved, limit_bytes=LIMIT)


@pytest.mark.parametrize("kind", ["missing", "link", "folder", "short"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "link":
        (tmp_path / "real").write_bytes(b"data")
        path.symlink_to(tmp_path / "real")
    elif kind == "folder":
        path.mkdir()
    elif kind == "short":
        path.write_bytes(b"dat")
    place = FilePlace.plain(path, name="a.json", size=4, sha256=Digest.of(b"data"))
    with pytest.raises(PayloadRejected, match=r"'a\.json'") as caught:
        read_member(place, limit_bytes=LIMIT)
    assert caught.value.reason == ("size_mismatch" if kind == "short" else "unusable_path")
