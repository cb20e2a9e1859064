"""The records of the two worker manifests. ``coldsnap.core.manifest`` reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass

from coldsnap.core.digest import Digest
from coldsnap.core.extents import Allocation, CoverProof, ModelExtent, ResidualExtent, prove_cover
from coldsnap.core.replay import ReplayEntry

__all__ = ["MODEL_WEIGHTS_BLOB", "RESIDUAL_BLOB", "Blob", "ModelSource", "NativeManifest", "RecoveryManifest"]

MODEL_WEIGHTS_BLOB = "model-weights.pack"
RESIDUAL_BLOB = "weights.blob"


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """One file that extents point into: its name beside the manifest, size in bytes, SHA-256 of the whole."""

    name: str
    bytes: int
    sha256: Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeManifest:
    """A worker's memory as pack plus residual. ``model_weights`` or ``residual`` is None when it has no byte."""

    capture_id: str
    worker: str
    rank: int
    entries: tuple[Allocation, ...]
    model_weight_extents: tuple[ModelExtent, ...]
    residual_extents: tuple[ResidualExtent, ...]
    model_weights: Blob | None
    residual: Blob | None

    def cover(self) -> CoverProof:
        """The proof that the extents split the entries. Raises InvalidDocument naming every gap and overlap."""
        return prove_cover(self.entries, self.model_weight_extents, self.residual_extents)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """The pinned checkpoint that a recovery reads; ``metadata_sha256`` binds the headers of all its files."""

    model_id: str
    revision: str
    metadata_sha256: Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryManifest:
    """A worker's memory as replay plan plus residual; the plan is in address order."""

    capture_id: str
    worker: str
    rank: int
    model_source: ModelSource
    entries: tuple[Allocation, ...]
    replay_plan: tuple[ReplayEntry, ...]
    residual_extents: tuple[ResidualExtent, ...]
    residual: Blob | None
