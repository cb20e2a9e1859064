"""A kit for hosts without a network: what is made of it, and what is refused. Nothing is fetched."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
kit: ModuleType = importlib.import_module("house.kit")
criu: ModuleType = importlib.import_module("house.criu")
setup: ModuleType = importlib.import_module("house.setup")
say: ModuleType = importlib.import_module("house.say")
jobs: ModuleType = importlib.import_module("house.jobs")

HERE = ".".join(platform.python_version_tuple()[:2])


def wheel(path: Path, name: str, text: str, *, aside: bool = False) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.data/purelib/{name}.py" if aside else f"{name}.py", text)
        archive.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit of two wheels, one of which the host has already, for this machine and Python."""
    monkeypatch.setattr(setup, "_STAMPS", tmp_path / "stamps")
    folder = tmp_path / "kit"
    (folder / "wheels").mkdir(parents=True)
    wheel(folder / "wheels/carried-1-py3-none-any.whl", "carried", "WORD = 'from the kit'\n")
    wheel(folder / "wheels/other-1-py3-none-any.whl", "other", "WORD = 'from a data folder'\n", aside=True)
    wheel(folder / "wheels/spare-1-py3-none-any.whl", "spare", "")
    (folder / "criu.tar.gz").write_bytes(b"never opened: a CRIU works here")
    write_manifest(folder)
    return folder


def write_manifest(folder: Path, **other: object) -> None:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "kit.json"]
    document = {
        "format": 1,
        "kind": "coldsnap-kit",
        "machine": platform.machine(),
        "python": HERE,
        "pins": kit.pins_digest(),
        "files": [
            {
                "path": path.relative_to(folder).as_posix(),
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "unless": "json" if path.name.startswith("spare") else "",
            }
            for path in files
        ],
    }
    (folder / "kit.json").write_text(json.dumps({**document, **other}), encoding="utf-8")


def working(prefix: Path) -> object:
    return criu.State(prefix=str(prefix), installed=True, works=True)


def test_environment_has_the_wheels_this_project_and_what_the_host_has(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criu, "inspect", working)
    host = tmp_path / "host/site-packages"
    host.mkdir(parents=True)
    (host / "carried.py").write_text("WORD = 'from the host'\n")
    (host / "hosts_own.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(host)])
    python = kit.use(made, environment=tmp_path / "env", prefix=tmp_path / "criu")
    code = (
        "import carried, other, hosts_own, coldsnap, importlib.util as u, importlib.metadata as m;"
        "print(carried.WORD, other.WORD, u.find_spec('spare'), m.version('coldsnap'), coldsnap.__file__,"
        "*[p.name for p in m.entry_points(group='coldsnap.engines')], sep='\\n')"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    word, second, spare, version, where, *engines = done.stdout.split("\n")[:-1]
    assert (word, second, spare) == ("from the kit", "from a data folder", "None")
    assert version
    assert Path(where) == ROOT / "src/coldsnap/__init__.py"
    assert engines == ["transformers", "vllm"]
    assert (tmp_path / "env/bin/coldsnap").stat().st_mode & 0o111
    assert json.loads((tmp_path / "stamps/packages.json").read_text())["kit"] is True


def test_damaged_file_is_named_before_anything_is_made(made: Path, tmp_path: Path) -> None:
    path = made / "wheels/carried-1-py3-none-any.whl"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(say.Trouble, match=r"carried-1.* has SHA-256"):
        kit.use(made, environment=tmp_path / "env", prefix=tmp_path / "criu")
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"python": "3.1"}, "the kit is for"),
        ({"machine": "abacus"}, "the kit is for"),
        ({"pins": "0" * 64}, "other dependencies"),
        ({"files": [{"path": "../x", "bytes": 1, "sha256": "0" * 64}]}, "outside itself"),
        ({"files": [{"path": "gone.whl", "bytes": 1, "sha256": "0" * 64}]}, "SHA-256 nothing"),
        ({"files": 3}, "is no kit"),
    ],
)
def test_kit_that_does_not_fit_is_refused(made: Path, other: dict[str, object], complaint: str) -> None:
    write_manifest(made, **other)
    with pytest.raises(say.Trouble, match=complaint):
        kit.read_manifest(made)


def test_folder_that_is_no_kit_is_neither_used_nor_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(say.Trouble, match="is no kit"):
        kit.read_manifest(tmp_path)
    with pytest.raises(say.Trouble, match="no kit"):
        kit.build(tmp_path, python=Path(sys.executable), prefix=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_environment_from_an_index_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "_STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(setup, "VENV", tmp_path)
    with pytest.raises(say.Trouble, match="not made from a kit"):
        setup.refuse_unless_of_kit()
    setup.stamp_kit(["gpu"])
    setup.refuse_unless_of_kit()


def test_archive_of_criu_is_the_same_for_the_same_files(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/criu").write_text("#!/bin/sh\n")
    (prefix / "bin/criu").chmod(0o755)
    kit._pack(prefix, tmp_path / "1.tar.gz")
    (prefix / "bin/criu").touch()
    kit._pack(prefix, tmp_path / "2.tar.gz")
    assert (tmp_path / "1.tar.gz").read_bytes() == (tmp_path / "2.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "1.tar.gz") as tar:
        assert tar.getnames() == ["bin", "bin/criu"]
        assert tar.getmember("bin/criu").mode & 0o111


@pytest.mark.parametrize("job", ["kit", "kit-use"])
def test_one_folder_is_asked_for(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main([job]) == 1
    assert "takes one folder" in capsys.readouterr().err
