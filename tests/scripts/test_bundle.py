"""A bundle of vLLM: what is left out and blanked, how it is cut, and how it is used. Nothing is fetched."""

from __future__ import annotations

import hashlib
import importlib
import json
import lzma
import os
import platform
import re
import shutil
import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
bundle: ModuleType = importlib.import_module("house.bundle")
fatbin: ModuleType = importlib.import_module("house.fatbin")
jobs: ModuleType = importlib.import_module("house.jobs")
say: ModuleType = importlib.import_module("house.say")
setup: ModuleType = importlib.import_module("house.setup")
unbundle: ModuleType = importlib.import_module("house.unbundle")

PTX, SASS = 1, 2
LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)


def code(kind: int, target: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)).ljust(28, b"\0") + struct.pack("<I", target)
    return head.ljust(64, b"\0") + payload


def fat(*codes: bytes) -> bytes:
    body = b"".join(codes)
    return struct.pack("<4sHHQ", b"\x50\xed\x55\xba", 1, 16, len(body)) + body


@pytest.mark.parametrize(
    ("targets", "kept"),
    [
        ([(SASS, 75), (SASS, 80), (SASS, 90), (PTX, 90)], {(SASS, 90)}),
        ([(SASS, 80), (SASS, 90), (SASS, 100), (SASS, 90)], {(SASS, 90)}),
        ([(SASS, 75), (PTX, 80), (PTX, 75), (PTX, 100)], {(PTX, 80)}),
        ([(SASS, 100), (PTX, 100)], set()),
    ],
)
def test_code_for_other_chips_becomes_zeros_and_nothing_moves(
    targets: list[tuple[int, int]], kept: set[tuple[int, int]]
) -> None:
    payloads = [bytes([7 + number]) * (8 * (number + 1)) for number in range(len(targets))]
    codes = [code(kind, target, payload) for (kind, target), payload in zip(targets, payloads, strict=True)]
    before = b"ELF before" + fat(*codes) + b"and after"
    data = bytearray(before)
    done = fatbin.prune(data, target=90, name="lib.so")
    expected = before
    for one, payload in zip(targets, payloads, strict=True):
        if one not in kept:
            expected = expected.replace(payload, bytes(len(payload)))
    assert data == expected
    assert done.kept_bytes == sum(len(p) for one, p in zip(targets, payloads, strict=True) if one in kept)
    assert done.kept_bytes + done.blanked_bytes == sum(map(len, payloads))


def test_of_lower_minors_the_highest_is_kept() -> None:
    data = bytearray(fat(code(SASS, 86, b"a" * 8), code(SASS, 80, b"b" * 8), code(SASS, 75, b"c" * 8)))
    fatbin.prune(data, target=89, name="lib.so")
    assert b"a" * 8 in data
    assert b"b" * 8 not in data


def test_every_binary_of_a_library_is_looked_at() -> None:
    one = fat(code(SASS, 80, b"x" * 16), code(SASS, 90, b"y" * 16))
    data = bytearray(one + b"between" + one)
    assert fatbin.prune(data, target=90, name="lib.so").blanked_bytes == 32
    assert data.count(b"y" * 16) == 2


@pytest.mark.parametrize("data", [b"\x50\xed\x55\xba", b"\x50\xed\x55\xba" + b"\xff" * 40, b"nothing of the kind"])
def test_what_only_looks_like_a_binary_stays(data: bytes) -> None:
    held = bytearray(data)
    assert fatbin.prune(held, target=90, name="lib.so").blanked_bytes == 0
    assert held == data


def test_code_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(say.Trouble, match=r"lib\.so has GPU code of an unknown form"):
        fatbin.prune(bytearray(fat(code(9, 90, b"x" * 8))), target=90, name="lib.so")


# -- making ----------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A vLLM, and a package that has a program and data outside site-packages."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    library = fat(code(SASS, 80, b"old" * 8), code(SASS, 90, b"new" * 8))
    noise = hashlib.shake_128(b"noise").digest(1_200_000)
    made = [
        wheel(
            folder,
            "vllm",
            {
                **dict.fromkeys(LIBRARIES, library),
                "vllm/__init__.py": b"VERSION = 1\n",
                "vllm/noise.bin": noise,
                "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"left out",
                "vllm/third_party/deep_gemm/include/x.h": b"left out",
                "vllm/tests/test_it.py": b"left out",
            },
        ),
        wheel(
            folder,
            "other",
            {"other.py": b"", "other-1.data/purelib/aside.py": b"", "other-1.data/scripts/program": b"left out"},
        ),
    ]
    lock = tmp_path / "vllm.lock"
    lines = [f"{name}==1 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in
             zip(("vllm", "other"), made, strict=True)]  # fmt: skip
    lock.write_text("# a lock\n" + "\n".join(lines) + "\n")
    monkeypatch.setattr(bundle, "LOCK", lock)
    monkeypatch.setattr(bundle, "_PRESET", 0)
    monkeypatch.setattr(bundle, "_fetch", lambda python: made)
    return made


