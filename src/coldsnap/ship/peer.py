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
from coldsnap.ship.base import Item, Kind, Stored
from coldsnap.ship.directory import Directory

__all__ = ["Peer"]

_HEX64 = re.compile(r"[0-9a-f]{64}")
_MAX_CAPSULES = 100_000


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
