"""A CRIU in a folder of its own: how it is started, judged and described.

`PREFIX/bin/criu` starts it through the prefix's own dynamic loader and libraries, found from the wrapper's place, so
the folder can be copied to another machine. `PREFIX/coldsnap-criu.json` says what it is made of.
"""

import json
import os
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from house.debian import Package, unpack
from house.say import Trouble, quiet

MINIMUM = (4, 1, 1)
STAMP = "coldsnap-criu.json"
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class State:
    """What is known of the CRIU of a prefix. `problems` is empty exactly when it works."""

    prefix: str
    installed: bool
    works: bool
    version: str | None = None
    source: str | None = None
    problems: tuple[str, ...] = ()
    packages: tuple[Package, ...] = field(default=())

    def document(self) -> dict[str, object]:
        return asdict(self)


def machine() -> str:
    """The processor family. Raises Trouble when CRIU is not packaged for it here."""
    name = platform.machine()
    if name not in _LOADERS:
        raise Trouble(f"this machine is {name}; CRIU is installed only on {' and '.join(_LOADERS)}")
    return name


def version_of(text: str) -> tuple[int, ...]:
    """The numbers in `criu --version`, () when there are none."""
    match = re.search(r"^Version: (\d+(?:\.\d+)*)", text, re.MULTILINE)
    return tuple(int(number) for number in match[1].split(".")) if match else ()


def judge(command: Sequence[str | Path]) -> tuple[str | None, tuple[str, ...]]:
    """(version, problems) of a CRIU: it starts, is new enough, and `criu check` is content with the kernel."""
    try:
        asked = quiet([*command, "--version"], timeout_s=20)
    except (OSError, Trouble) as error:
        return None, (f"it does not start: {error}",)
    numbers = version_of(asked.stdout)
    if not numbers:
        said = (asked.stderr or asked.stdout).strip()
        return None, (f"it does not start (exit {asked.returncode}): {said or 'it said nothing'}",)
    version = ".".join(map(str, numbers))
    problems = []
    if numbers < MINIMUM:
        problems.append(f"version {version} is older than {'.'.join(map(str, MINIMUM))}")
    elif os.geteuid() != 0:
        problems.append("not root: `criu check`, dump and restore need it; run this as root")
    else:
        checked = quiet([*command, "check"], timeout_s=60)
        if checked.returncode != 0:
            problems.append(diagnosis(checked.stdout + checked.stderr))
    return version, tuple(problems)


def diagnosis(output: str) -> str:
    """The telling lines of a failed `criu check`, and what they usually mean."""
    lines = [line.strip() for line in output.splitlines() if re.match(r"\s*(Error|Warn)\b", line)]
    errors = [line for line in lines if line.startswith("Error")] or lines or output.strip().splitlines()[-3:]
    text = " / ".join(errors) or "no reason given"
    hint = f"kernel {platform.release()} lacks something CRIU needs, or this container forbids it"
    if re.search("CAP_|[Pp]ermission|not permitted", text):
        hint = "this process lacks a capability: run as root outside a container, or in a privileged one"
    elif "No parent found for mountpoint" in text:
        hint = "CRIU cannot work in a plain chroot: run on the machine itself, or where the root is a mount"
    elif "vdso" in text:
        hint = f"this CRIU does not know the vDSO of kernel {platform.release()}: a newer CRIU is needed"
    return f"`criu check` failed: {text} ({hint})"


def inspect(prefix: Path) -> State:
    """Look at a prefix without changing anything."""
    try:
        stamp = json.loads((prefix / STAMP).read_text(encoding="utf-8"))
        packages = tuple(Package(**entry) for entry in stamp["packages"])
        source = str(stamp["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return State(prefix=str(prefix), installed=False, works=False, problems=(f"no CRIU of ours in {prefix}",))
    version, problems = judge([prefix / "bin/criu"])
    return State(
        prefix=str(prefix),
        installed=True,
        works=not problems,
        version=version,
        source=source,
        problems=problems,
        packages=packages,
    )


def build_from_packages(folder: Path, debs: Sequence[tuple[Path, Package]], *, source: str) -> None:
    """Unpack packages into an empty folder and add the wrapper and the stamp."""
    for deb, _package in debs:
        unpack(deb, folder)
    name = machine()
    library = f"usr/lib/{name}-linux-gnu"
    for needed in (f"{library}/{_LOADERS[name]}", "usr/sbin/criu"):
        if not (folder / needed).exists():
            raise Trouble(f"the packages hold no {needed}")
    # Character set tables and documentation are most of the size and never read. Copyright files stay.
    shutil.rmtree(folder / library / "gconv", ignore_errors=True)
    for place in (folder / "usr/share").iterdir():
        if place.name != "doc":
            shutil.rmtree(place)
    for path in (folder / "usr/share/doc").glob("*/*"):
        if path.is_file() and path.name != "copyright":
            path.unlink()
    start = f'exec "$here/{library}/{_LOADERS[name]}" --library-path "$here/{library}" "$here/usr/sbin/criu" "$@"'
    _finish(folder, start, source, [package for _deb, package in debs])


def build_from_system(folder: Path, program: Path) -> None:
    """A prefix that only points to the CRIU the system already has."""
    _finish(folder, f'exec "{program}" "$@"', "system", [])


def _finish(folder: Path, start: str, source: str, packages: Sequence[Package]) -> None:
    wrapper = folder / "bin/criu"
    wrapper.parent.mkdir()
    wrapper.write_text(
        "#!/bin/sh\n"
        "# CRIU with its own loader and libraries, wherever this folder is. Nothing of the system's is changed.\n"
        'here=$(dirname "$(dirname "$(readlink -f "$0")")")\n'
        f"{start}\n",
        encoding="utf-8",
    )
    wrapper.chmod(0o755)
    version, _problems = judge([wrapper])
    stamp = {
        "format": 1,
        "version": version,
        "source": source,
        "machine": machine(),
        "packages": [asdict(package) for package in packages],
    }
    (folder / STAMP).write_text(json.dumps(stamp, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    folder.chmod(0o755)
