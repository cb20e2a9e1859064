"""The two maps that a worker writes at capture: what its memory held and where each byte is kept.

``native-manifest.json`` binds every byte of the preserved allocations to the pack or the residual.
``manifest.json`` (recovery) binds the same bytes to pinned safetensors files or the same residual, so that a
restore works with no pack at all. Both carry the allocation map, so each is proved complete on its own.

Reading is proving: a manifest that parses has a disjoint and complete split in canonical order, and
writing refuses anything that would not be read back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from coldsnap.core.cover import RangeGroup, cover_problems
from coldsnap.core.extents import (
    PAGE_BYTES,
    Allocation,
    ModelExtent,
    ResidualExtent,
    residual_group,
    residual_order_problems,
    split_problems,
)
from coldsnap.core.manifest_fields import (
    ENTRY,
    MANIFEST_LIMIT_BYTES,
    MODEL_EXTENT,
    NATIVE,
    NATIVE_KIND,
    RECOVERY,
    RECOVERY_KIND,
    RESIDUAL_EXTENT,
    ManifestReader,
    read_quickly,
)
from coldsnap.core.manifest_records import (
    MODEL_WEIGHTS_BLOB,
    RESIDUAL_BLOB,
    Blob,
    ModelSource,
    NativeManifest,
    RecoveryManifest,
)
from coldsnap.core.replay import ReplayEntry, ReplayPiece, replay_problems, tile_pieces
from coldsnap.errors import Problem

__all__ = [
    "MANIFEST_LIMIT_BYTES",
    "MODEL_WEIGHTS_BLOB",
    "RESIDUAL_BLOB",
    "Blob",
    "ModelSource",
    "NativeManifest",
    "RecoveryManifest",
    "ReplayEntry",
    "ReplayPiece",
    "native_manifest_bytes",
    "native_manifest_schema",
    "parse_native_manifest",
    "parse_recovery_manifest",
    "recovery_manifest_bytes",
    "recovery_manifest_schema",
    "tile_pieces",
]


def native_manifest_schema() -> dict[str, object]:
    """JSON Schema of ``native-manifest.json``; the cover rules are beyond what it can say."""
    return NATIVE.schema()


def recovery_manifest_schema() -> dict[str, object]:
    """JSON Schema of the recovery ``manifest.json``; the cover rules are beyond what it can say."""
    return RECOVERY.schema()


def parse_native_manifest(data: bytes) -> NativeManifest:
    """Read ``native-manifest.json``. Raises InvalidDocument with every problem, the cover proof's included."""
    return read_quickly(data, NATIVE, "native manifest", _native)


def _native(reader: ManifestReader) -> NativeManifest:
    entries = reader.rows("entries", ENTRY, Allocation)
    model = reader.rows("model_weight_extents", MODEL_EXTENT, ModelExtent)
    residual = reader.rows("residual_extents", RESIDUAL_EXTENT, ResidualExtent)
    reader.total("preserved_bytes", entries)
    reader.total("model_weight_bytes", model)
    reader.total("residual_bytes", residual)
    reader.blob("model_weights", MODEL_WEIGHTS_BLOB, model)
    reader.blob("residual", RESIDUAL_BLOB, residual)
    if entries is not None and model is not None and residual is not None:
        reader.problems += split_problems(entries, model, residual)
    found = reader.finish()
    return NativeManifest(
        capture_id=found["capture_id"],
        worker=found["worker"],
        rank=found["rank"],
        entries=tuple(entries or ()),
        model_weight_extents=tuple(model or ()),
        residual_extents=tuple(residual or ()),
        model_weights=found["model_weights"],
        residual=found["residual"],
    )


def parse_recovery_manifest(data: bytes) -> RecoveryManifest:
    """Read the recovery ``manifest.json``. Raises InvalidDocument with every problem, the cover proof's included."""
    return read_quickly(data, RECOVERY, "recovery manifest", _recovery)


def _recovery(reader: ManifestReader) -> RecoveryManifest:
    entries = reader.rows("entries", ENTRY, Allocation)
    plan = reader.replay_plan()
    residual = reader.rows("residual_extents", RESIDUAL_EXTENT, ResidualExtent)
    reader.total("preserved_bytes", entries)
    reader.total("model_weight_bytes", plan)
    reader.total("residual_bytes", residual)
    reader.blob("residual", RESIDUAL_BLOB, residual)
    if entries is not None and plan is not None and residual is not None:
        reader.problems += _recovery_problems(entries, plan, residual)
    found = reader.finish()
    return RecoveryManifest(
        capture_id=found["capture_id"],
        worker=found["worker"],
        rank=found["rank"],
        model_source=found["model_source"],
        entries=tuple(entries or ()),
        replay_plan=tuple(plan or ()),
        residual_extents=tuple(residual or ()),
        residual=found["residual"],
    )


