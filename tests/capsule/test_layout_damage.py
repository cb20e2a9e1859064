"""Every byte of a capsule is proved on the way out, and nothing hostile has a way in."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.capsule.frames import BadFrame, compress_chunk, decompress_chunk, max_frame_bytes
from coldsnap.capsule.image import CACHE_SEED, PROCESS_IMAGE, CapsuleFile, read_capsule, unpack_capsule, write_capsule
from coldsnap.capsule.index import CapsuleIndex, IndexedFile, chunk_sizes, path_fault
from coldsnap.capsule.opened import index_layer
from coldsnap.capsule.tarlayer import END_OF_LAYER, member_header, padding
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.owners import Owner
from coldsnap.core.parsing import parse_document
from coldsnap.errors import ColdsnapError, InvalidDocument, OutOfSpace, PayloadRejected, Refused, ResourceBusy

CONTENTS = {
    ("process/a.img", PROCESS_IMAGE): b"a process image " * 100,
    ("process/b.img", PROCESS_IMAGE): b"another",
    ("notes.json", "notes"): b'{"note":1}',
    ("cache/seed.py", CACHE_SEED): b"print(1)\n",
}
Tree = dict[str, Any]


class Made(NamedTuple):
    """A capsule as its blobs by hex, ready to be taken apart."""

    digest: Digest
    blobs: dict[str, bytes]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    files = []
    for number, ((path, role), data) in enumerate(CONTENTS.items()):
        (folder / str(number)).write_bytes(data)
        os.utime(folder / str(number), ns=(10**18, 10**18))
        files.append(CapsuleFile(role=role, owner=Owner.unit("u0"), path=path, source=folder / str(number)))
    image = write_capsule(folder / "layout", unit="u0", files=files, annotations={}, machine="x86_64")
    blobs = {path.name: path.read_bytes() for path in (folder / "layout/blobs/sha256").iterdir()}
    return Made(image.digest, blobs)


def place(layout: Path, blobs: dict[str, bytes]) -> Path:
    (layout / "blobs/sha256").mkdir(parents=True)
    for name, data in blobs.items():
        (layout / "blobs/sha256" / name).write_bytes(data)
    return layout


def manifest_of(made: Made) -> Tree:
    tree: Tree = json.loads(made.blobs[made.digest.hex])
    return tree


def layer_hex(made: Made, name: str) -> str:
    for layer in manifest_of(made)["layers"]:
        if layer["annotations"]["io.coldsnap.layer"] == name:
            return str(layer["digest"]).removeprefix("sha256:")
    raise AssertionError(name)


def index_of(made: Made) -> Tree:
    layer = made.blobs[layer_hex(made, "index")]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        member = tar.extractfile("coldsnap/index.json")
        assert member is not None
        tree: Tree = json.loads(member.read())
    return tree


def forge(
    made: Made,
    *,
    index: Callable[[Tree], None] = lambda tree: None,
    layers: dict[str, bytes] | None = None,
    config: Callable[[Tree], None] = lambda tree: None,
    manifest: Callable[[Tree], None] = lambda tree: None,
    index_bytes: bytes | None = None,
) -> Made:
    """A capsule changed by someone who recomputes every digest: all links hold, the content is theirs."""
    blobs: dict[str, bytes] = {}

    def put(data: bytes) -> str:
        blobs[Digest.of(data).hex] = data
        return str(Digest.of(data))

    head = manifest_of(made)
    tree = index_of(made)
    index(tree)
    data = canonical_json(tree) if index_bytes is None else index_bytes
    for layer in head["layers"]:
        name = layer["annotations"]["io.coldsnap.layer"]
        old = made.blobs[layer["digest"].removeprefix("sha256:")]
        new = index_layer(data) if name == "index" else (layers or {}).get(name, old)
        layer.update(digest=put(new), size=len(new))
    ours = {"io.coldsnap.index.digest": str(Digest.of(data)), "io.coldsnap.index.bytes": str(len(data))}
    head["annotations"].update(ours)
    settings_tree = json.loads(made.blobs[head["config"]["digest"].removeprefix("sha256:")])
    settings_tree["config"]["Labels"].update(ours)
    settings_tree["rootfs"]["diff_ids"] = [layer["digest"] for layer in head["layers"]]
    config(settings_tree)
    packed = canonical_json(settings_tree)
    head["config"].update(digest=put(packed), size=len(packed))
    manifest(head)
    return Made(Digest.parse(put(canonical_json(head))), blobs)


def unpack_error(made: Made, tmp_path: Path, **keywords: Any) -> ColdsnapError:
    layout = place(tmp_path / "layout", made.blobs)
    with pytest.raises(ColdsnapError) as caught:
        unpack_capsule(layout, made.digest, tmp_path / "dest", expected=None, **keywords)
    assert [path.name for path in tmp_path.iterdir()] == ["layout"]
    assert caught.value.cure or isinstance(caught.value, InvalidDocument)
    return caught.value


def test_a_forger_without_changes_is_accepted(made: Made, tmp_path: Path) -> None:
    # The forging itself is sound: what the tests below see refused is the change, not the forger's mistakes.
    again = forge(made)
    assert again.digest == made.digest
    layout = place(tmp_path / "layout", again.blobs)
    dest = unpack_capsule(layout, again.digest, tmp_path / "dest", expected=None)
    for (path, _), data in CONTENTS.items():
        assert (dest / path).read_bytes() == data


@pytest.mark.parametrize("blob", ["manifest", "config", "index", "process", "payload", "cache"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "empty", "missing", "link", "folder"])
def test_damage_to_any_blob_is_refused(blob: str, damage: str, made: Made, tmp_path: Path) -> None:
    if blob == "manifest":
        name = made.digest.hex
    elif blob == "config":
        name = manifest_of(made)["config"]["digest"].removeprefix("sha256:")
    else:
        name = layer_hex(made, blob)
    layout = place(tmp_path / "layout", made.blobs)
    path = layout / "blobs/sha256" / name
    data = made.blobs[name]
    if damage == "flip":
        path.write_bytes(data[:600] + bytes([data[600] ^ 1]) + data[601:])
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "extend":
        path.write_bytes(data + b"\0")
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if damage == "link":
            (tmp_path / "elsewhere").write_bytes(data)
            path.symlink_to(tmp_path / "elsewhere")
        elif damage == "folder":
            path.mkdir()
    with pytest.raises(PayloadRejected) as caught:
        unpack_capsule(layout, made.digest, tmp_path / "dest", expected=None)
    assert name in str(caught.value) or "process/" in str(caught.value)
    assert not (tmp_path / "dest").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


@pytest.mark.parametrize("layer", ["process", "payload", "cache"])
def test_every_single_bit_matters(layer: str, made: Made, tmp_path: Path) -> None:
    name = layer_hex(made, layer)
    data = made.blobs[name]
    layout = place(tmp_path / "layout", made.blobs)
    for at in range(0, len(data), 97):
        changed = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        (layout / "blobs/sha256" / name).write_bytes(changed)
        with pytest.raises(PayloadRejected):
            unpack_capsule(layout, made.digest, tmp_path / "dest", expected=None, num_threads=1)
        assert not (tmp_path / "dest").exists()


def hostile_layer(name: str, kind: bytes, size: int = 9, **fields: Any) -> bytes:
    """A tar with one member, made by another program than ours."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo(name)
        info.type = kind
        info.mode = 0o600
        info.mtime = 10**9
        for key, value in fields.items():
            setattr(info, key, value)
        if kind == tarfile.REGTYPE:
            info.size = size
            tar.addfile(info, io.BytesIO(b"print(1)\n"[:size].ljust(size, b"!")))
        else:
            tar.addfile(info)
    return packed.getvalue()[: len(packed.getvalue().rstrip(b"\0"))]


