"""A folder of another host as a source: a plain directory (``directory.py``), or a whole state root.

    <peer>/model-payloads/sha256/<hex>.pack                packs
    <peer>/blobs/sha256/<hex>, manifests/sha256/<hex>      blobs and manifests of a plain directory
    <peer>/capsules/<manifest hex>/blobs/sha256/<hex>      those of the capsules that a state root keeps

Whose it is and who may write there does not matter: what it gives is hashed by whoever reads. Only real folders and
regular files count, and a file is opened without following a link. Unpacked capsules (``prepared/``) cannot be had from
a peer: a capsule's digest is over packed bytes, which no other version of a compressor need make again.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.errors import UsageError
from coldsnap.ship.base import Item, Kind, Stored
from coldsnap.ship.directory import Directory

__all__ = ["Peer", "check_peer"]

_HEX64 = re.compile(r"[0-9a-f]{64}")
_MAX_CAPSULES = 100_000
_FOLDERS = ("model-payloads", "capsules", "blobs", "manifests")


def check_peer(folder: Path) -> None:
    """Raise UsageError for what holds nothing that a peer could give because it is no peer at all: a mistyped name.

    One that has the folders and nothing in them is a peer. What it says later, or does not, is no reason to end.
    """
    try:
        names = {one.name for one in folder.iterdir()}
    except OSError as error:
        why = f"cannot be looked into: {error.strerror}"
    else:
        if names & set(_FOLDERS):
            return
        why = f"has none of the folders {', '.join(_FOLDERS)}"
    cure = "name the state root of another host, a copy of its folders, or a URL that fsspec opens; or leave it out"
    raise UsageError(f"--peer {folder} {why}", cure=cure, facts={"peer": str(folder)})


class Peer(Directory):
    """See the module's head."""

    def path(self, item: Item) -> Path:
        """Where the object is; where a plain directory would have it when it is not there."""
        plain = super().path(item)
        if item.kind is Kind.PACK or _is_file(plain):
            return plain
        if item.kind is Kind.MANIFEST:
            folders: Iterator[Path] = iter([self.folder / "capsules" / item.digest.hex])
        else:
            folders = self._capsules()
        inside = (one / "blobs" / "sha256" / item.digest.hex for one in folders if _is_folder(one))
        return next((path for path in inside if _is_file(path)), plain)

    def list(self) -> Iterator[Stored]:
        """What a plain directory has, then manifest and blobs of every capsule, each once."""
        seen: set[Item] = set()
        for one in super().list():
            seen.add(one.item)
            yield one
        for folder in self._capsules():
            for path in self._files(folder / "blobs" / "sha256") if _is_folder(folder) else ():
                if _HEX64.fullmatch(path.name) is None:
                    continue
                item = Item(Kind.MANIFEST if path.name == folder.name else Kind.BLOB, Digest.from_hex(path.name))
                if item not in seen:
                    seen.add(item)
                    yield Stored(item=item, bytes=path.lstat().st_size)

    def _capsules(self) -> Iterator[Path]:
        try:
            names = sorted(one.name for one in islice((self.folder / "capsules").iterdir(), _MAX_CAPSULES))
        except OSError:
            return
        yield from (self.folder / "capsules" / name for name in names if _HEX64.fullmatch(name) is not None)


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(_mode(path))


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0