def build(out: Path, *, part_mib: int = 60) -> Any:
    return bundle.build(out, python=Path(sys.executable), part_mib=part_mib)


def names_in(out: Path, manifest: Any, unpacked: Path) -> set[str]:
    packed = b"".join((out / part.path).read_bytes() for part in manifest.parts)
    unpacked.write_bytes(lzma.decompress(packed))
    with tarfile.open(unpacked) as tar:
        return set(tar.getnames())


def test_bundle_has_what_is_imported_and_nothing_that_is_left_out(wheels: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = build(out)
    names = names_in(out, manifest, tmp_path / "site.tar")
    assert {"vllm/__init__.py", "other.py", "aside.py", "vllm-1.dist-info/METADATA", *LIBRARIES} <= names
    assert not any("fa2" in name or "deep_gemm" in name or "tests" in name or "program" in name for name in names)
    with tarfile.open(tmp_path / "site.tar") as tar:
        library = tar.extractfile(LIBRARIES[0])
        assert library is not None
        data = library.read()
    assert b"new" * 8 in data
    assert b"old" not in data
    assert manifest.blanked_bytes == 3 * len(b"old" * 8)
    assert manifest.packages == {"vllm": "1", "other": "1"}


def test_parts_are_no_larger_than_asked_and_each_is_a_folder_with_the_manifest(
    wheels: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    manifest = build(out, part_mib=1)
    assert [part.path for part in manifest.parts] == ["part-0/data.xz", "part-1/data.xz"]
    assert manifest.parts[0].bytes == 1 << 20
    assert 0 < manifest.parts[1].bytes < 1 << 20
    texts = {(out / f"part-{number}" / bundle.MANIFEST).read_text() for number in (0, 1)}
    assert texts == {manifest.text()}


def test_equal_locks_make_equal_bytes_and_a_bundle_that_is_there_is_kept(
    wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(tmp_path / "one")
    assert build(tmp_path / "two") == first

    def never(python: Path) -> list[Path]:
        raise AssertionError("nothing is to be fetched")

    monkeypatch.setattr(bundle, "_fetch", never)
    assert build(tmp_path / "one") == first
    with pytest.raises(AssertionError):
        build(tmp_path / "one", part_mib=1)


def test_folder_that_is_no_bundle_is_not_overwritten(wheels: list[Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kept").touch()
    with pytest.raises(say.Trouble, match="no bundle"):
        build(tmp_path / "mine")
    assert (tmp_path / "mine/kept").exists()


def test_library_that_is_gone_from_a_wheel_is_named(wheels: list[Path], tmp_path: Path) -> None:
    wheel(wheels[0].parent, "vllm", {"vllm/__init__.py": b"", LIBRARIES[0]: b""})
    with pytest.raises(say.Trouble, match=r"has no vllm/_moe_C_stable_libtorch"):
        build(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_line_that_pins_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    lock.write_text("vllm>=0.26\n")
    monkeypatch.setattr(bundle, "LOCK", lock)
    with pytest.raises(say.Trouble, match=r"pins nothing: vllm>=0\.26"):
        bundle.locked()


def test_lock_has_the_versions_that_a_kit_has() -> None:
    """Both are unpacked into one environment, the bundle over the kit."""
    pinned = bundle.locked()
    constraints = (ROOT / "scripts/constraints.txt").read_text()
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", constraints, re.MULTILINE):
        plain = re.sub(r"[-_.]+", "-", name).lower()
        assert pinned.get(plain, version) == version, name
    assert pinned["vllm"] == "0.26.0"


# -- using -----------------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that a kit made; whatever is unpacked into it loads."""
    monkeypatch.setattr(setup, "_STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "12", "1"))
    monkeypatch.setattr(unbundle, "prove", lambda python: {"python": str(python)})
    made = tmp_path / "env"
    (made / "bin").mkdir(parents=True)
    (made / "bin/python").touch()
    (made / "lib/python3.12/site-packages").mkdir(parents=True)
    setup.stamp_kit(["gpu"])
    return made


@pytest.fixture
def parts(wheels: list[Path], tmp_path: Path) -> list[Path]:
    """A bundle's parts, each somewhere else, as after two transfers."""
    build(tmp_path / "out", part_mib=1)
    homes = []
    for number in (0, 1):
        homes.append(tmp_path / f"carried-{number}/part-{number}")
        homes[-1].parent.mkdir()
        shutil.move(tmp_path / f"out/part-{number}", homes[-1])
    return homes


def test_parts_from_anywhere_become_packages_of_the_environment(environment: Path, parts: list[Path]) -> None:
    site = environment / "lib/python3.12/site-packages"
    (site / "other.py").write_text("from the kit")
    found = unbundle.use([parts[1], parts[0].parent], environment=environment)
    assert found == {"python": str(environment / "bin/python")}
    assert (site / "vllm/__init__.py").read_text() == "VERSION = 1\n"
    assert (site / "other.py").read_text() == ""
    assert (site / "vllm/noise.bin").stat().st_size == 1_200_000


def test_second_use_unpacks_nothing(environment: Path, parts: list[Path]) -> None:
    unbundle.use(parts, environment=environment)
    mark = environment / "lib/python3.12/site-packages/vllm/__init__.py"
    os.truncate(mark, 0)
    unbundle.use(parts, environment=environment)
    assert mark.read_text() == ""


def test_use_that_broke_off_is_made_again(
    environment: Path, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack = unbundle._unpack

    def broken(paths: list[Path], site: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(unbundle, "_unpack", broken)
    with pytest.raises(OSError, match="no space"):
        unbundle.use(parts, environment=environment)
    monkeypatch.setattr(unbundle, "_unpack", unpack)
    unbundle.use(parts, environment=environment)
    assert (environment / "lib/python3.12/site-packages/vllm/__init__.py").exists()


def test_damaged_part_is_named_before_anything_is_unpacked(environment: Path, parts: list[Path]) -> None:
    data = bytearray((parts[1] / "data.xz").read_bytes())
    data[100] ^= 1
    (parts[1] / "data.xz").write_bytes(data)
    with pytest.raises(say.Trouble, match=r"part-1/data\.xz has SHA-256"):
        unbundle.use(parts, environment=environment)
    assert not list((environment / "lib/python3.12/site-packages").iterdir())


def test_part_that_is_missing_is_named(environment: Path, parts: list[Path]) -> None:
    with pytest.raises(say.Trouble, match=r"part-1/data\.xz of 2 parts is not here"):
        unbundle.use(parts[:1], environment=environment)


def test_parts_of_different_bundles_are_refused(environment: Path, parts: list[Path]) -> None:
    manifest = json.loads((parts[1] / bundle.MANIFEST).read_text())
    manifest["parts"][0]["sha256"] = "0" * 64
    (parts[1] / bundle.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(say.Trouble, match="different bundles"):
        unbundle.use(parts, environment=environment)


def test_bundle_of_another_lock_is_refused(environment: Path, parts: list[Path]) -> None:
    bundle.LOCK.write_text("vllm==2 --hash=sha256:" + "0" * 64 + "\n")
    with pytest.raises(say.Trouble, match="another lock"):
        unbundle.use(parts, environment=environment)


def test_another_python_is_refused(environment: Path, parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "11", "7"))
    with pytest.raises(say.Trouble, match=r"for x86_64 and Python 3\.12, this is x86_64 and Python 3\.11"):
        unbundle.use(parts, environment=environment)


def test_environment_that_no_kit_made_is_refused(environment: Path, parts: list[Path]) -> None:
    setup.write_stamp("packages", {"extras": ["dev"]})
    with pytest.raises(say.Trouble, match="was not made from a kit"):
        unbundle.use(parts, environment=environment)


def test_folder_without_a_part_is_named(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(say.Trouble, match=r"no part of a bundle in .*empty"):
        unbundle.use([tmp_path / "empty"], environment=environment)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"kind": "coldsnap-kit"},
        {"python": "3.11"},
        {"parts": [{"path": "../x", "bytes": 1, "sha256": "0"}]},
        {"parts": 3},
        {"more": 1},
    ],
)
def test_manifest_that_does_not_fit_is_refused(parts: list[Path], change: dict[str, object]) -> None:
    path = parts[0] / bundle.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(say.Trouble, match=r"manifest|another kind|outside itself"):
        bundle.read_manifest(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vllm-bundle"], "takes one folder"),
        (["vllm-bundle", "x", "--part-mib", "0"], "number of MiB"),
        (["vllm-bundle", "x", "--part-mib"], "number of MiB"),
        (["vllm-bundle-use"], "takes folders"),
        (["vllm-bundle-use", "--all"], "takes folders"),
    ],
)
def test_words_that_the_jobs_do_not_take(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main(words) == 1
    assert said in capsys.readouterr().err
