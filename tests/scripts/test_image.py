"""Images of Debian packages and wheels: made from packages that are made here. No network, nothing is installed."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import random
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
debian: ModuleType = importlib.import_module("house.debian")
debroot: ModuleType = importlib.import_module("house.debroot")
image: ModuleType = importlib.import_module("house.image")
layers: ModuleType = importlib.import_module("house.layers")
say: ModuleType = importlib.import_module("house.say")
wheels: ModuleType = importlib.import_module("house.wheels")

FILES: dict[str, dict[str, str]] = {
    "base-files": {
        "etc/debian_version": "12\n",
        "bin/": "",
        "tmp/": "",
        "usr/share/doc/base-files/copyright": "free\n",
        "usr/share/doc/base-files/README": "not read by programs\n",
        "usr/share/man/man1/base.1": "neither\n",
    },
    "base-passwd": {
        "usr/share/base-passwd/passwd.master": "root:*:0:0::/root:/bin/sh\n",
        "usr/share/base-passwd/group.master": "root:*:0:\n",
    },
    "dash": {"bin/dash": "#!/bin/true\n", "bin/sh": "-> dash"},
    "libc6": {"lib/x86_64-linux-gnu/libc.so.6": "code", "lib64/ld.so": "-> /lib/x86_64-linux-gnu/ld.so"},
    "python3.11-minimal": {"usr/bin/python3.11": "elf", "usr/bin/python3": "-> python3.11"},
}
VERSIONS = {"libc6": "2.36-9+deb12u14"}
SITE = "usr/local/lib/python3.11/dist-packages"


def make_deb(folder: Path, name: str, files: dict[str, str], version: str = "1") -> Path:
    tree = folder / name
    for path, content in files.items():
        place = tree / path
        (place if path.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if content.startswith("-> "):
            place.symlink_to(content[3:])
        elif not path.endswith("/"):
            place.write_text(content)
            place.chmod(0o755 if "bin/" in path else 0o644)
    if (tree / "tmp").is_dir():
        (tree / "tmp").chmod(0o1777)
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: N <n@example>\nDescription: x\n"
    )
    deb = folder / f"{name}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, deb], check=True, capture_output=True)
    return deb


def make_wheel(folder: Path, name: str, files: dict[str, str], version: str = "1") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    own = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for member, content in {**files, **own}.items():
            entry = zipfile.ZipInfo(member)
            entry.external_attr = (0o755 if member.endswith(".bin") else 0o644) << 16
            wheel.writestr(entry, content)
    return path


@pytest.fixture(scope="module")
def debs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("debs")
    made = [make_deb(folder, name, files, VERSIONS.get(name, "1")) for name, files in FILES.items()]
    return [(deb, debian.describe(deb)) for deb in made]


def unpacked(layer: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(layer) as archive:
        members = archive.getmembers()
    assert len({member.name for member in members}) == len(members)
    return {member.name: member for member in members}


def content(layer: Path, name: str) -> str:
    with tarfile.open(layer) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read().decode()


def test_a_root_of_packages(debs: list[tuple[Path, Any]], tmp_path: Path) -> None:
    layers.write_layer(debroot.root_entries(debs, architecture="amd64"), tmp_path / "layer")
    found = unpacked(tmp_path / "layer")
    assert {name: member.linkname for name, member in found.items() if member.issym()} == {
        "bin": "usr/bin",
        "sbin": "usr/sbin",
        "lib": "usr/lib",
        "lib64": "usr/lib64",
        "usr/bin/sh": "dash",
        "usr/bin/python3": "python3.11",
        "usr/lib64/ld.so": "/lib/x86_64-linux-gnu/ld.so",
    }
    assert {name for name, member in found.items() if member.isreg()} == {
        "etc/debian_version",
        "etc/group",
        "etc/passwd",
        "usr/bin/dash",
        "usr/bin/python3.11",
        "usr/lib/x86_64-linux-gnu/libc.so.6",
        "usr/share/base-passwd/group.master",
        "usr/share/base-passwd/passwd.master",
        "usr/share/doc/base-files/copyright",
        *(f"var/lib/dpkg/status.d/{name}" for name in FILES),
    }
    assert {(member.uid, member.gid) for member in found.values()} == {(0, 0)}
    assert stat.S_IMODE(found["tmp"].mode) == 0o1777
    assert stat.S_IMODE(found["usr/bin/dash"].mode) == 0o755
    assert content(tmp_path / "layer", "etc/passwd") == "root:*:0:0::/root:/bin/sh\n"
    assert "Version: 2.36-9+deb12u14" in content(tmp_path / "layer", "var/lib/dpkg/status.d/libc6")
    assert [name for name in found if name.startswith("usr/share/man")] == []


def test_the_order_of_packages_does_not_count(debs: list[tuple[Path, Any]], tmp_path: Path) -> None:
    digests = {
        layers.write_layer(debroot.root_entries(order, architecture="amd64"), tmp_path / str(number)).digest
        for number, order in enumerate((debs, debs[::-1]))
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("./bin/sh", "usr/bin/sh"),
        ("./lib64/", ""),
        ("./", ""),
        ("./usr/bin/env", "usr/bin/env"),
        ("./library/x", "library/x"),
        ("lib/a/b", "usr/lib/a/b"),
    ],
)
def test_where_a_file_lies_once_usr_is_merged(name: str, place: str) -> None:
    assert debroot.merged_path(name) == place


def test_a_package_cannot_leave_the_root() -> None:
    with pytest.raises(say.Trouble, match=r"outside the root: './usr/../../x'"):
        debroot.merged_path("./usr/../../x")


def test_two_packages_with_one_file_are_refused_by_name(debs: list[tuple[Path, Any]], tmp_path: Path) -> None:
    second = make_deb(tmp_path, "another", {"usr/bin/dash": "other"})
    with pytest.raises(say.Trouble, match=r"dash and another package both have usr/bin/dash"):
        debroot.root_entries([*debs, (second, debian.describe(second))], architecture="amd64")


def test_a_damaged_package_is_refused_by_name(debs: list[tuple[Path, Any]], tmp_path: Path) -> None:
    deb, package = debs[0]
    (tmp_path / deb.name).write_bytes(deb.read_bytes()[:-100])
    with pytest.raises(say.Trouble, match=deb.name):
        debroot.root_entries([(tmp_path / deb.name, package)], architecture="amd64")


def test_what_packages_say_of_python_and_libc(debs: list[tuple[Path, Any]]) -> None:
    packages = [package for _deb, package in debs]
    assert (debroot.python_of(packages), debroot.libc_of(packages)) == ("3.11", "2.36")
    with pytest.raises(say.Trouble, match="0 Pythons"):
        debroot.python_of(packages[:2])
    with pytest.raises(say.Trouble, match="no libc6"):
        debroot.libc_of(packages[:2])


def test_a_layer_is_one_gzip_of_one_tar_whatever_the_order(tmp_path: Path) -> None:
    large = random.Random(7).randbytes(9 << 20)
    entries = [
        layers.text("b/large", large),
        layers.text("b-side", "x"),
        layers.text("b/" + "long" * 40, "y"),
        layers.link("a", "b"),
        layers.folder("b", 0o700),
    ]
    one = layers.write_layer(entries, tmp_path / "one")
    two = layers.write_layer(entries[::-1], tmp_path / "two")
    assert one == two
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    plain = gzip.decompress((tmp_path / "one").read_bytes())
    assert (len(plain), one.bytes) == (one.unpacked_bytes, (tmp_path / "one").stat().st_size)
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        assert archive.getnames() == ["a", "b", "b/large", "b/" + "long" * 40, "b-side"]
        file = archive.extractfile("b/large")
        assert file is not None
        assert file.read() == large
        assert stat.S_IMODE(archive.getmember("b").mode) == 0o700


def test_what_no_layer_can_hold(tmp_path: Path) -> None:
    with pytest.raises(say.Trouble, match="two files of the layer are called a"):
        layers.write_layer([layers.text("a", "1"), layers.text("a", "2")], tmp_path / "1")
    with pytest.raises(say.Trouble, match="a/b of the layer lies inside a"):
        layers.write_layer([layers.link("a", "x"), layers.text("a/b", "2")], tmp_path / "2")
    short = layers.Entry(path="a", mode=0o644, bytes=5, data=lambda: io.BytesIO(b"four"))
    with pytest.raises(say.Trouble, match="a has other than its 5 bytes"):
        layers.write_layer([short], tmp_path / "3")


def test_the_files_of_wheels(tmp_path: Path) -> None:
    first = make_wheel(
        tmp_path,
        "first",
        {
            "first/__init__.py": "ONE = 1\n",
            "first/run.bin": "elf",
            "first-1.data/purelib/beside.py": "",
            "first-1.data/data/share/words": "w",
            "first-1.data/scripts/first": "#!python\n",
            "shared/__init__.py": "",
        },
    )
    second = make_wheel(tmp_path, "second", {"shared/__init__.py": ""})
    with ExitStack() as stack:
        found = {entry.path: entry for entry in wheels.wheel_entries([first, second], SITE, stack)}
    names = {name.removeprefix(f"{SITE}/") for name in found if "dist-info" not in name}
    assert names == {
        "first/__init__.py",
        "first/run.bin",
        "beside.py",
        "usr/local/share/words",
        "shared/__init__.py",
    }
    assert {name: entry.mode for name, entry in found.items() if entry.mode != 0o644} == {
        f"{SITE}/first/run.bin": 0o755
    }


@pytest.mark.parametrize(
    ("files", "complaint"),
    [({"../x": ""}, "outside itself"), ({"shared.py": "other"}, "another wheel both have .*shared.py")],
)
def test_a_wheel_that_is_refused(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    both = [make_wheel(tmp_path, "first", {"shared.py": "one"}), make_wheel(tmp_path, "second", files)]
    with ExitStack() as stack, pytest.raises(say.Trouble, match=complaint):
        list(wheels.wheel_entries(both, SITE, stack))


def test_pip_chooses_wheels_for_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = tmp_path / "offered"
    offered.mkdir()
    for name in ("good-1-py3-none-any.whl", "good-2-cp311-cp311-manylinux_2_36_aarch64.whl"):
        made = make_wheel(offered, "good", {}, name.split("-")[1])
        made.rename(offered / name)
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(offered), "PIP_CONSTRAINT": ""}.items():
        monkeypatch.setenv(key, value)
    to = {"pip": Path(sys.executable), "python": "3.11"}
    here = wheels.fetch(tmp_path / "a", ["good"], libc="2.36", architecture="amd64", **to)
    arm = wheels.fetch(tmp_path / "b", ["good"], libc="2.36", architecture="arm64", **to)
    old = wheels.fetch(tmp_path / "c", ["good"], libc="2.31", architecture="arm64", **to)
    assert [wheels.describe(one)["version"] for one in (*here, *arm, *old)] == ["1", "2", "1"]
    with pytest.raises(say.Trouble, match=r"(?i)no matching distribution found for absent"):
        wheels.fetch(tmp_path / "d", ["absent"], libc="2.36", architecture="amd64", **to)


@pytest.fixture
def shop(debs: list[tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Packages and wheels come from here; how often each was asked for."""
    asked = {"debs": 0, "wheels": 0}

    def fetch_debs(work: Path, **how: Any) -> list[tuple[Path, Any]]:
        asked["debs"] += 1
        return debs

    def fetch_wheels(folder: Path, wanted: list[str], **how: Any) -> list[Path]:
        asked["wheels"] += 1
        folder.mkdir()
        return [make_wheel(folder, "engine", {"engine.py": "", "native.so": "code" * 1000})]

    monkeypatch.setattr(debroot, "fetch", fetch_debs)
    monkeypatch.setattr(wheels, "fetch", fetch_wheels)
    return asked


