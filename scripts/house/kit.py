"""A kit for hosts without a network: what they may lack to run this checkout, as files with their digests.

The host brings Python, torch, transformers and what these need; the kit brings the wheels of everything else and CRIU's
private prefix. `use` makes `.venv` of them: the wheels are its own packages, and behind them it sees those of the
Python that made it. Nothing outside the checkout is changed but CRIU's prefix, if there is no working CRIU in it.
"""

import gzip
import hashlib
import importlib.util
import json
import platform
import shutil
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from house import criu, ownpackage
from house.say import Trouble, call, quiet, say
from house.setup import ROOT, stamp_kit

MANIFEST = "kit.json"
CRIU_ARCHIVE = "criu.tar.gz"
PYTHON = "3.12"
_LIMIT_BYTES = 55 << 20
_PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)))
# What a host with torch and transformers brings itself is not among them.
_PACKAGES = ("pydantic", "typer", "rich", "PyYAML", "zstandard", "starlette", "uvicorn")
_EXTRAS = {"transformers": "transformers, torch", "gpu": "cuda.bindings.driver"}
_UNLESS_THERE = {"cuda-bindings": "cuda.bindings", "cuda-pathfinder": "cuda.pathfinder"}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One file of a kit. A wheel with `unless` is left out where the host's Python has that module."""

    path: str
    bytes: int
    sha256: str
    unless: str = ""


def build(out: Path, *, python: Path, prefix: Path, more: Sequence[str] = ()) -> int:
    """Make the kit in the folder `out`, which is new or holds an older kit. Returns its size in bytes.

    `more` are requirements whose wheels are added without what they need in turn.

    `python` has pip and a package index. Raises Trouble when a wheel cannot be fetched or `prefix` holds no CRIU.
    """
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).exists():
        raise Trouble(f"{out} is not empty and no kit", "name a new folder")
    if not (prefix / criu.STAMP).exists():
        raise Trouble(f"no CRIU of ours in {prefix}", "./run setup, as root")
    with tempfile.TemporaryDirectory(prefix=".kit-", dir=_parent(out)) as scratch:
        made = Path(scratch, "kit")
        wheels = made / "wheels"
        wheels.mkdir(parents=True)
        _fetch(python, wheels, more)
        _pack(prefix, made / CRIU_ARCHIVE)
        items = [_describe(path, made) for path in sorted([*wheels.iterdir(), made / CRIU_ARCHIVE])]
        total = sum(item.bytes for item in items)
        if total > _LIMIT_BYTES:
            raise Trouble(f"the kit is {total} bytes, more than the {_LIMIT_BYTES} that are meant to travel")
        document = {
            "format": 1,
            "kind": "coldsnap-kit",
            "machine": "x86_64",
            "python": PYTHON,
            "pins": pins_digest(),
            "files": [asdict(item) for item in items],
        }
        (made / MANIFEST).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return total


def use(kit: Path, *, environment: Path, prefix: Path) -> Path:
    """Make `environment` from a kit, and CRIU's `prefix` if no CRIU works there; returns the new Python.

    Raises Trouble for a kit that is damaged, of another checkout or for another machine.
    """
    items = read_manifest(kit)
    say(f"making {environment.name} from {kit} with Python {platform.python_version()}")
    behind = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    venv.EnvBuilder(clear=True, symlinks=True).create(environment)
    site = next(environment.glob("lib/python*/site-packages"))
    for item in items:
        if item.path.endswith(".whl") and not (item.unless and _is_there(item.unless)):
            _unpack(kit / item.path, site)
    _own_package(environment, site)
    lines = [f"import site; site.addsitedir({path!r})" for path in behind]
    (site / "zz-host.pth").write_text("\n".join([str(ROOT / "src"), *lines]) + "\n", encoding="utf-8")
    if not criu.inspect(prefix).works:
        _place_criu(kit / CRIU_ARCHIVE, prefix)
    python = environment / "bin/python"
    stamp_kit([extra for extra, module in _EXTRAS.items() if quiet([python, "-c", f"import {module}"]).returncode == 0])
    return python


