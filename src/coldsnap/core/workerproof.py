"""That a worker's two manifests are complete, agree with each other, and are the ones an artifact means.

Each is proved alone when it is read: every preserved byte in exactly one extent. Together they must describe the same
memory, and every model extent must have the same digest whether it comes from the pack or from the checkpoint; else
a restore would give other bytes depending on the provider. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from coldsnap.core.digest import Digest
from coldsnap.core.manifest import NativeManifest, RecoveryManifest, parse_native_manifest, parse_recovery_manifest
from coldsnap.core.manifest_records import Blob
from coldsnap.errors import InvalidDocument, Problem

__all__ = ["ExpectedWorker", "WorkerProof", "prove_worker"]

_MAX_NAMED = 20
_CURE = "the capsule and the artifact do not belong together: capture again"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedWorker:
    """What an artifact says of a worker. ``pack`` and ``residual`` are (bytes, digest) or None when it has none."""

    capture_id: str
    worker: str
    rank: int
    pack: tuple[int, Digest] | None
    residual: tuple[int, Digest] | None
    model_id: str
    revision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProof:
    """The cover of one worker in numbers, and everything that is wrong; the numbers are 0 for what cannot be read."""

    worker: str
    problems: tuple[Problem, ...]
    preserved_bytes: int = 0
    model_bytes: int = 0
    residual_bytes: int = 0
    num_model_extents: int = 0
    num_residual_extents: int = 0


def prove_worker(native: bytes, recovery: bytes, expected: ExpectedWorker) -> WorkerProof:
    """Prove both covers and every agreement. Never raises: all problems are in the result."""
    problems: list[Problem] = []
    maps: list[NativeManifest | RecoveryManifest] = []
    for parse, data in ((parse_native_manifest, native), (parse_recovery_manifest, recovery)):
        try:
            maps.append(parse(data))
        except InvalidDocument as error:
            name = error.subject
            problems += [
                Problem(field=f"{name}: {one.field}", message=one.message, value=one.value, cure=one.cure)
                for one in error.problems
            ]
    if len(maps) < 2:
        return WorkerProof(worker=expected.worker, problems=_named(expected.worker, problems))
    first, second = maps
    assert isinstance(first, NativeManifest) and isinstance(second, RecoveryManifest)  # noqa: S101, PT018 - for mypy
    problems += _disagreements(first, second, expected)
    return WorkerProof(
        worker=expected.worker,
        problems=_named(expected.worker, problems),
        preserved_bytes=sum(one.size for one in first.entries),
        model_bytes=sum(one.size for one in first.model_weight_extents),
        residual_bytes=sum(one.size for one in first.residual_extents),
        num_model_extents=len(first.model_weight_extents),
        num_residual_extents=len(first.residual_extents),
    )


def _disagreements(native: NativeManifest, recovery: RecoveryManifest, expected: ExpectedWorker) -> Iterator[Problem]:
    rows: tuple[tuple[str, object, object], ...] = (
        ("capture_id", native.capture_id, expected.capture_id),
        ("recovery capture_id", recovery.capture_id, expected.capture_id),
        ("worker", native.worker, expected.worker),
        ("recovery worker", recovery.worker, expected.worker),
        ("rank", native.rank, expected.rank),
        ("recovery rank", recovery.rank, expected.rank),
        ("model_weights", _identity(native.model_weights), expected.pack),
        ("residual", _identity(native.residual), expected.residual),
        ("recovery residual", _identity(recovery.residual), expected.residual),
        ("model_source.model_id", recovery.model_source.model_id, expected.model_id),
        ("model_source.revision", recovery.model_source.revision, expected.revision),
    )
    for field, found, wanted in rows:
        if found != wanted:
            yield Problem(
                field=field, message=f"is not the artifact's, {_said(wanted)}", value=_said(found), cure=_CURE
            )
    if native.entries != recovery.entries:
        yield _other("entries", f"{len(native.entries)} allocations", f"{len(recovery.entries)} allocations")
    if native.residual_extents != recovery.residual_extents:
        yield _other("residual_extents", f"{len(native.residual_extents)}", f"{len(recovery.residual_extents)}")
    yield from _other_extents(native, recovery)


def _other_extents(native: NativeManifest, recovery: RecoveryManifest) -> Iterator[Problem]:
    packed = {(one.ptr, one.size, one.semantic_id, one.sha256.hex) for one in native.model_weight_extents}
    replayed = {(one.ptr, one.size, one.semantic_id, one.sha256.hex): one for one in recovery.replay_plan}
    wrong = sorted(replayed.keys() - packed)
    for key in islice(wrong, _MAX_NAMED):
        tensors = ", ".join(sorted({piece.tensor for piece in replayed[key].pieces}))
        yield Problem(
            field=f"replay_plan[{key[0]:#x}]",
            message="is no extent of the native manifest: pack and checkpoint would give other bytes",
            value=f"{tensors}, {key[1]} bytes, sha256:{key[3]}",
            cure="capture again",
        )
    if len(wrong) > _MAX_NAMED:
        yield Problem(field="replay_plan", message=f"has {len(wrong) - _MAX_NAMED} more such extents", cure="see above")
    if not wrong and len(packed) != len(replayed):
        yield _other("model extents", str(len(packed)), str(len(replayed)))


def _other(field: str, native: str, recovery: str) -> Problem:
    message = f"of the recovery manifest are not those of the native manifest, {native}"
    return Problem(field=field, message=message, value=recovery, cure="capture again")


def _identity(blob: Blob | None) -> tuple[int, Digest] | None:
    return (blob.bytes, blob.sha256) if blob is not None else None


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return f"{value[0]} bytes, {value[1]}"
    return "none" if value is None else str(value)


def _named(worker: str, problems: list[Problem]) -> tuple[Problem, ...]:
    return tuple(
        Problem(field=f"worker/{worker}: {one.field}", message=one.message, value=one.value, cure=one.cure)
        for one in problems
    )