HOSTILE = {
    "dotdot": hostile_layer("coldsnap/../../../etc/cron.d/x", tarfile.REGTYPE),
    "absolute": hostile_layer("/etc/cron.d/x", tarfile.REGTYPE),
    "symlink": hostile_layer("coldsnap/cache/seed.py", tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hardlink": hostile_layer("coldsnap/cache/seed.py", tarfile.LNKTYPE, linkname="coldsnap/process/a.img"),
    "device": hostile_layer("coldsnap/cache/seed.py", tarfile.CHRTYPE, devmajor=1, devminor=1),
    "block device": hostile_layer("coldsnap/cache/seed.py", tarfile.BLKTYPE),
    "pipe": hostile_layer("coldsnap/cache/seed.py", tarfile.FIFOTYPE),
    "folder": hostile_layer("coldsnap/cache/seed.py", tarfile.DIRTYPE),
    "larger": hostile_layer("coldsnap/cache/seed.py", tarfile.REGTYPE, size=10),
    "smaller": hostile_layer("coldsnap/cache/seed.py", tarfile.REGTYPE, size=8),
    "setuid": hostile_layer("coldsnap/cache/seed.py", tarfile.REGTYPE, mode=0o4755),
    "other owner": hostile_layer("coldsnap/cache/seed.py", tarfile.REGTYPE, uid=1000),
    "other time": hostile_layer("coldsnap/cache/seed.py", tarfile.REGTYPE, mtime=5),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_member_is_refused_even_when_every_digest_is_right(kind: str, made: Made, tmp_path: Path) -> None:
    size = len(made.blobs[layer_hex(made, "cache")])
    assert len(HOSTILE[kind]) <= size
    forged = forge(made, layers={"cache": HOSTILE[kind].ljust(size, b"\0")})
    error = unpack_error(forged, tmp_path)
    assert isinstance(error, PayloadRejected)
    assert "coldsnap/cache/seed.py" in str(error)


@given(
    layer=st.sampled_from(["process", "payload", "cache"]),
    at=st.integers(0, 4000),
    length=st.integers(0, 600),
    patch=st.binary(max_size=600),
)
@settings(max_examples=60, deadline=None)
def test_any_splice_into_a_layer_is_refused_even_when_every_digest_is_right(
    made: Made, tmp_path_factory: pytest.TempPathFactory, layer: str, at: int, length: int, patch: bytes
) -> None:
    old = made.blobs[layer_hex(made, layer)]
    at = min(at, len(old))
    new = old[:at] + patch + old[at + length :]
    folder = tmp_path_factory.mktemp("splice")
    if new == old:
        return
    error = unpack_error(forge(made, layers={layer: new}), folder)
    assert isinstance(error, PayloadRejected | InvalidDocument)


def test_a_second_member_of_one_name_and_trailing_data_are_refused(made: Made, tmp_path: Path) -> None:
    good = made.blobs[layer_hex(made, "cache")]
    member = good[: -len(END_OF_LAYER)]
    for number, layer in enumerate([member + member + END_OF_LAYER, good + bytes(512), good + b"more", good[:-512]]):
        forged = forge(made, layers={"cache": layer})
        (tmp_path / str(number)).mkdir()
        error = unpack_error(forged, tmp_path / str(number))
        assert isinstance(error, InvalidDocument)
        assert [problem.field for problem in error.problems] == ["manifest.layers[3].size"]


def stored_bomb(made: Made, frame: bytes, path: str = "process/a.img") -> tuple[bytes, Callable[[Tree], None]]:
    """The process layer with the member of ``path`` replaced by ``frame``, and the change its index needs."""
    parts = []
    for file in index_of(made)["files"]:
        if file["layer"] == "process":
            data = frame if file["path"] == path else compress_chunk(CONTENTS[(file["path"], PROCESS_IMAGE)])
            parts.append(member_header(f"coldsnap/{file['path']}.zst", len(data)) + data + padding(len(data)))

    def change(tree: Tree) -> None:
        next(file for file in tree["files"] if file["path"] == path)["stored_bytes"] = [len(frame)]

    return b"".join(parts) + END_OF_LAYER, change


def test_frames_that_are_not_what_the_index_says_are_refused_without_the_memory(made: Made, tmp_path: Path) -> None:
    real = CONTENTS[("process/a.img", PROCESS_IMAGE)]
    frame = compress_chunk(real)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(real)
    frames = {
        "bomb": zstandard.ZstdCompressor(level=1).compress(bytes(1 << 24)),
        "unsized": unsized,
        "shorter": compress_chunk(real[:-1]),
        "trailing": frame + b"\0",
        "two frames": frame + compress_chunk(b""),
        "cut": frame[:-1],
        "other content": compress_chunk(real[:-1] + b"?"),
        "no frame": b"not zstd at all",
    }
    for name, bad in frames.items():
        layer, change = stored_bomb(made, bad[: max_frame_bytes(len(real))])
        (tmp_path / name).mkdir()
        error = unpack_error(forge(made, index=change, layers={"process": layer}), tmp_path / name)
        assert isinstance(error, PayloadRejected)
        assert "process/a.img" in str(error)


def first(tree: Tree) -> Tree:
    file: Tree = next(file for file in tree["files"] if file["path"] == "process/a.img")
    return file


INDEX_CHANGES: dict[str, tuple[Callable[[Tree], Any], str]] = {
    "path up": (lambda tree: first(tree).update(path="process/../../a"), ".path"),
    "absolute": (lambda tree: first(tree).update(path="/etc/x"), ".path"),
    "twice": (lambda tree: tree["files"].append(tree["files"][-1]), ".path"),
    "unsorted": (lambda tree: tree["files"].reverse(), ".path"),
    "own name": (lambda tree: first(tree).update(path="prepared.json"), ".path"),
    "own record": (lambda tree: first(tree).update(path="process/a.img.coldsnap-validation.json"), ".path"),
    "one too few": (lambda tree: first(tree).update(stored_bytes=[]), ".stored_bytes"),
    "huge": (lambda tree: first(tree).update(bytes=1 << 47), ".stored_bytes"),
    "beyond": (lambda tree: first(tree).update(bytes=1 << 60), ".bytes"),
    "negative": (lambda tree: first(tree).update(bytes=-1), ".bytes"),
    "stored too large": (lambda tree: first(tree).update(stored_bytes=[1 << 40]), ".stored_bytes[0]"),
    "nothing stored": (lambda tree: first(tree).update(stored_bytes=[0]), ".stored_bytes[0]"),
    "mtime": (lambda tree: first(tree).update(mtime_ns=5), ".mtime_ns"),
    "layer": (lambda tree: first(tree).update(layer="root"), ".layer"),
    "digest": (lambda tree: first(tree).update(sha256="00"), ".sha256"),
    "extra": (lambda tree: first(tree).update(mode=0o4755), ".mode"),
    "chunk": (lambda tree: tree.update(chunk_bytes=1), "chunk_bytes"),
    "format": (lambda tree: tree.update(format=2), "format"),
    "kind": (lambda tree: tree.update(kind="other"), "kind"),
    "unit": (lambda tree: tree.update(unit="u1"), "manifest.annotations"),
    "fewer files": (lambda tree: tree["files"].pop(), "manifest.layers[1].size"),
}


@pytest.mark.parametrize("kind", INDEX_CHANGES)
def test_an_index_that_breaks_a_rule_is_refused_by_field(kind: str, made: Made, tmp_path: Path) -> None:
    change, field = INDEX_CHANGES[kind]
    error = unpack_error(forge(made, index=change), tmp_path)
    assert isinstance(error, InvalidDocument)
    assert any(problem.field.endswith(field) for problem in error.problems), error


def test_another_content_under_the_same_digest_in_the_index_is_refused(made: Made, tmp_path: Path) -> None:
    def change(tree: Tree) -> None:
        first(tree)["sha256"] = str(Digest.of(b"something else"))

    error = unpack_error(forge(made, index=change), tmp_path)
    assert isinstance(error, PayloadRejected)
    assert error.reason == "digest_mismatch"
    assert "process/a.img" in str(error)


def test_config_and_manifest_must_agree_with_the_index(made: Made, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"config": lambda tree: tree["rootfs"].update(diff_ids=[])},
        {"config": lambda tree: tree["config"].update(Env={"A": "b"})},
        {"config": lambda tree: tree["config"]["Labels"].update(more="x")},
        {"config": lambda tree: tree.update(os="windows")},
        {"manifest": lambda tree: tree.update(mediaType="application/vnd.docker.distribution.manifest.v2+json")},
        {"manifest": lambda tree: tree["layers"].pop()},
        {"manifest": lambda tree: tree["layers"].append(tree["layers"][1])},
        {"manifest": lambda tree: tree["layers"][1].update(mediaType="application/vnd.oci.image.layer.v1.tar+gzip")},
        {"manifest": lambda tree: tree["layers"][2]["annotations"].update({"io.coldsnap.layer": "process"})},
        {"manifest": lambda tree: tree["annotations"].update({"io.coldsnap.index.bytes": "\u0661\u0662"})},
        {"manifest": lambda tree: tree["annotations"].pop("io.coldsnap.index.digest")},
        {"manifest": lambda tree: tree.update(subject={})},
        {"index_bytes": b"[]"},
        {"index_bytes": b""},
    ]
    for number, change in enumerate(changes):
        (tmp_path / str(number)).mkdir()
        assert isinstance(unpack_error(forge(made, **change), tmp_path / str(number)), InvalidDocument)


def test_expectations_are_compared_before_a_byte_is_written(made: Made, tmp_path: Path) -> None:
    layout = place(tmp_path / "layout", made.blobs)
    good = Digest.of(CONTENTS[("process/b.img", PROCESS_IMAGE)])
    expected = {
        "process/b.img": (7, good),
        "process/a.img": (1600, good),
        "notes.json": (11, Digest.of(CONTENTS[("notes.json", "notes")])),
        "missing.img": (1, good),
    }
    with pytest.raises(Refused) as caught:
        unpack_capsule(layout, made.digest, tmp_path / "dest", expected=expected)
    assert [problem.field for problem in caught.value.problems] == [
        "process/a.img",
        "notes.json",
        "missing.img",
        "cache/seed.py",
    ]
    assert not (tmp_path / "dest").exists()


def test_a_full_disk_is_said_before_a_byte_is_written(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail = 3
        f_frsize = real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    error = unpack_error(made, tmp_path)
    assert isinstance(error, OutOfSpace)
    assert error.facts["free_bytes"] == 3 * real.f_frsize
    needed = error.facts["needed_bytes"]
    assert isinstance(needed, int)
    assert needed >= sum(len(data) for data in CONTENTS.values())
    assert str(needed) in str(error)
    assert str(3 * real.f_frsize) in str(error)


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert isinstance(unpack_error(made, tmp_path), OutOfSpace)


def test_an_existing_destination_is_left_alone(made: Made, tmp_path: Path) -> None:
    layout = place(tmp_path / "layout", made.blobs)
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest/mine").touch()
    with pytest.raises(ResourceBusy):
        unpack_capsule(layout, made.digest, tmp_path / "dest", expected=None)
    assert [path.name for path in (tmp_path / "dest").iterdir()] == ["mine"]
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_threads_and_descriptors_end_with_a_failure(made: Made, tmp_path: Path) -> None:
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))  # noqa: PTH208
    name = layer_hex(made, "process")
    broken = {**made.blobs, name: made.blobs[name][:-1030] + b"!" + made.blobs[name][-1029:]}
    unpack_error(Made(made.digest, broken), tmp_path)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before  # noqa: PTH208