def read_manifest(kit: Path) -> tuple[Item, ...]:
    """The files of a kit, every digest proved. Raises Trouble."""
    try:
        document = json.loads((kit / MANIFEST).read_text(encoding="utf-8"))
        items = tuple(Item(**entry) for entry in document["files"])
        made_for = (document["machine"], document["python"])
        pins = document["pins"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Trouble(
            f"{kit} is no kit: {error}", "make one with ./run kit OUT_DIR, where there is a network"
        ) from error
    here = (platform.machine(), ".".join(platform.python_version_tuple()[:2]))
    if here != made_for:
        raise Trouble(f"the kit is for {' and Python '.join(made_for)}, this is {' and Python '.join(here)}")
    if pins != pins_digest():
        raise Trouble("the kit was made for other dependencies than this checkout's", "make it again: ./run kit")
    for item in items:
        clean = PurePosixPath(item.path)
        if clean.is_absolute() or ".." in clean.parts:
            raise Trouble(f"the kit names a file outside itself: {item.path!r}")
        path = kit / item.path
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "nothing"
        if found != item.sha256:
            raise Trouble(f"{path} has SHA-256 {found}, the manifest says {item.sha256}", "copy the kit again")
    return items


def pins_digest() -> str:
    """What the wheels of a kit are chosen by."""
    wanted = [_wanted(), _wanted_for_gpu(), (ROOT / "scripts/constraints.txt").read_text(encoding="utf-8")]
    return hashlib.sha256(json.dumps(wanted).encode()).hexdigest()


def _wanted() -> list[str]:
    project = ownpackage.project()
    every: list[str] = [*project["dependencies"], *project["optional-dependencies"]["transformers"]]
    return [one for one in every if one.startswith(_PACKAGES)]


def _wanted_for_gpu() -> list[str]:
    return [*ownpackage.project()["optional-dependencies"]["gpu"], "cuda-pathfinder"]


def _parent(out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.parent


def _fetch(python: Path, wheels: Path, more: Sequence[str]) -> None:
    pip: list[str | Path] = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", "--dest", wheels]
    for name in _PLATFORMS:
        pip += ["--platform", name]
    pins: list[str | Path] = ["--constraint", ROOT / "scripts/constraints.txt"]
    if call([*pip, *pins, *_wanted()]) != 0 or call([*pip, "--no-deps", *_wanted_for_gpu(), *more]) != 0:
        raise Trouble("pip could not fetch the wheels", "its words are above; a package index must be reachable")


def _pack(prefix: Path, archive: Path) -> None:
    """The prefix as a tar whose bytes depend on its files alone."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = "root"
        return entry

    with (
        archive.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in sorted(prefix.rglob("*")):
            tar.add(path, path.relative_to(prefix).as_posix(), recursive=False, filter=plain)


def _describe(path: Path, kit: Path) -> Item:
    data = path.read_bytes()
    name = path.name.partition("-")[0].replace("_", "-").lower()
    return Item(
        path=path.relative_to(kit).as_posix(),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        unless=_UNLESS_THERE.get(name, ""),
    )


def _unpack(path: Path, site: Path) -> None:
    """A wheel's files to where they are imported from. Its scripts are left out."""
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(site)  # noqa: S202 - its digest is the manifest's, and zipfile keeps it inside
    for data in site.glob("*.data"):
        for library in ("purelib", "platlib"):
            if (data / library).is_dir():
                shutil.copytree(data / library, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _own_package(environment: Path, site: Path) -> None:
    """This project as an installer would leave it, so that its plugins are found and it can be called by name."""
    for path, written in ownpackage.info_files("coldsnap-kit").items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(written, encoding="utf-8")
    for name, written in ownpackage.programs(str(environment / "bin/python")).items():
        script = environment / "bin" / name
        script.write_text(written, encoding="utf-8")
        script.chmod(0o755)


def _place_criu(archive: Path, prefix: Path) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{prefix.name}.new-", dir=prefix.parent) as scratch:
        aside = Path(scratch, "criu")
        with tarfile.open(archive) as tar:
            tar.extractall(aside, filter="tar")
        state = criu.inspect(aside)
        if not state.works:
            problems: Sequence[str] = state.problems
            raise Trouble("the kit's CRIU does not work here: " + "; ".join(problems))
        if prefix.exists():
            shutil.rmtree(prefix)
        aside.rename(prefix)
    say(f"placed CRIU {state.version} in {prefix}")
