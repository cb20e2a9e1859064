"""A small OCI image for tests, made of this machine's own files: its Python, a shell, and a few packages.

python = build_root(folder)
reference = publish_root(folder, registry, name, work)

It needs no network, and its files lie where the host has its own, so that a test sees which of the two a unit uses.
An image for use is made of Debian's packages, by `./run image`.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import coldsnap
from coldsnap.capsule.layout import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.ship.base import Item, Kind, Outgoing
from coldsnap.ship.names import RegistryName
from coldsnap.ship.registry import Registry

__all__ = ["build_root", "publish_root"]

_PROGRAMS = ("sh", "readlink", "dirname", "env")  # what the script around a private CRIU calls
_LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "test", "tests", "site-packages", "dist-packages", "idlelib", "ensurepip", "tkinter", "config-*"
)


def build_root(folder: Path) -> Path:
    """Fill ``folder`` with a root that runs this Python with coldsnap and what it needs.

    Returns where Python is in it. That is enough for the fake engine.
    """
    python = Path(os.path.realpath(sys.executable))
    for name in ("proc", "sys", "dev", "run", "tmp", "etc", "mnt"):
        (folder / name).mkdir(parents=True)
    _links(folder)
    programs = [python, *(Path(found) for name in _PROGRAMS if (found := shutil.which(name)))]
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    shutil.copytree(stdlib, _inside(folder, stdlib), symlinks=True, ignore=_LEFT_OUT, dirs_exist_ok=True)
    site = _inside(folder, stdlib) / "site-packages"
    shutil.copytree(Path(coldsnap.__file__).parent, site / "coldsnap", ignore=shutil.ignore_patterns("__pycache__"))
    for one in _needed():
        for file in one.files or ():
            source, target = Path(str(one.locate_file(file))), site / file
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    modules = [path for path in folder.rglob("*.so*") if path.is_file()]
    for path in (*programs, *(one for one in _libraries([*programs, *modules]) if not one.is_relative_to(folder))):
        _put(folder, path)
    return python


def publish_root(folder: Path, store: Registry, name: RegistryName, work: Path) -> str:
    """Push ``folder`` as an image of one gzipped layer; its reference."""
    work.mkdir()
    tar, layer = work / "layer.tar", work / "layer.tar.gz"
    with tarfile.open(tar, "w") as archive:
        archive.add(folder, arcname=".")
    with tar.open("rb") as plain, gzip.open(layer, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed, 1 << 20)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [str(_digest(tar))]},
    }
    (work / "config.json").write_bytes(canonical_json(config))
    described = [
        {"mediaType": kind, "digest": str(_digest(path)), "size": path.stat().st_size}
        for kind, path in ((CONFIG_TYPE, work / "config.json"), (f"{LAYER_TYPE}+gzip", layer))
    ]
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": described[0], "layers": described[1:]}
    (work / "manifest.json").write_bytes(canonical_json(manifest))
    files = ((Kind.BLOB, work / "config.json"), (Kind.BLOB, layer), (Kind.MANIFEST, work / "manifest.json"))
    store.write(
        [Outgoing(item=Item(kind, _digest(path)), bytes=path.stat().st_size, path=path) for kind, path in files]
    )
    return name.reference(_digest(work / "manifest.json"))


def _digest(path: Path) -> Digest:
    with path.open("rb") as file:
        return Digest.from_hex(hashlib.file_digest(file, "sha256").hexdigest())


def _needed() -> list[Distribution]:
    """Every installed distribution that coldsnap needs, itself left out."""
    found: dict[str, Distribution] = {}
    open_: list[tuple[str, str]] = [("coldsnap", "")]
    seen = set(open_)
    while open_:
        name, extra = open_.pop()
        try:
            one = distribution(name)
        except PackageNotFoundError:
            continue  # for another system
        found[name] = one
        for text in one.requires or ():
            required, _, marker = text.partition(";")
            match = re.match(r"[A-Za-z0-9._-]+", required)
            wanted = re.search(r"extra == ['\"]([^'\"]+)", marker)
            if match is None or (wanted is not None and wanted[1] != extra):
                continue
            inner = re.search(r"\[([^]]*)\]", required)
            for more in ("", *(inner[1].replace(" ", "").split(",") if inner is not None else ())):
                key = (match[0].lower(), more)
                if key not in seen:
                    seen.add(key)
                    open_.append(key)
    found.pop("coldsnap")
    return list(found.values())


def _inside(folder: Path, path: Path) -> Path:
    return folder / path.relative_to("/")


def _links(folder: Path) -> None:
    """The links at the top of a merged ``/usr``, as they are here."""
    for name in ("bin", "lib", "lib64", "sbin"):
        here = Path("/", name)
        if here.is_symlink():
            (folder / name).symlink_to(here.readlink())


def _put(folder: Path, path: Path) -> None:
    """Copy the file that a name leads to, and the name."""
    real = path.resolve()
    target, name = _inside(folder, real), _inside(folder, path.parent.resolve() / path.name)
    for place in (target, name):
        place.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(real, target)
    if not os.path.lexists(name):
        name.symlink_to(os.path.relpath(target, name.parent))


def _libraries(programs: Sequence[Path]) -> set[Path]:
    """What the loader finds for programs and libraries."""
    ldd = shutil.which("ldd") or "/usr/bin/ldd"
    said = subprocess.run([ldd, *map(str, programs)], capture_output=True, text=True, check=False).stdout
    return {Path(match) for match in re.findall(r"(/\S+) \(0x", said)}
