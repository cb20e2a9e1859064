"""The capsule's bytes, held to docs/format.md by a second writer made of the standard library, and to a golden one."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.image import CACHE_SEED, PROCESS_IMAGE, CapsuleFile, read_capsule, unpack_capsule, write_capsule
from coldsnap.capsule.tarlayer import member_header
from coldsnap.core.digest import Digest
from coldsnap.errors import OutOfSpace

GOLDEN = Path(__file__).parent / "data" / "tiny-capsule"
GOLDEN_DIGEST = Digest.parse("sha256:44aeed01bc5e4b269125db5f2c01ab5bd0cbff3d0df4037f3cb98cf56c3d65cf")
GOLDEN_CONTENTS = {
    "cache/kernel.py": b"print(1)\n",
    "process/inventory.img": b"an inventory\n",
    "process/pages-1.img": b"page" * 1024,
    "workers/w0/native-manifest.json": b'{"entries":[]}\n',
    "workers/w0/weights.blob": bytes(range(256)),
}

PLAIN = {
    "acceptance.json": ("acceptance", "unit/u0", b'{"answers":[]}\n'),
    "cache/a.py": (CACHE_SEED, "unit/u0", b"a = 1\n"),
    "cache/empty": (CACHE_SEED, "unit/u0", b""),
    "workers/w0/native-manifest.json": ("native-manifest", "worker/w0", b"{}\n" * 400),
}
MTIME_S = 1_700_000_000


def canonical(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def tar(members: list[tuple[str, bytes, int]]) -> bytes:
    out = b""
    for name, data, mtime in members:
        info = tarfile.TarInfo(f"coldsnap/{name}")
        info.mode, info.size, info.mtime = 0o600, len(data), mtime
        out += info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)
    return out + bytes(1024)


def by_the_book() -> dict[str, bytes]:
    """The layout of PLAIN as docs/format.md says it, without a line of coldsnap: relative path -> bytes."""
    blobs: dict[str, bytes] = {}

    def put(data: bytes) -> dict[str, Any]:
        name = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{name}"] = data
        return {"digest": f"sha256:{name}", "size": len(data)}

    index = canonical(
        {
            "chunk_bytes": 8388608,
            "files": [
                {
                    "bytes": len(data),
                    "encoding": "plain",
                    "layer": "cache" if role == CACHE_SEED else "payload",
                    "mtime_ns": MTIME_S * 10**9 if role == CACHE_SEED else 0,
                    "owner": owner,
                    "path": path,
                    "role": role,
                    "sha256": f"sha256:{hashlib.sha256(data).hexdigest()}",
                    "stored_bytes": [len(data)],
                }
                for path, (role, owner, data) in sorted(PLAIN.items())
            ],
            "format": 1,
            "kind": "coldsnap-capsule-index",
            "unit": "u0",
        }
    )
    payload = [(path, data, 0) for path, (role, _, data) in sorted(PLAIN.items()) if role != CACHE_SEED]
    cache = [(path, data, MTIME_S) for path, (role, _, data) in sorted(PLAIN.items()) if role == CACHE_SEED]
    layers = {"index": put(tar([("index.json", index, 0)])), "payload": put(tar(payload)), "cache": put(tar(cache))}
    labels = {
        "io.coldsnap.index.bytes": str(len(index)),
        "io.coldsnap.index.digest": f"sha256:{hashlib.sha256(index).hexdigest()}",
        "io.coldsnap.unit": "u0",
    }
    config = canonical(
        {
            "architecture": "arm64",
            "os": "linux",
            "config": {"Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers.values()]},
            "history": [{"created_by": f"coldsnap: {name}"} for name in layers],
        }
    )
    manifest = put(
        canonical(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **put(config)},
                "layers": [
                    {
                        "mediaType": "application/vnd.oci.image.layer.v1.tar",
                        **layer,
                        "annotations": {"io.coldsnap.layer": name},
                    }
                    for name, layer in layers.items()
                ],
                "annotations": {"org.example.note": "by the book", **labels},
            }
        )
    )
    head = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        **manifest,
        "annotations": {"org.opencontainers.image.ref.name": "u0"},
        "platform": {"architecture": "arm64", "os": "linux"},
    }
    layout = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [head]}
    return {**blobs, "oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": canonical(layout)}


def plain_files(folder: Path) -> list[CapsuleFile]:
    files = []
    for number, (path, (role, owner, data)) in enumerate(PLAIN.items()):
        source = folder / f"source{number}"
        source.write_bytes(data)
        os.utime(source, ns=(0, MTIME_S * 10**9))
        files.append(CapsuleFile(role=role, owner=owner, path=path, source=source))
    return files


def test_a_plain_capsule_is_what_the_book_says(tmp_path: Path) -> None:
    files = plain_files(tmp_path)
    layout = tmp_path / "layout"
    image = write_capsule(
        layout, unit="u0", files=files, annotations={"org.example.note": "by the book"}, machine="aarch64"
    )
    expected = by_the_book()
    found = {str(path.relative_to(layout)): path.read_bytes() for path in layout.rglob("*") if path.is_file()}
    assert found == expected
    assert f"blobs/sha256/{image.digest.hex}" in expected


@pytest.mark.parametrize("name", ["a", "a" * 100, "d" * 90 + "/" + "e" * 100])
def test_short_names_have_the_header_any_tar_writes(name: str) -> None:
    info = tarfile.TarInfo(name)
    info.mode, info.size, info.mtime = 0o600, 1234567, 89
    assert member_header(name, 1234567, mtime_ns=89 * 10**9) == info.tobuf(tarfile.USTAR_FORMAT)


def test_the_golden_capsule_reads_for_ever(tmp_path: Path) -> None:
    index = read_capsule(GOLDEN, GOLDEN_DIGEST)
    assert {file.path: (file.bytes, file.sha256) for file in index.files} == {
        path: (len(data), Digest.of(data)) for path, data in GOLDEN_CONTENTS.items()
    }
    dest = unpack_capsule(GOLDEN, GOLDEN_DIGEST, tmp_path / "dest", expected=None)
    assert {str(path.relative_to(dest)): path.read_bytes() for path in dest.rglob("*") if path.is_file()} == (
        GOLDEN_CONTENTS
    )
    assert (dest / "cache/kernel.py").stat().st_mtime_ns == 1_700_000_000_500_000_000


def test_a_disk_that_fills_up_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = plain_files(tmp_path)
    process = CapsuleFile(role=PROCESS_IMAGE, owner="unit/u0", path="process/x.img", source=files[0].source)
    before = sorted(path.name for path in tmp_path.iterdir())
    real, left = os.fsync, [0]

    for allowed in range(9):  # the disk fills up after so many syncs, wherever that is
        left[0] = allowed

        def full(fd: int) -> None:
            if left[0] == 0:
                raise OSError(28, "No space left on device")
            left[0] -= 1
            real(fd)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OutOfSpace):
            write_capsule(tmp_path / "layout", unit="u0", files=[*files, process], annotations={})
        monkeypatch.setattr(os, "fsync", real)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    write_capsule(tmp_path / "layout", unit="u0", files=[*files, process], annotations={})


def test_the_index_is_the_first_member_any_tar_shows() -> None:
    manifest = json.loads((GOLDEN / "blobs/sha256" / GOLDEN_DIGEST.hex).read_bytes())
    blob = GOLDEN / "blobs/sha256" / manifest["layers"][0]["digest"].removeprefix("sha256:")
    with tarfile.open(fileobj=io.BytesIO(blob.read_bytes())) as layer:
        assert layer.getnames() == ["coldsnap/index.json"]