# Headers: against the standard library's reader, for any name, size and time.

names = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="/"), min_size=1, max_size=60)
paths = st.lists(names, min_size=1, max_size=6).map("/".join)


@given(paths, st.integers(0, 1 << 45), st.integers(-(1 << 60), 1 << 60))
@settings(max_examples=100, deadline=None)
def test_headers_say_name_size_and_time_to_any_tar(name: str, size: int, mtime_ns: int) -> None:
    header = member_header(name, size, mtime_ns=mtime_ns)
    assert len(header) % 512 == 0
    # The standard library gives times as floats, so its answer is compared through the same loss.
    with tarfile.open(fileobj=io.BytesIO(header + END_OF_LAYER), mode="r:") as tar:
        info = tar.next()
    assert info is not None
    assert (info.name, info.size, info.isreg()) == (name.rstrip("/"), size, True)
    assert info.mtime == pytest.approx(mtime_ns / 1e9, rel=1e-12)


def test_a_plain_header_byte_for_byte() -> None:
    # name, mode 0600, uid 0, gid 0, size 9 = octal 11, mtime 0, type 0, ustar 00; the sum of all bytes with the
    # checksum as spaces: 'a' 97 + 3 * "0000" digits ... computed by hand below from the parts.
    fields = b"a".ljust(100, b"\0") + b"0000600\0" + b"0000000\0" * 2 + b"00000000011\0" + b"00000000000\0"
    rest = b"0" + bytes(100) + b"ustar\00000" + bytes(247)
    checksum = sum(fields) + 8 * 32 + sum(rest)
    assert member_header("a", 9) == fields + f"{checksum:06o}\0 ".encode() + rest


