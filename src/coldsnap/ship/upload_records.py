"""Where unfinished uploads to a registry go on, kept for the next process: one small private file a blob.

    <folder>/upload-<32 hex digits of SHA-256 over registry, repository and digest>.json

A record is a saving of time and is trusted with nothing: it counts only when it is ours alone and says the very
registry, repository, digest and size that are asked for, its address passes the checks of one that just came from the
registry, and how far the upload came the registry is asked. It holds no credential of ours, but the address may hold
what the registry signed for the bearer of the session; hence mode 0600, and it goes when the blob is there.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Literal

from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.parsing import Record, parse_document
from coldsnap.errors import HostError, InvalidDocument
from coldsnap.ship.base import Outgoing
from coldsnap.store.documents import read_private, replace

__all__ = ["UploadRecord", "UploadRecords"]

_LIMIT_BYTES = 64 * 1024


class UploadRecord(Record):
    """One unfinished upload. ``location`` is the address that the registry gave last."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-upload"] = "coldsnap-upload"
    registry: str
    repository: str
    digest: Digest
    bytes: int
    location: str


class UploadRecords:
    """The records of uploads to one repository. Without a ``folder`` nothing is kept and nothing found."""

    def __init__(self, folder: Path | None, *, registry: str, repository: str) -> None:
        self._folder = folder
        self._registry = registry
        self._repository = repository

    def find(self, one: Outgoing) -> str | None:
        """Where an earlier process came to an end with this blob. Anything odd is no record."""
        if (path := self._path(one)) is None:
            return None
        try:
            data = read_private(path, _LIMIT_BYTES, only_ours=True)
            found = parse_document(UploadRecord, data, subject=str(path), limit_bytes=_LIMIT_BYTES)
        except (HostError, InvalidDocument):
            return None
        return found.location if found == self._record(one, found.location) else None

    def keep(self, one: Outgoing, location: str) -> None:
        """Remember where the upload goes on. A disk that is full costs the record, not the upload."""
        if (path := self._path(one)) is None:
            return
        with suppress(HostError):
            replace(path, canonical_json(self._record(one, location).model_dump(mode="json")) + b"\n")

    def forget(self, one: Outgoing) -> None:
        """The upload ended, or is not to be continued."""
        if (path := self._path(one)) is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _record(self, one: Outgoing, location: str) -> UploadRecord:
        return UploadRecord(
            registry=self._registry,
            repository=self._repository,
            digest=one.item.digest,
            bytes=one.bytes,
            location=location,
        )

    def _path(self, one: Outgoing) -> Path | None:
        if self._folder is None:
            return None
        key = f"{self._registry}\n{self._repository}\n{one.item.digest}"
        return self._folder / f"upload-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
