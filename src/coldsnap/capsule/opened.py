"""Opening a capsule by its digest: manifest, config and index, each proved before it is believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coldsnap.capsule.index import INDEX_MEMBER, CapsuleIndex, Layer, layer_bytes, plan_layers
from coldsnap.capsule.layout import (
    ANNOTATION_INDEX_BYTES,
    ANNOTATION_INDEX_DIGEST,
    ANNOTATION_LAYER,
    ANNOTATION_UNIT,
    CONFIG_TYPE,
    DOCUMENT_LIMIT_BYTES,
    LAYER_TYPE,
    OURS,
    ImageConfig,
    ImageManifest,
    read_blob,
)
from coldsnap.capsule.tarlayer import END_OF_LAYER, member_header, padding
from coldsnap.core.digest import Digest
from coldsnap.core.parsing import parse_document
from coldsnap.errors import InvalidDocument, Problem

__all__ = ["OpenedCapsule", "index_layer", "open_capsule", "read_capsule"]

_CURE = "the image was not written by coldsnap, or by a version with another format; capture again"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedCapsule:
    """A capsule whose manifest, config and index are proved. ``layers`` maps a layer to (digest, bytes).

    ``annotations`` are those its writer was given; ``blobs`` are all its blobs with their sizes, manifest first.
    """

    digest: Digest
    index: CapsuleIndex
    annotations: Mapping[str, str]
    layers: Mapping[Layer, tuple[Digest, int]]
    blobs: tuple[tuple[Digest, int], ...]


def read_capsule(layout_dir: Path, digest: Digest) -> CapsuleIndex:
    """The index of the capsule ``digest``, proved through its manifest and config; no file layer is read.

    Raises PayloadRejected for bytes that are not what a digest says, InvalidDocument for an image that is not
    a capsule.
    """
    return open_capsule(layout_dir, digest).index


def open_capsule(layout_dir: Path, digest: Digest) -> OpenedCapsule:
    """As `read_capsule`, and where the layers are."""
    subject = f"the manifest of capsule {digest}"
    manifest_data = read_blob(layout_dir, digest, size=None, what="the manifest")
    manifest = parse_document(ImageManifest, manifest_data, subject=subject, limit_bytes=DOCUMENT_LIMIT_BYTES)
    config_data = read_blob(layout_dir, manifest.config.digest, size=manifest.config.size, what="the config")
    subject = f"the config of capsule {digest}"
    config = parse_document(ImageConfig, config_data, subject=subject, limit_bytes=DOCUMENT_LIMIT_BYTES)
    head, *rest = manifest.layers
    packed = read_blob(layout_dir, head.digest, size=head.size, what="the index layer")
    subject = f"the index of capsule {digest}"
    index_data = _index_document(packed, manifest, subject)
    index = parse_document(CapsuleIndex, index_data, subject=subject, limit_bytes=DOCUMENT_LIMIT_BYTES)
    if problems := list(_problems(manifest, config, index)):
        raise InvalidDocument(f"capsule {digest}", problems)
    return OpenedCapsule(
        digest=digest,
        index=index,
        annotations={key: value for key, value in manifest.annotations.items() if not key.startswith(OURS)},
        layers={Layer(layer.annotations[ANNOTATION_LAYER]): (layer.digest, layer.size) for layer in rest},
        blobs=(
            (digest, len(manifest_data)),
            (manifest.config.digest, manifest.config.size),
            *((layer.digest, layer.size) for layer in manifest.layers),
        ),
    )


def index_layer(data: bytes) -> bytes:
    """The whole layer that holds the index document ``data``."""
    return member_header(INDEX_MEMBER, len(data)) + data + padding(len(data)) + END_OF_LAYER


def _index_document(layer: bytes, manifest: ImageManifest, subject: str) -> bytes:
    stated = manifest.annotations.get(ANNOTATION_INDEX_DIGEST, "")
    size = manifest.annotations.get(ANNOTATION_INDEX_BYTES, "")
    begin = len(member_header(INDEX_MEMBER, 0))
    data = layer[begin : begin + int(size)] if size.isascii() and size.isdecimal() and len(size) < 16 else b""
    if str(Digest.of(data)) != stated or index_layer(data) != layer:
        message = f"must hold {INDEX_MEMBER} alone, as the manifest's annotations state it"
        value = f"{size or 'no'} bytes, {stated or 'no digest'}"
        raise InvalidDocument(subject, [Problem(field="layers[0]", message=message, value=value, cure=_CURE)])
    return data


def _problems(manifest: ImageManifest, config: ImageConfig, index: CapsuleIndex) -> Iterator[Problem]:
    types = [(manifest.config.media_type, CONFIG_TYPE), *((layer.media_type, LAYER_TYPE) for layer in manifest.layers)]
    for found, expected in types:
        if found != expected:
            yield Problem(field="manifest", message=f"must have blobs of type {expected}", value=found, cure=_CURE)
    if config.rootfs.diff_ids != tuple(layer.digest for layer in manifest.layers):
        message = "must be the digests of the manifest's layers: a capsule's layers are plain tars"
        yield Problem(field="config.rootfs.diff_ids", message=message, cure=_CURE)
    ours = {key: value for key, value in manifest.annotations.items() if key.startswith(OURS)}
    if config.config != {"Labels": ours}:
        yield Problem(field="config.config", message="must repeat the manifest's own annotations", cure=_CURE)
    if ours.get(ANNOTATION_UNIT) != index.unit:
        message = f"{ANNOTATION_UNIT} must be the index's unit {index.unit!r}"
        yield Problem(field="manifest.annotations", message=message, value=ours.get(ANNOTATION_UNIT), cure=_CURE)
    plan = plan_layers(index)
    expected_names = ["index", *(layer.value for layer in plan)]
    names = [layer.annotations.get(ANNOTATION_LAYER) for layer in manifest.layers]
    if names != expected_names:
        yield Problem(field="manifest.layers", message=f"must be {expected_names}", value=str(names), cure=_CURE)
        return
    for number, (members, layer) in enumerate(zip(plan.values(), manifest.layers[1:], strict=True), start=1):
        if (size := layer_bytes(members)) != layer.size:
            message = f"must be {size}, which the index's files make"
            yield Problem(field=f"manifest.layers[{number}].size", message=message, value=str(layer.size), cure=_CURE)
