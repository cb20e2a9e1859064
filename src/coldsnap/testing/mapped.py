"""Which files of the host does a process have mapped that runs on the root of an image?

A file is the image's when it is of the device of the process's root, if that is an overlay of the unit's own, or when
it is the very file of the unpacked image (older kernels tell of that one). All else must lie below a folder that the
unit was given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["foreign_files"]


def foreign_files(pid: int, *, image: Path, given: Sequence[Path]) -> list[str]:
    """The mapped files of ``pid``, and its program, that are neither of ``image`` nor below one of ``given``.

    ``image`` is the unpacked root, ``given`` are paths inside the unit. AssertionError when nothing is mapped at all.
    """
    overlay = Path(f"/proc/{pid}/root/").stat().st_dev
    own = overlay != Path("/").stat().st_dev
    found = _mapped(pid)
    assert found, f"process {pid} has no file mapped"
    return sorted(
        path
        for path, device, inode in found
        if not (own and device == overlay)
        and (device, inode) != _identity(image / path.lstrip("/"))
        and not any(Path(path).is_relative_to(folder) for folder in given)
    )


def _mapped(pid: int) -> set[tuple[str, int, int]]:
    """Path, device and inode of every file mapped."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _range, _access, _offset, device, inode, *rest = line.split(maxsplit=5)
        path = rest[0] if rest else ""
        if path.startswith("/") and not path.startswith(("/memfd:", "/dev/zero", "/SYSV")):
            major, minor = (int(number, 16) for number in device.split(":"))
            found.add((path, os.makedev(major, minor), int(inode)))
    return found


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None
