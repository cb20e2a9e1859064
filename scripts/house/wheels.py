"""Python packages for a Python that is not here: wheels that pip chooses for it, and the files that they lay out.

Nothing of them runs, and they are never unpacked: their files go from the wheel into a layer. Programs of packages
are left out, as `./run kit` leaves them out; this project's own is written for the image's Python.
"""

import hashlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from house import ownpackage
from house.layers import Entry, text, tree
from house.say import Trouble, quiet, say
from house.setup import ROOT, cpu_torch, take_cpu_torch

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
INTERPRETER = "/usr/bin/python3"
_PATIENCE_S = 3600.0
_OLDEST_LIBC = 17  # of glibc 2: what manylinux2014 means, and older tags with it


def requirements(engine: str) -> list[str]:
    """What coldsnap needs with an engine's extra, or with none for `none`, as pyproject.toml says it."""
    own = ownpackage.project()
    extras: dict[str, list[str]] = own["optional-dependencies"]
    return sorted([*own["dependencies"], *(extras[engine] if engine != "none" else ())])


def fetch(wheels: Path, wanted: Sequence[str], *, pip: Path, python: str, libc: str, architecture: str) -> list[Path]:
    """Have pip put wheels of `wanted`, and what they need, into the folder `wheels`, at the tested versions.

    `pip` is a Python that has pip; `python` and `libc` are the versions in the image. Raises Trouble.
    """
    wheels.mkdir()
    machine = MACHINES[architecture]
    own: list[str | Path] = [pip, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    own += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", wheels]
    own += ["--platform", f"manylinux2014_{machine}"]
    for minor in range(int(libc.split(".")[1]), _OLDEST_LIBC - 1, -1):
        own += ["--platform", f"manylinux_2_{minor}_{machine}"]
    if any(one.startswith("torch==") for one in wanted):
        say(f"fetching {cpu_torch()} from PyTorch's own index (200 MB)")
        take_cpu_torch([*own, cpu_torch()])
    say(f"fetching what {', '.join(map(_name, wanted))} need")
    constraints: list[str | Path] = ["--find-links", wheels, "--constraint", ROOT / "scripts/constraints.txt"]
    done = quiet([*own, *constraints, *wanted], timeout_s=_PATIENCE_S)
    if done.returncode != 0:
        said = " / ".join([line for line in done.stderr.splitlines() if line.startswith("ERROR")][-2:])
        raise Trouble(
            f"pip could not fetch the wheels: {said or done.stderr[-300:]}", "a package index must be reachable"
        )
    return sorted(wheels.glob("*.whl"))


def describe(wheel: Path) -> dict[str, str]:
    """Name, version and SHA-256 of a wheel."""
    name, version, *_ = wheel.name.split("-")
    with wheel.open("rb") as file:
        return {"name": name, "version": version, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def site_of(python: str) -> str:
    """Where Debian's Python of this version looks for packages that are not Debian's."""
    return f"usr/local/lib/python{python}/dist-packages"


def wheel_entries(wheels: Sequence[Path], site: str, stack: ExitStack) -> Iterator[Entry]:
    """The files of wheels below `site`; they can be read until `stack` closes.

    Raises Trouble for two wheels whose files differ under one name, and for a wheel that leads out.
    """
    known: dict[str, tuple[int, int]] = {}
    for path in wheels:
        try:
            wheel = stack.enter_context(zipfile.ZipFile(path))
        except zipfile.BadZipFile as error:
            raise Trouble(f"{path.name} is no wheel: {error}") from error
        for info in wheel.infolist():
            place = _place(info.filename, site)
            if not place or info.is_dir():
                continue
            content = (info.file_size, info.CRC)
            if known.setdefault(place, content) != content:
                raise Trouble(f"{path.name} and another wheel both have {place}")
            if known[place] is content:
                yield Entry(
                    path=place,
                    mode=0o755 if info.external_attr >> 16 & 0o111 else 0o644,
                    bytes=info.file_size,
                    data=lambda wheel=wheel, info=info: wheel.open(info),  # type: ignore[misc]
                )


def _place(name: str, site: str) -> str:
    """Where a member of a wheel lies in the root; empty for what is left out."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts:
        raise Trouble(f"a wheel has a file outside itself: {name!r}")
    if len(parts) > 2 and parts[0].endswith(".data"):
        prefix = {"purelib": site, "platlib": site, "data": "usr/local"}.get(parts[1])
        return "" if prefix is None else "/".join([prefix, *parts[2:]])
    return f"{site}/{name}"


def own_entries(site: str) -> Iterator[Entry]:
    """This project itself, installed, with its programs."""
    yield from tree(ROOT / "src/coldsnap", f"{site}/coldsnap", wanted=lambda path: "__pycache__" not in path.parts)
    for path, written in ownpackage.info_files("coldsnap-image").items():
        yield text(f"{site}/{path}", written)
    for name, written in ownpackage.programs(INTERPRETER).items():
        yield text(f"usr/local/bin/{name}", written, 0o755)


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0] if match else requirement