def build(tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
    options = image.Options(out=tmp_path / name, **changes)
    made: dict[str, Any] = image.build(options, pip=Path("no-pip"), cache=tmp_path / "cache")
    return made


def test_a_second_image_is_the_first_and_costs_nothing(shop: dict[str, int], tmp_path: Path) -> None:
    first, second = build(tmp_path, "one"), build(tmp_path, "two")
    assert shop == {"debs": 1, "wheels": 1}
    assert [one["from_cache"] for made in (first, second) for one in made["layers"]] == [False] * 3 + [True] * 3
    assert first["digest"] == second["digest"]
    fresh = build(tmp_path, "three", fresh=True)
    assert shop == {"debs": 2, "wheels": 2}
    assert fresh["digest"] == first["digest"], "equal packages make an equal image"
    assert build(tmp_path, "four", engine="none")["layers"][0]["from_cache"]
    assert shop == {"debs": 2, "wheels": 3}


def test_a_layer_that_was_damaged_is_made_again(shop: dict[str, int], tmp_path: Path) -> None:
    first = build(tmp_path, "one")
    (kept,) = (tmp_path / "cache").glob("packages-*.tar.gz")
    kept.chmod(0o644)
    kept.write_bytes(b"not these")
    again = build(tmp_path, "two")
    assert [one["from_cache"] for one in again["layers"]] == [True, False, True]
    assert again["digest"] == first["digest"]


def test_what_is_in_the_way_is_left_there(shop: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/letter").write_text("mine")
    with pytest.raises(say.Trouble, match="holds no image layout"):
        build(tmp_path, "taken")
    assert (tmp_path / "taken/letter").read_text() == "mine"
    assert shop == {"debs": 0, "wheels": 0}
    build(tmp_path, "one")
    assert build(tmp_path, "one", engine="none")["engine"] == "none", "an older layout gives way"


def test_what_the_config_starts_is_there(shop: dict[str, int], tmp_path: Path) -> None:
    made = build(tmp_path, "one")
    layout = tmp_path / "one"
    index = json.loads((layout / "index.json").read_text())
    manifest = json.loads(blob(layout, index["manifests"][0]["digest"]).read_text())
    config = json.loads(blob(layout, manifest["config"]["digest"]).read_text())
    environment = dict(entry.split("=", 1) for entry in config["config"]["Env"])
    files: dict[str, Path] = {}
    for described in manifest["layers"]:
        files |= dict.fromkeys(unpacked(blob(layout, described["digest"])), blob(layout, described["digest"]))
    (program,) = config["config"]["Entrypoint"]
    found = [place for folder in environment["PATH"].split(":") if (place := f"{folder}/{program}"[1:]) in files]
    assert found == ["usr/local/bin/coldsnap"]
    first_line = content(files[found[0]], found[0]).splitlines()[0]
    assert first_line == f"#!{made['python']}"
    assert made["python"][1:] in files
    own = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert {f"{SITE}/{path}" for path in own} <= files.keys()
    assert [name for name in files if "__pycache__" in name] == []
    assert config["rootfs"]["diff_ids"] == [one["diff_id"] for one in made["layers"]]


def blob(layout: Path, digest: str) -> Path:
    return layout / "blobs/sha256" / digest.removeprefix("sha256:")


def output(*words: str) -> str:
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed: ./run setup, as root")
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout


def test_skopeo_and_umoci_agree_with_it(shop: dict[str, int], tmp_path: Path) -> None:
    made = build(tmp_path, "one")
    name = f"{tmp_path / 'one'}:{made['tag']}"
    assert json.loads(output("skopeo", "inspect", f"oci:{name}"))["Digest"] == made["digest"]
    output("umoci", "unpack", "--rootless", "--image", name, str(tmp_path / "bundle"))
    root = tmp_path / "bundle/rootfs"
    assert (root / "bin/sh").read_text() == FILES["dash"]["bin/dash"]
    assert (root / SITE / "native.so").read_text() == "code" * 1000
    process = json.loads((tmp_path / "bundle/config.json").read_text())["process"]
    assert process["args"] == ["coldsnap", "--help"]


@pytest.mark.parametrize(
    "words", [["--suite", "../x", "out"], ["--arch", "s390x", "out"], [], ["--engine", "x", "out"]]
)
def test_words_that_are_no_image(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        image.options_of(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "tls"),
    [("127.0.0.1:5000/a/b", "false"), ("localhost/a", "false"), ("127.example.com/a", "true"), ("r.example/a", "true")],
)
def test_where_an_image_is_pushed_to(place: str, tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[str]] = []

    def quiet(words: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        said.append(words)
        return subprocess.CompletedProcess(words, int("r.example" in place), "", "unauthorized")

    monkeypatch.setattr(image, "quiet", quiet)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    made = {"layout": "/x", "tag": "coldsnap", "digest": "sha256:12"}
    if "r.example" in place:
        with pytest.raises(say.Trouble, match="unauthorized"):
            image.push(made, place)
    else:
        assert image.push(made, place) == f"{place}@sha256:12"
    assert f"--dest-tls-verify={tls}" in said[0]
    assert said[0][-2:] == ["oci:/x:coldsnap", f"docker://{place}:latest"]
