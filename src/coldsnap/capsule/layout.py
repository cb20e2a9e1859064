"""The OCI side of a capsule: an image layout on disk, its documents, and reading blobs by digest.

    <layout>/oci-layout                      {"imageLayoutVersion":"1.0.0"}
    <layout>/index.json                      names the one manifest, tagged with the unit's id
    <layout>/blobs/sha256/<manifest hex>     image manifest 1.1: config, index layer, file layers
    <layout>/blobs/sha256/<config hex>       image config: architecture, linux, diff ids, history, labels
    <layout>/blobs/sha256/<layer hex>        plain tars, so a layer's digest is its diff id

All JSON is canonical. Nothing is read by name alone: every blob is opened without following links and
checked against the digest and size that led to it. There are no timestamps anywhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.names import Items
from coldsnap.core.parsing import Record
from coldsnap.errors import PayloadRejected, UsageError

__all__ = [
    "ANNOTATION_INDEX_BYTES",
    "ANNOTATION_INDEX_DIGEST",
    "ANNOTATION_LAYER",
    "ANNOTATION_UNIT",
    "CONFIG_TYPE",
    "DOCUMENT_LIMIT_BYTES",
    "LAYER_TYPE",
    "MANIFEST_TYPE",
    "OCI_LAYOUT",
    "OURS",
    "Descriptor",
    "ImageConfig",
    "ImageManifest",
    "blob_path",
    "image_config",
    "image_index",
    "image_manifest",
    "open_blob",
    "read_blob",
]

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"

ANNOTATION_UNIT = "io.coldsnap.unit"
ANNOTATION_LAYER = "io.coldsnap.layer"
ANNOTATION_INDEX_DIGEST = "io.coldsnap.index.digest"
ANNOTATION_INDEX_BYTES = "io.coldsnap.index.bytes"
OURS = "io.coldsnap."

OCI_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
DOCUMENT_LIMIT_BYTES = 64 * 1024 * 1024

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64"}
_CURE = "the capsule is damaged; fetch it again or capture again"


class Descriptor(Record):
    """Points at a blob by digest and size."""

    media_type: str = Field(alias="mediaType")
    digest: Digest
    size: int = Field(ge=0)
    annotations: dict[str, str] = Field(default_factory=dict)


class ImageManifest(Record):
    """An OCI image manifest, as a capsule writes it."""

    schema_version: Literal[2] = Field(alias="schemaVersion")
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"] = Field(alias="mediaType")
    config: Descriptor
    layers: Items[Descriptor] = Field(min_length=1)
    annotations: dict[str, str]


class RootFs(Record):
    """The layers of an image by the digests of their uncompressed tars."""

    type: Literal["layers"]
    diff_ids: Items[Digest]


class ImageConfig(Record):
    """An OCI image config, as a capsule writes it."""

    architecture: str
    os: Literal["linux"]
    config: dict[str, dict[str, str]]
    rootfs: RootFs
    history: Items[dict[str, str]]


def oci_architecture(machine: str) -> str:
    """OCI's word for a ``uname -m`` machine. Raises UsageError for one that OCI has no word for here."""
    if machine not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UsageError(f"no OCI architecture is known for machine {machine!r}", cure=f"known machines: {known}")
    return _ARCHITECTURES[machine]


def image_config(*, machine: str, layers: Sequence[tuple[str, Digest]], labels: Mapping[str, str]) -> bytes:
    """The image config; ``layers`` are (what the layer is, digest) in order."""
    return canonical_json(
        {
            "architecture": oci_architecture(machine),
            "os": "linux",
            "config": {"Labels": dict(labels)},
            "rootfs": {"type": "layers", "diff_ids": [str(digest) for _, digest in layers]},
            "history": [{"created_by": f"coldsnap: {name}"} for name, _ in layers],
        }
    )


def image_manifest(
    *, config: tuple[Digest, int], layers: Sequence[tuple[str, Digest, int]], annotations: Mapping[str, str]
) -> bytes:
    """The image manifest; ``layers`` are (what the layer is, digest, bytes) in order."""
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _descriptor(CONFIG_TYPE, *config),
            "layers": [
                _descriptor(LAYER_TYPE, digest, size, {ANNOTATION_LAYER: name}) for name, digest, size in layers
            ],
            "annotations": dict(annotations),
        }
    )


def image_index(*, manifest: Digest, manifest_bytes: int, machine: str, tag: str) -> bytes:
    """``index.json`` of a layout that holds one image."""
    entry = _descriptor(MANIFEST_TYPE, manifest, manifest_bytes, {"org.opencontainers.image.ref.name": tag})
    entry["platform"] = {"architecture": oci_architecture(machine), "os": "linux"}
    return canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]})


def blob_path(layout_dir: Path, digest: Digest) -> Path:
    """Where a layout keeps the blob of ``digest``; derives from the digest alone."""
    return layout_dir / "blobs" / "sha256" / digest.hex


def open_blob(layout_dir: Path, digest: Digest, *, size: int | None, what: str) -> tuple[int, int]:
    """Open a blob for reading without following a link: (descriptor, bytes).

    Raises PayloadRejected when it is missing, is not a regular file, or is not ``size`` bytes.
    """
    path = blob_path(layout_dir, digest)
    facts = {"path": str(path), "digest": str(digest)}
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        message = f"{what} of the capsule cannot be opened at {path}: {error.strerror}"
        raise PayloadRejected("unusable_path", message, cure=_CURE, facts=facts) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise PayloadRejected("unusable_path", f"{path} is not a regular file", cure=_CURE, facts=facts)
    if size is not None and status.st_size != size:
        os.close(fd)
        message = f"{what} of the capsule at {path} has {status.st_size} bytes, not {size}"
        raise PayloadRejected("size_mismatch", message, cure=_CURE, facts=facts)
    return fd, status.st_size


def read_blob(layout_dir: Path, digest: Digest, *, size: int | None, what: str) -> bytes:
    """A small blob, proved by its digest. Raises PayloadRejected."""
    fd, stated = open_blob(layout_dir, digest, size=size, what=what)
    path = blob_path(layout_dir, digest)
    with open(fd, "rb") as file:
        if stated > DOCUMENT_LIMIT_BYTES:
            message = f"{what} of the capsule at {path} has {stated} bytes; the limit is {DOCUMENT_LIMIT_BYTES}"
            raise PayloadRejected("size_mismatch", message, cure=_CURE, facts={"path": str(path)})
        data = file.read(DOCUMENT_LIMIT_BYTES + 1)
    if (found := Digest.of(data)) != digest:
        message = f"{what} of the capsule at {path} has digest {found}, not {digest}"
        facts = {"path": str(path), "expected": str(digest), "found": str(found)}
        raise PayloadRejected("digest_mismatch", message, cure=_CURE, facts=facts)
    return data


def _descriptor(
    media_type: str, digest: Digest, size: int, annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    described: dict[str, Any] = {"mediaType": media_type, "digest": str(digest), "size": size}
    if annotations:
        described["annotations"] = dict(annotations)
    return described
