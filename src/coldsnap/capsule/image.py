"""A capsule as an OCI image layout: writing one, and opening one by its digest.

    layer 0  coldsnap/index.json       what every file is: path, role, owner, bytes, SHA-256, how it is stored
    layer 1  coldsnap/process/...      process images, each chunk a zstd frame
    layer 2  coldsnap/...              residual (zstd), manifests, acceptance and the like (plain)
    layer 3  coldsnap/...              cache seeds (plain), which keep their modification times

A layer with no file is left out. The manifest's digest binds the index and the layers, the index binds every
file; so one digest names every byte. Equal files give an equal digest, whatever order they were given in, the
number of threads, the day or the machine's clock.

Chunks are read, compressed and hashed by several threads and written in order by the caller's, with a fixed
number of chunks in flight: memory does not grow with the size of a file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coldsnap.capsule.aside import folder_aside, num_cores, write_file
from coldsnap.capsule.index import ROOT, CapsuleIndex, Encoding, IndexedFile, Layer
from coldsnap.capsule.layers import LayerWriter, Progress, Source
from coldsnap.capsule.layout import (
    ANNOTATION_INDEX_BYTES,
    ANNOTATION_INDEX_DIGEST,
    ANNOTATION_UNIT,
    DOCUMENT_LIMIT_BYTES,
    OCI_LAYOUT,
    OURS,
    blob_path,
    image_config,
    image_index,
    image_manifest,
    oci_architecture,
)
from coldsnap.capsule.opened import OpenedCapsule, index_layer, open_capsule, read_capsule
from coldsnap.capsule.roles import CACHE_SEED, PROCESS_IMAGE, RESIDUAL
from coldsnap.capsule.unpack import unpack_capsule
from coldsnap.core.bindings import ProcessImage
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.objects import ObjectRecord
from coldsnap.core.owners import Owner
from coldsnap.core.parsing import check_document, parse_document
from coldsnap.core.points import reached
from coldsnap.errors import ResourceBusy, UsageError
from coldsnap.store.staging import sync_folder

__all__ = [
    "CACHE_SEED",
    "PROCESS_IMAGE",
    "RESIDUAL",
    "CapsuleFile",
    "CapsuleImage",
    "OpenedCapsule",
    "open_capsule",
    "read_capsule",
    "unpack_capsule",
    "write_capsule",
]

_PLACES = {
    PROCESS_IMAGE: (Layer.PROCESS, Encoding.ZSTD),
    RESIDUAL: (Layer.PAYLOAD, Encoding.ZSTD),
    CACHE_SEED: (Layer.CACHE, Encoding.PLAIN),
}
_OTHER_PLACE = (Layer.PAYLOAD, Encoding.PLAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapsuleFile:
    """A file to go into a capsule at ``path``.

    ``role`` decides its layer: ``process-image``, ``residual``, ``cache-seed``, or anything else.
    ``bytes`` and ``sha256``, when given, must be what the file turns out to hold.
    """

    role: str
    owner: Owner | str
    path: str
    source: Path
    bytes: int | None = None
    sha256: Digest | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CapsuleImage:
    """A committed capsule. ``bytes`` is the size of all its blobs; ``root`` the folder inside its layers.

    ``process_files`` are the process images, ``objects`` all other files.
    """

    digest: Digest
    reference: str
    root: str
    bytes: int
    objects: tuple[ObjectRecord, ...]
    process_files: tuple[ProcessImage, ...]


def write_capsule(
    layout_dir: Path,
    *,
    unit: str,
    files: Sequence[CapsuleFile],
    annotations: Mapping[str, str],
    machine: str | None = None,
    num_threads: int = 0,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> CapsuleImage:
    """Write ``files`` as a new image layout at ``layout_dir``, which must not exist.

    Written aside, made durable and renamed: after any failure nothing is left. ``machine`` is ``uname -m`` of
    the captured process (default: this machine's); ``num_threads`` 0 means one a core; ``progress`` counts
    bytes of the sources. Raises InvalidDocument for paths that cannot stand together, PayloadRejected when a
    source is not a regular file, not what its digest says, or changes meanwhile, ResourceBusy when
    ``layout_dir`` exists, OutOfSpace, HostError, OperationInterrupted.
    """
    machine = machine if machine is not None else os.uname().machine
    oci_architecture(machine)
    for key in annotations:
        if key.startswith(OURS):
            raise UsageError(f"annotation {key!r} is set by coldsnap itself", cure=f"use a key outside {OURS}*")
    if layout_dir.is_symlink() or layout_dir.exists():
        raise ResourceBusy(f"{layout_dir} exists already", cure="name another folder; a capsule is never overwritten")
    sources = sorted((_source(file) for file in files), key=_by_path)
    _check_paths(unit, sources)
    with folder_aside(layout_dir) as aside:
        blobs = aside / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        layers: list[tuple[str, Digest, int]] = []
        indexed: list[IndexedFile] = []
        with LayerWriter(aside, num_threads=num_threads or num_cores(), progress=progress, cancel=cancel) as writer:
            for layer in Layer:
                if chosen := [source for source in sources if source.layer is layer]:
                    digest, size, stored = writer.write(chosen)
                    layers.append((layer.value, digest, size))
                    indexed.extend(stored)
        index = CapsuleIndex(unit=unit, files=tuple(sorted(indexed, key=_by_path)))
        index_data = canonical_json(index.model_dump(mode="json"))
        parse_document(CapsuleIndex, index_data, subject=f"the files of unit {unit}", limit_bytes=DOCUMENT_LIMIT_BYTES)
        packed = index_layer(index_data)
        layers.insert(0, ("index", _put(aside, packed), len(packed)))
        labels = {
            ANNOTATION_UNIT: unit,
            ANNOTATION_INDEX_DIGEST: str(Digest.of(index_data)),
            ANNOTATION_INDEX_BYTES: str(len(index_data)),
        }
        config = image_config(machine=machine, layers=[(name, digest) for name, digest, _ in layers], labels=labels)
        manifest = image_manifest(
            config=(_put(aside, config), len(config)), layers=layers, annotations={**annotations, **labels}
        )
        digest = _put(aside, manifest)
        reached("capsule.blobs")
        write_file(aside / "oci-layout", OCI_LAYOUT)
        head = image_index(manifest=digest, manifest_bytes=len(manifest), machine=machine, tag=unit)
        write_file(aside / "index.json", head)
        sync_folder(blobs)
        sync_folder(blobs.parent)
    return CapsuleImage(
        digest=digest,
        reference=f"{unit}@{digest}",
        root=ROOT,
        bytes=sum(size for _, _, size in layers) + len(config) + len(manifest),
        objects=tuple(_object(file) for file in index.files if file.role != PROCESS_IMAGE),
        process_files=tuple(
            ProcessImage(path=file.path, bytes=file.bytes, sha256=file.sha256)
            for file in index.files
            if file.role == PROCESS_IMAGE
        ),
    )


def _source(file: CapsuleFile) -> Source:
    layer, encoding = _PLACES.get(file.role, _OTHER_PLACE)
    return Source(
        path=file.path,
        role=file.role,
        owner=str(file.owner),
        layer=layer,
        encoding=encoding,
        source=file.source,
        bytes=file.bytes,
        sha256=file.sha256,
    )


def _by_path(file: Source | IndexedFile) -> bytes:
    return file.path.encode("utf-8", "surrogatepass")


def _check_paths(unit: str, sources: Sequence[Source]) -> None:
    """Refuse impossible paths before a byte is read. Sizes are not known yet; empty files stand in."""
    stand_ins = [
        {
            "path": source.path,
            "role": source.role,
            "owner": source.owner,
            "layer": source.layer.value,
            "encoding": source.encoding.value,
            "bytes": 0,
            "sha256": str(Digest.of(b"")),
            "stored_bytes": [1 if source.encoding is Encoding.ZSTD else 0],
        }
        for source in sources
    ]
    tree = {"unit": unit, "files": stand_ins}
    check_document(CapsuleIndex, tree, subject=f"the files of unit {unit}")


def _put(layout_dir: Path, data: bytes) -> Digest:
    digest = Digest.of(data)
    write_file(blob_path(layout_dir, digest), data)
    return digest


def _object(file: IndexedFile) -> ObjectRecord:
    return ObjectRecord(role=file.role, owner=file.owner, path=file.path, bytes=file.bytes, sha256=file.sha256)
