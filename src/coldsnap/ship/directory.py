"""A directory as a store: on this host, or another's through a shared file system.

<directory>/model-payloads/sha256/<hex>.pack    packs, as in a state root, so that a peer's state root is one too
<directory>/blobs/sha256/<hex>                  blobs of images
<directory>/manifests/sha256/<hex>              manifests of images
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.objects import payload_path
from coldsnap.ship.base import Item, Kind, Stored
from coldsnap.ship.folder import FolderStore

__all__ = ["Directory", "item_of", "relative_path"]

_PATHS = {
    Kind.PACK: re.compile(r"model-payloads/sha256/([0-9a-f]{64})\.pack"),
    Kind.BLOB: re.compile(r"blobs/sha256/([0-9a-f]{64})"),
    Kind.MANIFEST: re.compile(r"manifests/sha256/([0-9a-f]{64})"),
}


def relative_path(item: Item) -> str:
    """Where an object is below a directory: derived from the item and nothing else."""
    if item.kind is Kind.PACK:
        return payload_path(item.digest)
    return f"{'blobs' if item.kind is Kind.BLOB else 'manifests'}/sha256/{item.digest.hex}"


def item_of(path: str) -> Item | None:
    """The item whose ``relative_path`` this is."""
    for kind, pattern in _PATHS.items():
        if (match := pattern.fullmatch(path)) is not None:
            return Item(kind, Digest.from_hex(match[1]))
    return None


class Directory(FolderStore):
    """See the module's head."""

    kinds = frozenset(Kind)

    def path(self, item: Item) -> Path:
        """Below the directory, by kind and digest."""
        return self.folder / relative_path(item)

    def list(self) -> Iterator[Stored]:
        """Every file that bears an item's name."""
        for folder in ("model-payloads/sha256", "blobs/sha256", "manifests/sha256"):
            for path in self._files(self.folder / folder):
                if (item := item_of(f"{folder}/{path.name}")) is not None:
                    yield Stored(item=item, bytes=path.lstat().st_size)
