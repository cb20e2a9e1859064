"""The program that unpacks one layer of an image into a folder: a plain tar on its standard input, the folder its root.

It changes its root to the folder first, so that no name and no link of the image leads out of it. Whiteouts take
away what lower layers had. Devices are left out: a unit has its host's. Standard library only, all of it imported
before the root changes.
"""

from __future__ import annotations

import encodings.ascii
import encodings.latin_1
import encodings.utf_8
import os
import shutil
import stat
import sys
import tarfile
from typing import NoReturn

__all__ = ["main", "unpack_layer"]

LOOKED_UP_LATER = (encodings.ascii, encodings.latin_1, encodings.utf_8)
_PIECE_BYTES = 1 << 20
_HIDES = ".wh."
_HIDES_ALL = ".wh..wh..opq"


def main(root_fd: int) -> NoReturn:
    """Unpack, and end with 0; else say why on standard error."""
    try:
        os.fchdir(root_fd)
        os.chroot(".")
        os.chdir("/")
        os.umask(0)
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as layer:
            unpack_layer(layer, "")
        while sys.stdin.buffer.read(_PIECE_BYTES):
            pass  # what follows the end of the archive; the writer must not be cut off
    except (OSError, tarfile.TarError, ValueError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(3 if isinstance(error, OSError) and error.errno in (28, 122) else 1)
    os._exit(0)


def unpack_layer(layer: tarfile.TarFile, root: str) -> None:
    """Apply a layer to the folder ``root`` (``""``: the root itself). Raises OSError, TarError, ValueError."""
    made: set[str] = set()
    folders: list[tuple[str, tarfile.TarInfo]] = []
    for member in layer:
        path = _path(member.name)
        folder, name = os.path.split(path)
        if not name:
            continue
        place = root + path
        if name == _HIDES_ALL:
            for other in sorted(os.listdir(root + folder)) if os.path.isdir(root + folder) else ():
                if f"{folder.rstrip('/')}/{other}" not in made:
                    _remove(f"{root}{folder}/{other}")
            continue
        if name.startswith(_HIDES):
            _remove(f"{root}{folder}/{name.removeprefix(_HIDES)}")
            continue
        if _make(layer, member, place, root):
            made.update(_with_parents(path))
            if member.isdir():
                folders.append((place, member))
    for place, member in reversed(folders):  # writing into a folder changes its times
        os.utime(place, (member.mtime, member.mtime))


def _make(layer: tarfile.TarFile, member: tarfile.TarInfo, place: str, root: str) -> bool:
    """Make one member; False for what is left out."""
    if member.ischr() or member.isblk():
        return False
    os.makedirs(os.path.dirname(place) or "/", mode=0o755, exist_ok=True)
    if not (member.isdir() and os.path.isdir(place) and not os.path.islink(place)):
        _remove(place)
    if member.isdir():
        if not os.path.isdir(place):
            os.mkdir(place)
    elif member.issym():
        os.symlink(member.linkname, place)
    elif member.islnk():
        os.link(root + _path(member.linkname), place, follow_symlinks=False)
        return True
    elif member.isfifo():
        os.mkfifo(place)
    elif member.isreg():
        _write(layer, member, place)
    else:
        raise ValueError(f"{member.name!r} is of an unknown kind, {member.type!r}")
    os.chown(place, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        os.chmod(place, stat.S_IMODE(member.mode))
    os.utime(place, (member.mtime, member.mtime), follow_symlinks=False)
    return True


def _write(layer: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> None:
    source = layer.extractfile(member)
    if source is None:
        raise ValueError(f"{member.name!r} has no bytes")
    with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
        while piece := source.read(_PIECE_BYTES):
            out.write(piece)


def _path(name: str) -> str:
    """The member's absolute place below the root. Raises ValueError for one that climbs."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise ValueError(f"{name!r} leads out of the image")
    return "/" + "/".join(parts)


def _with_parents(path: str) -> list[str]:
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _remove(place: str) -> None:
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    elif os.path.lexists(place):
        os.unlink(place)