def native_manifest_bytes(manifest: NativeManifest) -> bytes:
    """The canonical JSON of the manifest and a newline. Raises InvalidDocument when it would not be read back."""
    document = {
        **_common_document(manifest, NATIVE_KIND, manifest.model_weight_extents),
        "model_weight_extents": [_model_extent_document(one) for one in manifest.model_weight_extents],
        "model_weights": _blob_document(manifest.model_weights),
    }
    data = _canonical(document)
    parse_native_manifest(data)
    return data


def recovery_manifest_bytes(manifest: RecoveryManifest) -> bytes:
    """The canonical JSON of the manifest and a newline. Raises InvalidDocument when it would not be read back."""
    source = manifest.model_source
    document = {
        **_common_document(manifest, RECOVERY_KIND, manifest.replay_plan),
        "model_source": {
            "model_id": source.model_id,
            "revision": source.revision,
            "metadata_sha256": str(source.metadata_sha256),
        },
        "replay_plan": [_replay_document(one) for one in manifest.replay_plan],
    }
    data = _canonical(document)
    parse_recovery_manifest(data)
    return data


def _recovery_problems(
    entries: Sequence[Allocation], plan: Sequence[ReplayEntry], residual: Sequence[ResidualExtent]
) -> list[Problem]:
    replayed = RangeGroup(field="replay_plan", rows=[(one.ptr, one.size, None) for one in plan])
    problems = cover_problems(
        [(one.ptr, one.size) for one in entries], [replayed, residual_group(residual)], page_bytes=PAGE_BYTES
    )
    problems += replay_problems(plan)
    return problems + residual_order_problems(residual)


def _canonical(document: dict[str, object]) -> bytes:
    # Equal to canonical_json for these values, which hold no float, without its walk over every value.
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii") + b"\n"


def _common_document(
    manifest: NativeManifest | RecoveryManifest, kind: str, model: Sequence[ModelExtent] | Sequence[ReplayEntry]
) -> dict[str, object]:
    return {
        "format": 1,
        "kind": kind,
        "capture_id": manifest.capture_id,
        "worker": manifest.worker,
        "rank": manifest.rank,
        "preserved_bytes": sum(one.size for one in manifest.entries),
        "model_weight_bytes": sum(one.size for one in model),
        "residual_bytes": sum(one.size for one in manifest.residual_extents),
        "entries": [{"ptr": one.ptr, "size": one.size, "tag": one.tag} for one in manifest.entries],
        "residual_extents": [_residual_extent_document(one) for one in manifest.residual_extents],
        "residual": _blob_document(manifest.residual),
    }


def _model_extent_document(extent: ModelExtent) -> dict[str, object]:
    return {
        "ptr": extent.ptr,
        "size": extent.size,
        "allocation_ptr": extent.allocation_ptr,
        "semantic_id": extent.semantic_id,
        "sha256": str(extent.sha256),
        "offset": extent.offset,
        "crc32": extent.crc32,
    }


def _residual_extent_document(extent: ResidualExtent) -> dict[str, object]:
    return {
        "ptr": extent.ptr,
        "size": extent.size,
        "allocation_ptr": extent.allocation_ptr,
        "offset": extent.offset,
        "crc32": extent.crc32,
    }


def _replay_document(entry: ReplayEntry) -> dict[str, object]:
    return {
        "semantic_id": entry.semantic_id,
        "sha256": str(entry.sha256),
        "ptr": entry.ptr,
        "size": entry.size,
        "pieces": [
            {
                "file": piece.file,
                "tensor": piece.tensor,
                "file_offset": piece.file_offset,
                "tensor_offset": piece.tensor_offset,
                "extent_offset": piece.extent_offset,
                "size": piece.size,
            }
            for piece in entry.pieces
        ],
    }


def _blob_document(blob: Blob | None) -> dict[str, object] | None:
    return None if blob is None else {"name": blob.name, "bytes": blob.bytes, "sha256": str(blob.sha256)}
