"""The validation record: a private note that one file, as it now lies on disk, was proved to be what it should be.

Hashing a pack costs a second a gigabyte, so a proof is remembered beside the file. The record is believed
only while device, inode, size and mtime are what they were at the proof; anything else means proving
again. It lives in a folder that only we can write to, and is itself a private regular file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coldsnap.core import rows
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.reading import UNREADABLE
from coldsnap.errors import InvalidDocument

__all__ = [
    "VALIDATION_RECORD_LIMIT_BYTES",
    "VALIDATION_SUFFIX",
    "ContentIdentity",
    "Evidence",
    "ValidationRecord",
    "parse_validation_record",
    "validation_record_bytes",
    "validation_record_schema",
]

VALIDATION_RECORD_LIMIT_BYTES = 1 << 20
VALIDATION_SUFFIX = ".coldsnap-validation.json"
VALIDATION_KIND = "coldsnap-payload-validation"


class Evidence(StrEnum):
    """How a file was proved: its whole SHA-256, or that of every extent plus all padding zero plus size."""

    FULL_SHA256 = "full-sha256"
    EXTENTS_SHA256 = "extents-sha256"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentIdentity:
    """What changes when a file's bytes are changed or replaced: read before and after every proof."""

    device: int
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationRecord:
    """``blob`` (a file name) was proved to be ``bytes`` long with digest ``sha256``, by ``content_evidence``."""

    provider: str
    blob: str
    bytes: int
    sha256: Digest
    content_identity: ContentIdentity
    content_evidence: Evidence
    validated_unix_ns: int

    def vouches_for(self, *, sha256: Digest, size_bytes: int, identity: ContentIdentity) -> bool:
        """Whether the proof was of this digest and size, on the file that has this identity now."""
        return self.sha256 == sha256 and self.bytes == size_bytes and self.content_identity == identity


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expected:
    bytes: int
    sha256: Digest


_COUNT = rows.integer(0, (1 << 63) - 1)
_ID = rows.integer(0, (1 << 64) - 1)
_EXPECTED = rows.Table(bytes=_COUNT, sha256=rows.digest)
_IDENTITY = rows.Table(device=_ID, inode=_ID, size=_COUNT, mtime_ns=rows.integer(-(1 << 63), (1 << 63) - 1))
_RECORD = rows.Table(
    format=rows.constant(1),
    kind=rows.constant(VALIDATION_KIND),
    provider=rows.identifier,
    blob=rows.line,
    expected=rows.nested(_EXPECTED, _Expected),
    content_identity=rows.nested(_IDENTITY, ContentIdentity),
    content_evidence=rows.one_of(Evidence, tuple(Evidence)),
    validated_unix_ns=_COUNT,
)


def validation_record_schema() -> dict[str, object]:
    """JSON Schema of the validation record."""
    return _RECORD.schema()


def parse_validation_record(data: bytes) -> ValidationRecord:
    """Read a validation record. Raises InvalidDocument with every problem."""
    tree, problems = rows.load(data, limit_bytes=VALIDATION_RECORD_LIMIT_BYTES)
    found: dict[str, Any] | None = None if tree is UNREADABLE else _RECORD.row(tree, "", problems)
    if found is None or problems:
        raise InvalidDocument("validation record", problems)
    expected: _Expected = found["expected"]
    return ValidationRecord(
        provider=found["provider"],
        blob=found["blob"],
        bytes=expected.bytes,
        sha256=expected.sha256,
        content_identity=found["content_identity"],
        content_evidence=found["content_evidence"],
        validated_unix_ns=found["validated_unix_ns"],
    )


def validation_record_bytes(record: ValidationRecord) -> bytes:
    """The canonical JSON of the record and a newline."""
    identity = record.content_identity
    document = {
        "format": 1,
        "kind": VALIDATION_KIND,
        "provider": record.provider,
        "blob": record.blob,
        "expected": {"bytes": record.bytes, "sha256": str(record.sha256)},
        "content_identity": {
            "device": identity.device,
            "inode": identity.inode,
            "size": identity.size,
            "mtime_ns": identity.mtime_ns,
        },
        "content_evidence": str(record.content_evidence),
        "validated_unix_ns": record.validated_unix_ns,
    }
    return canonical_json(document) + b"\n"