# The index parser: any bytes give a record whose rules hold, or InvalidDocument; never anything else.


def parse_index(data: bytes) -> CapsuleIndex | None:
    try:
        return parse_document(CapsuleIndex, data, subject="index", limit_bytes=1 << 20)
    except InvalidDocument:
        return None


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_an_index_or_refused(data: bytes) -> None:
    assert parse_index(data) is None


values = st.one_of(
    st.none(), st.booleans(), st.integers(-10, 1 << 62), st.floats(), st.text(max_size=20), st.lists(st.integers(0, 9))
)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_mutated_index_is_refused_or_keeps_every_promise(made: Made, data: st.DataObject) -> None:
    tree = index_of(made)
    target = data.draw(st.sampled_from([tree, *tree["files"]]))
    target[data.draw(st.sampled_from([*sorted(target), "unknown"]))] = data.draw(values)
    index = parse_index(json.dumps(tree).encode())
    if index is None:
        return
    assert [file.path for file in index.files] == sorted({file.path for file in index.files})
    for file in index.files:
        assert path_fault(file.path) is None
        assert not Path(file.path).is_absolute()
        assert ".." not in Path(file.path).parts
        assert len(file.stored_bytes) == (len(chunk_sizes(file.bytes)) if file.encoding == "zstd" else 1)


