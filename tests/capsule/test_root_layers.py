"""Layers of an image onto a folder: what each kind of member becomes, what whiteouts take away, what is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.capsule.layout import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE
from coldsnap.capsule.rootimage import RootLayer, parse_root_manifest, unpack_root
from coldsnap.capsule.rootlayers import unpack_layer
from coldsnap.core.digest import Digest
from coldsnap.errors import HostError, InvalidDocument, PayloadRejected, ResourceBusy


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mtime, info.mode = kind, len(data), 1_700_000_000, 0o644
    info.uid, info.gid = os.getuid(), os.getgid()
    for field, value in more.items():
        setattr(info, field, value)
    return info, data


def layer(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def applied(root: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(fileobj=io.BytesIO(layer(*members)), mode="r|") as archive:
        unpack_layer(archive, str(root))


def folder(name: str, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.DIRTYPE, mode=0o755, **more)


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text() if path.is_file() and not path.is_symlink() else "-"
        for path in sorted(root.rglob("*"))
        if not path.is_dir() or path.is_symlink()
    }


def test_each_kind_of_member(tmp_path: Path) -> None:
    applied(
        tmp_path,
        folder("./"),
        folder("etc"),
        member("etc/passwd", data=b"root"),
        member("bin/tool", data=b"#!", mode=0o4755),
        member("etc/link", tarfile.SYMTYPE, linkname="/nowhere"),
        member("etc/hard", tarfile.LNKTYPE, linkname="etc/passwd"),
        member("dev/null", tarfile.CHRTYPE),
        member("dev/disk", tarfile.BLKTYPE),
        member("run/pipe", tarfile.FIFOTYPE),
    )
    assert (tmp_path / "etc/passwd").read_text() == "root"
    assert stat.S_IMODE((tmp_path / "bin/tool").stat().st_mode) == 0o4755
    assert str((tmp_path / "etc/link").readlink()) == "/nowhere"
    assert (tmp_path / "etc/hard").stat().st_ino == (tmp_path / "etc/passwd").stat().st_ino
    assert not (tmp_path / "dev/null").exists(), "a unit has its host's devices"
    assert not (tmp_path / "dev/disk").exists()
    assert stat.S_ISFIFO((tmp_path / "run/pipe").stat().st_mode)
    assert (tmp_path / "etc").stat().st_mtime == (tmp_path / "etc/passwd").stat().st_mtime == 1_700_000_000


def test_an_upper_layer_replaces_and_hides(tmp_path: Path) -> None:
    applied(tmp_path, member("a/one", data=b"1"), member("a/two", data=b"2"), member("b/three", data=b"3"))
    applied(tmp_path, member("a/.wh.one"), member("a/two", data=b"22"), member("b", data=b"now a file"))
    assert tree(tmp_path) == {"a/two": "22", "b": "now a file"}


def test_an_opaque_folder_keeps_only_what_its_own_layer_brings(tmp_path: Path) -> None:
    applied(tmp_path, member("a/old", data=b"1"), member("a/sub/old", data=b"1"), member("b", data=b"1"))
    applied(tmp_path, member("a/new", data=b"2"), member("a/.wh..wh..opq"), member("a/sub/new", data=b"2"))
    assert tree(tmp_path) == {"a/new": "2", "a/sub/new": "2", "b": "1"}


def test_hiding_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    applied(tmp_path, member("a/.wh.one"), member("c/.wh..wh..opq"))
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/../out"])
def test_a_name_that_climbs_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(ValueError, match="leads out"):
        applied(tmp_path / "root", member(name, data=b"x"))
    assert not (tmp_path / "out").exists()


def test_a_hard_link_that_climbs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leads out"):
        applied(tmp_path, member("a", tarfile.LNKTYPE, linkname="../../etc/passwd"))


# -- whole images, in the program whose root is the folder ------------------------------------------------


def plain(data: bytes) -> bytes:
    return data


def frames(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data[:1000]) + zstandard.ZstdCompressor().compress(data[1000:])


def members(data: bytes) -> bytes:
    return gzip.compress(data[:1000]) + gzip.compress(data[1000:])


def unpacked(tmp_path: Path, *packed: tuple[str, bytes]) -> Path:
    layers = []
    for number, (suffix, data) in enumerate(packed):
        (tmp_path / f"l{number}").write_bytes(data)
        layers.append(RootLayer(digest=Digest.of(data), bytes=len(data), media_type=f"{LAYER_TYPE}{suffix}"))
    names = {one.digest: tmp_path / f"l{number}" for number, one in enumerate(layers)}
    unpack_root(tmp_path / "root", tuple(layers), lambda one: names[one.digest].open("rb"))
    return tmp_path / "root"


@pytest.mark.criu
@pytest.mark.parametrize(("suffix", "pack"), [("", plain), ("+gzip", members), ("+zstd", frames)])
def test_layers_packed_in_every_way(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    first = layer(member("a/one", data=b"x" * 100_000), member("link", tarfile.SYMTYPE, linkname="/a"))
    second = layer(member("a/.wh.one"), member("link/two", data=b"2"))
    root = unpacked(tmp_path, (suffix, pack(first)), (suffix, pack(second)))
    assert (root / "a/two").read_text() == "2", "links are followed inside the image, never outside"
    assert not (root / "a/one").exists()
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    with pytest.raises(ResourceBusy):
        unpacked(tmp_path, (suffix, pack(first)))


@pytest.mark.criu
@pytest.mark.parametrize("data", [b"no tar" * 1000, gzip.compress(layer(member("../../x", data=b"1"))), b""])
def test_what_is_no_layer_leaves_nothing(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(HostError, match="cannot be unpacked"):
        unpacked(tmp_path, ("+gzip" if data[:2] == b"\x1f\x8b" or data else "", data))
    assert [path.name for path in tmp_path.iterdir()] == ["l0"]
    assert not Path("/x").exists()


# -- manifests ----------------------------------------------------------------------------------------


def manifest(**changes: Any) -> bytes:
    entry = {"mediaType": f"{LAYER_TYPE}+gzip", "digest": str(Digest.of(b"l")), "size": 1}
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {**entry, "mediaType": CONFIG_TYPE},
        "layers": [entry],
        **changes,
    }
    return json.dumps(document).encode()


def test_a_manifest_gives_its_layers() -> None:
    data = manifest()
    (found,) = parse_root_manifest(data, Digest.of(data)).layers
    assert (found.digest, found.bytes, found.media_type) == (Digest.of(b"l"), 1, f"{LAYER_TYPE}+gzip")


@pytest.mark.parametrize(
    "changes",
    [
        {"mediaType": "application/vnd.oci.image.index.v1+json", "layers": None, "manifests": []},
        {"mediaType": "application/vnd.docker.distribution.manifest.v2+json"},
        {"layers": []},
        {"layers": [{"mediaType": "application/octet-stream", "digest": str(Digest.of(b"")), "size": 1}]},
        {"layers": [{"mediaType": LAYER_TYPE, "digest": "sha256:0", "size": 1}]},
        {"layers": [{"mediaType": LAYER_TYPE, "digest": str(Digest.of(b"")), "size": -1}]},
        {"layers": [{"mediaType": LAYER_TYPE, "digest": str(Digest.of(b"")), "size": True}]},
        {"layers": 3},
    ],
)
def test_what_is_no_image_is_refused(changes: dict[str, Any]) -> None:
    data = manifest(**changes)
    with pytest.raises(InvalidDocument) as caught:
        parse_root_manifest(data, Digest.of(data))
    assert all(problem.cure for problem in caught.value.problems)


def test_other_bytes_are_refused() -> None:
    with pytest.raises(PayloadRejected):
        parse_root_manifest(manifest(), Digest.of(b"other"))


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(InvalidDocument):
        parse_root_manifest(data, Digest.of(data))
