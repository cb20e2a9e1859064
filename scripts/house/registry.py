"""A docker-registry in a folder of its own: how it is built from packages, and whether it starts."""

import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from house.debian import unpack
from house.say import Trouble, quiet

PREFIX = Path("/opt/coldsnap/registry")
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}


def build(folder: Path, debs: Sequence[Path]) -> None:
    """Unpack packages into an empty folder and add the wrapper. Raises Trouble when a file is missing."""
    for deb in debs:
        unpack(deb, folder)
    machine = platform.machine()
    library = next((p for p in (f"usr/lib/{machine}-linux-gnu", f"lib/{machine}-linux-gnu") if (folder / p / "libc.so.6").exists()), None)  # fmt: skip # noqa: E501
    program = folder / "usr/bin/docker-registry"
    if machine not in _LOADERS or library is None or not program.is_file():
        raise Trouble(f"the packages hold no docker-registry and libc for {machine}")
    for name in ("var", "etc", "lib/systemd", "usr/lib/systemd", f"{library}/gconv"):
        shutil.rmtree(folder / name, ignore_errors=True)
    wrapper = folder / "bin/docker-registry"
    wrapper.parent.mkdir(exist_ok=True)
    start = f'"$here/{library}/{_LOADERS[machine]}" --library-path "$here/{library}" "$here/usr/bin/docker-registry"'
    wrapper.write_text(
        "#!/bin/sh\n"
        "# docker-registry with its own loader and libraries, wherever this folder is.\n"
        'here=$(dirname "$(dirname "$(readlink -f "$0")")")\n'
        f'exec {start} "$@"\n',
        encoding="utf-8",
    )
    wrapper.chmod(0o755)
    folder.chmod(0o755)


def version(prefix: Path) -> str | None:
    """The version of the registry of a prefix, None when none starts."""
    try:
        asked = quiet([prefix / "bin/docker-registry", "--version"], timeout_s=20)
    except (OSError, Trouble):
        return None
    return asked.stdout.split()[-1] if asked.returncode == 0 and asked.stdout.split() else None
