"""One worker's files, end to end: memory, pack, residual and manifest as docs/format.md lays them out.

The files in ``data`` were made by a script that shares no line with this project. One allocation of five pages,
filled with 0xee where no tensor is:

    0x0000 embed (4352)   0x1200 norm (8)   0x2000 copy (8)   0x3000 bias (4096)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap.core.extents import Allocation, residual_ranges
from coldsnap.core.manifest import Blob, NativeManifest, native_manifest_bytes, parse_native_manifest
from coldsnap.errors import InvalidDocument
from coldsnap.store.pack import PackSource, write_pack
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.residual import write_residual

DATA = Path(__file__).parent / "data"
MakeSource = Callable[[int, bytes, str], PackSource]
BASE = 0x5000_0000_0000
TENSORS = {
    "embed": (0x0000, bytes(range(256)) * 17),
    "norm": (0x1200, b"coldsnap"),
    "copy": (0x2000, b"coldsnap"),
    "bias": (0x3000, b"\x01" * 4096),
}


def memory() -> bytes:
    made = bytearray(b"\xee" * 0x5000)
    for start, data in TENSORS.values():
        made[start : start + len(data)] = data
    return bytes(made)


def test_capture_makes_exactly_the_golden_files(store: PayloadStore, make_source: MakeSource, tmp_path: Path) -> None:
    allocation = Allocation(ptr=BASE, size=0x5000, tag="weights")
    whole = memory()
    pack = write_pack(store, [make_source(BASE + start, data, name) for name, (start, data) in TENSORS.items()])
    left = residual_ranges([allocation], [(BASE + start, len(data)) for start, data in TENSORS.values()])
    residual = write_residual(
        tmp_path / "weights.blob",
        [make_source(ptr, whole[ptr - BASE : ptr - BASE + size], "rest") for ptr, size, _ in left],
    )
    assert residual is not None
    manifest = NativeManifest(
        capture_id="tiny",
        worker="w0",
        rank=0,
        entries=(allocation,),
        model_weight_extents=tuple(one.in_allocation(BASE) for one in pack.extents),
        residual_extents=tuple(one.in_allocation(BASE) for one in residual.extents),
        model_weights=Blob(name="model-weights.pack", bytes=pack.bytes, sha256=pack.digest),
        residual=Blob(name="weights.blob", bytes=residual.bytes, sha256=residual.sha256),
    )
    assert pack.path.read_bytes() == (DATA / "tiny.pack").read_bytes()
    assert residual.path.read_bytes() == (DATA / "tiny-weights.blob").read_bytes()
    assert native_manifest_bytes(manifest) == (DATA / "tiny-native-manifest.json").read_bytes()


def test_the_golden_files_give_the_memory_back(store: PayloadStore) -> None:
    manifest = parse_native_manifest((DATA / "tiny-native-manifest.json").read_bytes())
    assert manifest.model_weights is not None
    digest, size_bytes = manifest.model_weights.sha256, manifest.model_weights.bytes
    shutil.copyfile(DATA / "tiny.pack", store.path(digest))
    store.path(digest).chmod(0o400)
    extents = [(one.offset, one.size, one.sha256) for one in manifest.model_weight_extents]
    blob = (DATA / "tiny-weights.blob").read_bytes()
    back = bytearray(0x5000)
    with store.admit(digest, size_bytes, extents=extents) as admitted, open(admitted.fd, "rb", closefd=False) as file:
        packed = file.read()
    for one in manifest.model_weight_extents:
        back[one.ptr - BASE : one.ptr - BASE + one.size] = packed[one.offset : one.offset + one.size]
    for rest in manifest.residual_extents:
        back[rest.ptr - BASE : rest.ptr - BASE + rest.size] = blob[rest.offset : rest.offset + rest.size]
    assert bytes(back) == memory()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gap", {("entries[0]", "4096 bytes belong to no extent", "0x500000004000..0x500000005000")}),
        (
            "overlap",
            {
                ("model_weight_extents[0]", "overlaps residual_extents[2]", "0x500000002ff0..0x500000003000"),
                ("entries[0]", "16 bytes belong to no extent", "0x500000003ff0..0x500000004000"),
            },
        ),
        ("doubled", {("rank", "stands more than once in its object", '"rank"')}),
        ("trailing", {("(document)", "more text after the document at line 2, column 1", '"{}\\n"')}),
    ],
)
def test_damaged_manifests_are_refused_with_the_place(name: str, wanted: set[tuple[str, str, str]]) -> None:
    with pytest.raises(InvalidDocument) as caught:
        parse_native_manifest((DATA / f"{name}-native-manifest.json").read_bytes())
    assert {(one.field, one.message, one.value) for one in caught.value.problems} == wanted
