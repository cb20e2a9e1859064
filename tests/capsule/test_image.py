"""Writing capsules: equal bytes for equal input, readable by anyone, refused inputs leave nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from coldsnap.capsule.frames import CHUNK_BYTES
from coldsnap.capsule.image import (
    CACHE_SEED,
    PROCESS_IMAGE,
    RESIDUAL,
    CapsuleFile,
    CapsuleImage,
    read_capsule,
    unpack_capsule,
    write_capsule,
)
from coldsnap.core.bindings import ProcessImage
from coldsnap.core.digest import Digest
from coldsnap.core.objects import ObjectRecord
from coldsnap.core.owners import Owner
from coldsnap.errors import InvalidDocument, OperationInterrupted, PayloadRejected, ResourceBusy, UsageError

SEED_MTIME_NS = 1_700_000_000_123_456_789
PAGES = random.Random(7).randbytes(CHUNK_BYTES) + bytes(CHUNK_BYTES) + b"the tail of the pages"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[CapsuleFile]:
    folder = tmp_path_factory.mktemp("sources")
    contents = {
        ("process/pages-1.img", PROCESS_IMAGE): PAGES,
        ("process/inventory.img", PROCESS_IMAGE): b"inventory",
        ("process/empty.img", PROCESS_IMAGE): b"",
        ("residual/w0/weights.blob", RESIDUAL): b"\1" * 5000,
        ("workers/w0/native-manifest.json", "native-manifest"): b"{}",
        ("acceptance.json", "acceptance"): b'{"answers":[]}',
        ("cache/inductor/" + "deep" * 30 + "/k\u00e9rnel.py", CACHE_SEED): b"print()\n",
        ("cache/empty", CACHE_SEED): b"",
    }
    files = []
    for number, ((path, role), data) in enumerate(contents.items()):
        source = folder / str(number)
        source.write_bytes(data)
        os.utime(source, ns=(SEED_MTIME_NS, SEED_MTIME_NS))
        files.append(CapsuleFile(role=role, owner=Owner.unit("u0"), path=path, source=source))
    return files


@pytest.fixture(scope="module")
def capsule(sources: list[CapsuleFile], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CapsuleImage]:
    layout = tmp_path_factory.mktemp("capsule") / "layout"
    return layout, write_capsule(layout, unit="u0", files=sources, annotations={"org.example.note": "x"})


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def all_records(image: CapsuleImage) -> list[ProcessImage | ObjectRecord]:
    return [*image.process_files, *image.objects]


def layer_names(layout: Path, image: CapsuleImage) -> list[tuple[str, Path]]:
    manifest = json.loads((layout / "blobs/sha256" / image.digest.hex).read_bytes())
    return [
        (layer["annotations"]["io.coldsnap.layer"], layout / "blobs/sha256" / layer["digest"].removeprefix("sha256:"))
        for layer in manifest["layers"]
    ]


def test_equal_files_give_equal_layouts_whatever_order_threads_or_clock(
    sources: list[CapsuleFile], capsule: tuple[Path, CapsuleImage], tmp_path: Path
) -> None:
    layout, image = capsule
    copies = []
    for number, file in enumerate(reversed(sources)):
        copy = tmp_path / f"copy{number}"
        copy.write_bytes(file.source.read_bytes())
        if file.role == CACHE_SEED:  # every other file gets another time, mode and name
            os.utime(copy, ns=(SEED_MTIME_NS, SEED_MTIME_NS))
        copy.chmod(0o640)
        copies.append(CapsuleFile(role=file.role, owner=file.owner, path=file.path, source=copy))
    other = write_capsule(
        tmp_path / "other", unit="u0", files=copies, annotations={"org.example.note": "x"}, num_threads=5
    )
    assert other == image
    assert tree(tmp_path / "other") == tree(layout)


@pytest.mark.parametrize("change", ["bytes", "path", "mtime", "unit", "annotation", "owner", "machine"])
def test_anything_that_differs_gives_another_digest(
    change: str, sources: list[CapsuleFile], capsule: tuple[Path, CapsuleImage], tmp_path: Path
) -> None:
    files: list[CapsuleFile] = []
    for file in sources:
        data, path, mtime, owner = file.source.read_bytes(), file.path, SEED_MTIME_NS, file.owner
        if file.path == "cache/empty":
            data = b"x" if change == "bytes" else data
            path = "cache/empty2" if change == "path" else path
            mtime += change == "mtime"
            owner = Owner.worker("w0") if change == "owner" else owner
        source = tmp_path / f"source{len(files)}"
        source.write_bytes(data)
        os.utime(source, ns=(mtime, mtime))
        files.append(CapsuleFile(role=file.role, owner=owner, path=path, source=source))
    image = write_capsule(
        tmp_path / "layout",
        unit="u1" if change == "unit" else "u0",
        files=files,
        annotations={"org.example.note": "y" if change == "annotation" else "x"},
        machine="aarch64" if change == "machine" else None,
    )
    assert image.digest != capsule[1].digest


def test_the_image_says_what_it_holds(sources: list[CapsuleFile], capsule: tuple[Path, CapsuleImage]) -> None:
    layout, image = capsule
    assert {record.path for record in image.process_files} == {
        "process/pages-1.img",
        "process/inventory.img",
        "process/empty.img",
    }
    records = {record.path: record for record in all_records(image)}
    for file in sources:
        data = file.source.read_bytes()
        record = records.pop(file.path)
        assert isinstance(record, ProcessImage) == (file.role == PROCESS_IMAGE)
        if isinstance(record, ObjectRecord):
            assert (record.role, record.owner) == (file.role, file.owner)
        assert (record.bytes, record.sha256) == (len(data), Digest.of(data))
    assert not records
    assert image.root == "coldsnap"
    assert image.bytes == sum(path.stat().st_size for path in (layout / "blobs/sha256").iterdir())
    assert {path.name for path in layout.iterdir()} == {"oci-layout", "index.json", "blobs"}
    for blob in (layout / "blobs/sha256").iterdir():
        assert Digest.of(blob.read_bytes()).hex == blob.name


def test_any_tar_reads_the_layers_and_any_zstd_the_members(
    sources: list[CapsuleFile], capsule: tuple[Path, CapsuleImage]
) -> None:
    layout, image = capsule
    members: dict[str, bytes] = {}
    for name, blob in layer_names(layout, image):
        with tarfile.open(blob, "r:") as tar:
            infos = tar.getmembers()
            assert [info.name.encode() for info in infos] == sorted(info.name.encode() for info in infos)
            for info in infos:
                assert info.isreg()
                assert (info.mode, info.uid, info.gid, info.uname, info.gname) == (0o600, 0, 0, "", "")
                assert info.mtime == (SEED_MTIME_NS / 1e9 if name == "cache" else 0)
                content = tar.extractfile(info)
                assert content is not None
                assert info.name not in members
                members[info.name] = content.read()
    stored: dict[str, bytes] = {}
    for name, data in members.items():
        if ".zst" in name:
            path = name[: name.index(".zst")]
            stored[path] = stored.get(path, b"") + zstandard.ZstdDecompressor().decompress(data)
        else:
            stored[name] = data
    index = json.loads(stored.pop("coldsnap/index.json"))
    assert stored == {f"coldsnap/{file.path}": file.source.read_bytes() for file in sources}
    assert sum(name.startswith("coldsnap/process/pages-1.img.zst.") for name in members) == 3
    assert [file["path"] for file in index["files"]] == sorted(file.path for file in sources)


def test_layers_are_named_and_an_empty_one_is_left_out(
    sources: list[CapsuleFile], capsule: tuple[Path, CapsuleImage], tmp_path: Path
) -> None:
    assert [name for name, _ in layer_names(*capsule)] == ["index", "process", "payload", "cache"]
    few = [file for file in sources if file.role == "acceptance"]
    image = write_capsule(tmp_path / "few", unit="u0", files=few, annotations={})
    assert [name for name, _ in layer_names(tmp_path / "few", image)] == ["index", "payload"]
    none = write_capsule(tmp_path / "none", unit="u0", files=[], annotations={})
    assert read_capsule(tmp_path / "none", none.digest).files == ()
    assert list(unpack_capsule(tmp_path / "none", none.digest, tmp_path / "out", expected=None).iterdir()) == []


def test_unpacking_gives_every_file_back(
    sources: list[CapsuleFile], capsule: tuple[Path, CapsuleImage], tmp_path: Path
) -> None:
    layout, image = capsule
    counted: list[int] = []
    lock = threading.Lock()

    def progress(count: int) -> None:
        with lock:
            counted.append(count)

    expected = {record.path: (record.bytes, record.sha256) for record in all_records(image)}
    dest = unpack_capsule(layout, image.digest, tmp_path / "dest", expected=expected, num_threads=3, progress=progress)
    assert tree(dest) == {file.path: file.source.read_bytes() for file in sources}
    assert sum(counted) == sum(len(file.source.read_bytes()) for file in sources)
    for file in sources:
        status = (dest / file.path).stat()
        assert status.st_mode & 0o777 == 0o600
        assert (status.st_mtime_ns == SEED_MTIME_NS) == (file.role == CACHE_SEED)
    assert [path.name for path in tmp_path.iterdir()] == ["dest"]


def refused(sources: list[CapsuleFile], path: str) -> InvalidDocument:
    extra = CapsuleFile(role="notes", owner=Owner.unit("u0"), path=path, source=sources[0].source)
    with pytest.raises(InvalidDocument) as caught:
        write_capsule(Path("/nonexistent/layout"), unit="u0", files=[*sources, extra], annotations={})
    return caught.value


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../up",
        "process/../../up",
        "a//b",
        "./a",
        "a/",
        "new\nline",
        "nul\0",
        "half\ud800",
        "index.json",
        "prepared.json",
        "workers/w0/weights.blob.coldsnap-validation.json",
        "x" * 256,
        "/".join("y" * 100 for _ in range(11)),
        "process/pages-1.img",  # there already
        "process/inventory.img.zst",  # stored name of another
        "process/inventory.img/part",  # a file where a folder must be
        "process/inventory.img.zst/part",
    ],
)
def test_a_path_that_cannot_stand_in_a_capsule_is_refused_by_name(sources: list[CapsuleFile], path: str) -> None:
    error = refused(sources, path)
    assert any(problem.field.endswith("path") and problem.cure for problem in error.problems)


def test_a_stored_name_that_only_a_large_file_takes_is_refused(sources: list[CapsuleFile], tmp_path: Path) -> None:
    extra = CapsuleFile(
        role="notes", owner=Owner.unit("u0"), path="process/pages-1.img.zst.00001", source=sources[1].source
    )
    with pytest.raises(InvalidDocument, match="same name"):
        write_capsule(tmp_path / "layout", unit="u0", files=[*sources, extra], annotations={})
    assert list(tmp_path.iterdir()) == []


def test_sources_are_proved(sources: list[CapsuleFile], tmp_path: Path) -> None:
    good = sources[1].source
    link = tmp_path / "link"
    link.symlink_to(good)
    os.mkfifo(tmp_path / "pipe")
    cases: list[tuple[Path, int | None, Digest | None, str]] = [
        (link, None, None, "unusable_path"),
        (tmp_path / "pipe", None, None, "unusable_path"),
        (tmp_path / "missing", None, None, "unusable_path"),
        (tmp_path, None, None, "unusable_path"),
        (good, 8, None, "size_mismatch"),
        (good, 9, Digest.of(b"Inventory"), "digest_mismatch"),
    ]
    for source, size, sha256, reason in cases:
        file = CapsuleFile(
            role=PROCESS_IMAGE, owner=Owner.unit("u0"), path="process/a.img", source=source, bytes=size, sha256=sha256
        )
        with pytest.raises(PayloadRejected) as caught:
            write_capsule(tmp_path / "layout", unit="u0", files=[file], annotations={})
        assert caught.value.reason == reason
        assert str(source) in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(CHUNK_BYTES * 12))

    def grow(count: int) -> None:
        with source.open("ab") as file:
            file.write(b"x")

    file = CapsuleFile(role=PROCESS_IMAGE, owner=Owner.unit("u0"), path="process/a.img", source=source)
    with pytest.raises(PayloadRejected) as caught:
        write_capsule(tmp_path / "layout", unit="u0", files=[file], annotations={}, num_threads=1, progress=grow)
    assert caught.value.reason == "changed_during_validation"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_existing_capsule_is_never_overwritten(
    sources: list[CapsuleFile], capsule: tuple[Path, CapsuleImage], tmp_path: Path
) -> None:
    layout, _ = capsule
    before = tree(layout)
    with pytest.raises(ResourceBusy, match="exists already"):
        write_capsule(layout, unit="u0", files=sources, annotations={})
    assert tree(layout) == before
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ResourceBusy):
        write_capsule(tmp_path / "dangling", unit="u0", files=sources, annotations={})


def test_a_layout_that_appears_meanwhile_wins(sources: list[CapsuleFile], tmp_path: Path) -> None:
    layout = tmp_path / "layout"

    def appear(count: int) -> None:
        layout.mkdir(exist_ok=True)
        (layout / "mine").touch()

    with pytest.raises(ResourceBusy):
        write_capsule(layout, unit="u0", files=sources, annotations={}, progress=appear)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["layout", "layout/mine"]


def test_cancelling_leaves_nothing(
    sources: list[CapsuleFile], capsule: tuple[Path, CapsuleImage], tmp_path: Path
) -> None:
    layout, image = capsule
    stop = threading.Event()
    with pytest.raises(OperationInterrupted):
        write_capsule(
            tmp_path / "layout",
            unit="u0",
            files=sources,
            annotations={},
            num_threads=1,
            progress=lambda count: stop.set(),
            cancel=stop,
        )
    with pytest.raises(OperationInterrupted):
        unpack_capsule(layout, image.digest, tmp_path / "dest", expected=None, cancel=stop)
    assert list(tmp_path.iterdir()) == []


def test_our_own_annotations_cannot_be_given(sources: list[CapsuleFile], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"io\.coldsnap\.unit"):
        write_capsule(tmp_path / "layout", unit="u0", files=sources, annotations={"io.coldsnap.unit": "u9"})


def tool(name: str) -> Iterator[str]:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    yield path


@pytest.fixture
def umoci() -> Iterator[str]:
    yield from tool("umoci")


@pytest.fixture
def skopeo() -> Iterator[str]:
    yield from tool("skopeo")


def output(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def test_umoci_lists_and_unpacks_it(
    umoci: str, sources: list[CapsuleFile], capsule: tuple[Path, CapsuleImage], tmp_path: Path
) -> None:
    layout, _ = capsule
    assert output(umoci, "ls", "--layout", str(layout)).split() == ["u0"]
    output(umoci, "unpack", "--rootless", "--image", f"{layout}:u0", str(tmp_path / "bundle"))
    root = tmp_path / "bundle/rootfs/coldsnap"
    for file in sources:
        data = file.source.read_bytes()
        if file.role in (PROCESS_IMAGE, RESIDUAL):
            parts = sorted((root / file.path).parent.glob(f"{Path(file.path).name}.zst*"))
            reader = zstandard.ZstdDecompressor().stream_reader(
                b"".join(part.read_bytes() for part in parts), read_across_frames=True
            )
            assert reader.read() == data
        else:
            assert (root / file.path).read_bytes() == data
            assert ((root / file.path).stat().st_mtime_ns == SEED_MTIME_NS) == (file.role == CACHE_SEED)


def test_skopeo_inspects_and_copies_it(skopeo: str, capsule: tuple[Path, CapsuleImage], tmp_path: Path) -> None:
    layout, image = capsule
    facts = json.loads(output(skopeo, "inspect", f"oci:{layout}:u0"))
    assert facts["Digest"] == str(image.digest)
    assert facts["Labels"]["io.coldsnap.unit"] == "u0"
    output(skopeo, "copy", "--preserve-digests", f"oci:{layout}:u0", f"oci:{tmp_path / 'copy'}:u0")
    assert read_capsule(tmp_path / "copy", image.digest) == read_capsule(layout, image.digest)
    unpack_capsule(tmp_path / "copy", image.digest, tmp_path / "dest", expected=None)