@given(st.binary(max_size=3000), st.integers(0, 3000), st.binary(max_size=8))
@settings(max_examples=100, deadline=None)
def test_a_damaged_frame_gives_its_bytes_or_badframe(content: bytes, at: int, patch: bytes) -> None:
    frame = compress_chunk(content)
    assert decompress_chunk(frame, len(content)) == content
    assert 0 < len(frame) <= max_frame_bytes(len(content))
    at = min(at, len(frame))
    changed = frame[:at] + patch + frame[at + len(patch) :]
    try:
        assert len(decompress_chunk(changed, len(content))) == len(content)
    except BadFrame:
        assert changed != frame


@given(st.integers(0, 1 << 40))
@settings(deadline=None)
def test_chunks_cover_a_file_exactly(size: int) -> None:
    sizes = chunk_sizes(size % (1 << 32))
    assert sum(sizes) == size % (1 << 32)
    assert all(part == sizes[0] for part in sizes[:-1])
    assert len(sizes) == 1 or 0 < sizes[-1] <= sizes[0]


def test_an_indexed_file_of_a_large_plain_size_fits_a_pax_record() -> None:
    header = member_header("big", 1 << 40)
    assert b"size=1099511627776\n" in header
    assert IndexedFile.model_fields["bytes"].metadata  # bounded: a size cannot grow past what is checked


def test_reading_an_index_reads_no_layer(made: Made, tmp_path: Path) -> None:
    blobs = {name: data for name, data in made.blobs.items() if name != layer_hex(made, "process")}
    index = read_capsule(place(tmp_path / "layout", blobs), made.digest)
    assert {file.path for file in index.files} == {path for path, _ in CONTENTS}
    assert index.total_bytes == sum(len(data) for data in CONTENTS.values())
