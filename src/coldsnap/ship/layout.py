"""An OCI image layout folder as a store. Manifests are those that ``index.json`` names; all else are blobs.

<layout>/oci-layout   <layout>/index.json   <layout>/blobs/sha256/<hex>
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.errors import HostError
from coldsnap.ship.base import Item, Kind, Outgoing, Stored
from coldsnap.ship.folder import FolderStore
from coldsnap.store.documents import replace
from coldsnap.store.faults import translated
from coldsnap.store.locks import hold

__all__ = ["Layout"]

_OCI_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_LIMIT_BYTES = 64 << 20
_LOCK_S = 600.0
_Entries = list[dict[str, Any]]


class Layout(FolderStore):
    """See the module's head. ``index.json`` is changed under a lock beside it and replaced as a whole."""

    kinds = frozenset({Kind.BLOB, Kind.MANIFEST})

    def path(self, item: Item) -> Path:
        """Blobs and manifests lie together."""
        return self.folder / "blobs" / "sha256" / item.digest.hex

    def list(self) -> Iterator[Stored]:
        """What ``index.json`` names as manifests, and every other file as a blob."""
        manifests = self._manifests()
        for path in self._files(self.folder / "blobs" / "sha256"):
            try:
                digest = Digest.from_hex(path.name)
            except ValueError:
                continue
            kind = Kind.MANIFEST if str(digest) in manifests else Kind.BLOB
            yield Stored(item=Item(kind, digest), bytes=path.lstat().st_size)

    def stat(self, item: Item) -> Stored | None:
        """A manifest is one only when ``index.json`` names it."""
        if item.kind is Kind.MANIFEST and str(item.digest) not in self._manifests():
            return None
        return super().stat(item)

    def _written(self, one: Outgoing) -> None:
        if one.item.kind is not Kind.MANIFEST or str(one.item.digest) in self._manifests():
            return
        with hold(self.folder / ".index.lock", deadline_s=_LOCK_S, purpose=f"writing {self.folder}/index.json"):
            entries = self._entries()
            if all(entry.get("digest") != str(one.item.digest) for entry in entries):
                entries.append({"mediaType": _MANIFEST_TYPE, "digest": str(one.item.digest), "size": one.bytes})
            if not (self.folder / "oci-layout").exists():
                replace(self.folder / "oci-layout", _OCI_LAYOUT)
            index = {"schemaVersion": 2, "mediaType": _INDEX_TYPE, "manifests": entries}
            replace(self.folder / "index.json", canonical_json(index))

    def _manifests(self) -> set[str]:
        return {str(entry.get("digest")) for entry in self._entries()}

    def _entries(self) -> _Entries:
        path = self.folder / "index.json"
        if not os.path.lexists(path):
            return []
        try:
            with translated("read", path), path.open("rb") as file:
                entries = json.loads(file.read(_LIMIT_BYTES))["manifests"]
            return [dict(entry) for entry in entries]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{path} is no index of an image layout"
            raise HostError(message, cure="name the folder of an image layout", facts={"path": str(path)}) from error
