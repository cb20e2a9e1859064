"""Prepare: every gate, then everything a restore needs, proved and ready to read. No workload is touched.

Offline gates come first and all reasons are reported at once; only then does a byte move. A second call finds
its own records and costs a few file look-ups, which is why ``restore`` always prepares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coldsnap.capsule.image import RESIDUAL
from coldsnap.capsule.prepared import Prepared, ensure_prepared
from coldsnap.core.artifact import ObjectRecord
from coldsnap.core.manifest import MANIFEST_LIMIT_BYTES, parse_native_manifest, parse_recovery_manifest
from coldsnap.core.messages import PackSource, WakeBody
from coldsnap.core.points import reached
from coldsnap.core.policy import Materialize
from coldsnap.core.request import OperationRequest, TransferPath
from coldsnap.core.selection import Provider
from coldsnap.errors import IntegrityError, PayloadRejected
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.assembly import NATIVE_MANIFEST, RECOVERY_MANIFEST, capsule_folder
from coldsnap.ops.checkpoints import check_pinned_checkpoint
from coldsnap.ops.copies import copies_there
from coldsnap.ops.fetching import Fetched, fetch_missing
from coldsnap.ops.gates import refuse_unless_open, restore_gates
from coldsnap.ops.operation import Operation
from coldsnap.ops.planning import choose_engine
from coldsnap.ops.providers import decide_provider, pack_paths, set_aside_damaged
from coldsnap.ops.roots import bring_roots
from coldsnap.ops.tools import Tools
from coldsnap.store.admission import admit_file, record_path
from coldsnap.store.documents import read_private

__all__ = ["PreparedArtifact", "make_ready", "prepare_artifact", "wake_bodies", "worker_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedArtifact:
    """An artifact ready to be restored here. ``from_record`` says that every proof was an earlier one.

    ``packs``: the file each worker's pack is read from, the store's or one that the request staged. ``staged``: the
    copy of it in memory, for workers that have one. ``materialize``: whether the workers write the packs again after a
    recovery. ``fetched``: what was not on this machine.
    """

    loaded: LoadedArtifact
    capsules: Mapping[str, Prepared]
    source: PackSource
    reason: str
    from_record: bool
    packs: Mapping[str, Path] = field(default_factory=dict)
    staged: Mapping[str, Path] = field(default_factory=dict)
    materialize: Materialize = Materialize.OFF
    transfer_path: TransferPath = TransferPath.AUTO
    fetched: tuple[Fetched, ...] = ()


def prepare_artifact(
    tools: Tools,
    op: Operation,
    loaded: LoadedArtifact,
    request: OperationRequest,
    *,
    address: tuple[str, int] | None = None,
    ignore_quarantine: bool = False,
) -> PreparedArtifact:
    """Pass every gate, unpack what is not unpacked, prove what is not proved. Idempotent.

    ``address`` is where it is going to serve; without one the port is not looked at. A running service's artifact is
    prepared with ``ignore_quarantine``: its tree came back already.

    Raises Refused with every reason, PayloadRejected for a damaged pack or capsule, OutOfSpace.
    """
    with op.span("gates"):
        gates = restore_gates(tools, loaded, request, address=address, ignore_quarantine=ignore_quarantine)
        refuse_unless_open(f"{loaded.path} would not restore here", gates)
        decision = decide_provider(tools, loaded, request)
    return make_ready(tools, op, loaded, request, provider=decision.provider, reason=decision.reason)


def make_ready(
    tools: Tools,
    op: Operation,
    loaded: LoadedArtifact,
    request: OperationRequest,
    *,
    provider: Provider,
    reason: str,
    read_checkpoint: bool = True,
) -> PreparedArtifact:
    """``prepare_artifact`` behind its gates, with a provider that is already chosen.

    For a recovery, ``read_checkpoint`` says whether all its bytes are proved now, or only its headers.
    """
    reached("prepare.admitted")
    fetched = fetch_missing(tools, op, loaded, request, provider=provider)
    bring_roots(tools, op, request.launch, request.runtime)
    packs = pack_paths(tools, loaded, request)
    with op.span("unpack") as span:
        capsules = {unit.id: _unpack(tools, loaded, unit.id) for unit in loaded.artifact.launch.units}
        fresh = [capsule for capsule in capsules.values() if not capsule.from_record]
        span.set(artifact=loaded.digest, bytes=sum(file.bytes for capsule in fresh for file in capsule.files))
    reached("prepare.ready")
    from_record = not fetched and all(capsule.from_record for capsule in capsules.values())
    if provider is Provider.NATIVE:
        with op.span("admit") as span:
            num_bytes = 0
            for worker, pack in loaded.packs().items():
                known = _admit(tools, capsules, loaded, worker, pack, packs[worker])
                num_bytes += 0 if known else pack.bytes
                from_record &= known
            span.set(bytes=num_bytes)
    else:
        with op.span("checkpoint"):
            _check_checkpoints(tools, loaded, request, capsules, read_all=read_checkpoint)
    reached("prepare.proved")
    return PreparedArtifact(
        loaded=loaded,
        capsules=capsules,
        source=PackSource(provider.value),
        reason=reason,
        from_record=from_record,
        packs=packs,
        staged=copies_there(tools, loaded.packs()) if provider is Provider.NATIVE else {},
        materialize=request.policy.weights.native.materialize,
        transfer_path=request.extension.transfer_path if request.extension is not None else TransferPath.AUTO,
        fetched=fetched,
    )


def wake_bodies(tools: Tools, prepared: PreparedArtifact, *, source: PackSource | None = None) -> dict[str, WakeBody]:
    """What each worker needs to fill its memory again. ``source`` overrides the decided one."""
    launch = prepared.loaded.artifact.launch
    plugin = choose_engine(tools.engines, launch.engine)
    commands = {unit.id: unit.command for unit in launch.units}
    packs = prepared.loaded.packs()
    bodies = {}
    for worker in launch.execution.workers:
        folder = prepared.capsules[worker.unit].path
        residual = prepared.loaded.worker_object(worker.id, RESIDUAL)
        pack = packs.get(worker.id)
        bodies[worker.id] = WakeBody(
            source=source or prepared.source,
            native_manifest=str(worker_file(prepared, worker.id, NATIVE_MANIFEST)),
            recovery_manifest=str(worker_file(prepared, worker.id, RECOVERY_MANIFEST)),
            pack=str(prepared.packs[worker.id]) if pack is not None else None,
            pack_sha256=pack.sha256 if pack is not None else None,
            pack_bytes=pack.bytes if pack is not None else None,
            staged_pack=str(prepared.staged[worker.id]) if worker.id in prepared.staged else None,
            residual=str(folder / residual.path) if residual is not None else None,
            residual_sha256=residual.sha256 if residual is not None else None,
            model_path=str(plugin.read_command(commands[worker.unit]).model),
            state_root=str(tools.state.path),
            materialize=prepared.materialize,
            transfer_path=prepared.transfer_path,
        )
    return bodies


def _check_checkpoints(
    tools: Tools,
    loaded: LoadedArtifact,
    request: OperationRequest,
    capsules: Mapping[str, Prepared],
    *,
    read_all: bool,
) -> None:
    """Before anything is evicted for a recovery, see that each worker's pinned checkpoint is where it will read it."""
    plugin = choose_engine(tools.engines, loaded.artifact.launch.engine)
    units = {unit.id: unit for unit in loaded.artifact.launch.units}
    mounts = {unit.id: unit.mounts for unit in request.launch.units}
    for worker in loaded.artifact.launch.execution.workers:
        unit = units[worker.unit]
        path = capsules[unit.id].path / _object(loaded, worker.id, RECOVERY_MANIFEST).path
        manifest = parse_recovery_manifest(read_private(path, MANIFEST_LIMIT_BYTES))
        check_pinned_checkpoint(manifest, plugin.read_command(unit.command).model, mounts[unit.id], read_all=read_all)


def worker_file(prepared: PreparedArtifact, worker: str, role: str) -> Path:
    """A worker's file of ``role`` in the prepared capsule. Raises IntegrityError for an artifact that names none."""
    unit = next(one.unit for one in prepared.loaded.artifact.launch.execution.workers if one.id == worker)
    return prepared.capsules[unit].path / _object(prepared.loaded, worker, role).path


def _unpack(tools: Tools, loaded: LoadedArtifact, unit: str) -> Prepared:
    digest, expected = loaded.capsule_digest(unit), loaded.expected_files(unit)
    total = sum(size for size, _ in expected.values())
    with tools.reporter.phase(f"unpack capsule {unit}", total_bytes=total) as advance:
        return ensure_prepared(tools.state, capsule_folder(tools, digest), digest, expected, progress=advance)


def _admit(
    tools: Tools, capsules: Mapping[str, Prepared], loaded: LoadedArtifact, worker: str, pack: ObjectRecord, path: Path
) -> bool:
    """Prove one pack, by its earlier record or in full; returns whether the record was believed.

    Raises PayloadRejected. A damaged object of the store is set aside then.
    """
    extents = None
    if not record_path(path).exists():
        # Only a first proof pays for reading the extent digests, which let it run on every core.
        unit = next(one.unit for one in loaded.artifact.launch.execution.workers if one.id == worker)
        manifest = parse_native_manifest(
            read_private(capsules[unit].path / _object(loaded, worker, NATIVE_MANIFEST).path, MANIFEST_LIMIT_BYTES)
        )
        extents = [(one.offset, one.size, one.sha256) for one in manifest.model_weight_extents]
    with tools.reporter.phase(f"verify pack of {worker}", total_bytes=pack.bytes) as advance:
        if path != tools.store.path(pack.sha256):
            with admit_file(path, pack.sha256, pack.bytes, extents=extents, progress=advance) as staged:
                return staged.from_record
        try:
            with tools.store.admit(pack.sha256, pack.bytes, extents=extents, progress=advance) as admitted:
                return admitted.from_record
        except PayloadRejected as error:
            set_aside_damaged(tools, {worker: pack}, error)
            raise


def _object(loaded: LoadedArtifact, worker: str, role: str) -> ObjectRecord:
    found = loaded.worker_object(worker, role)
    if found is None:
        raise IntegrityError(
            f"the artifact names no {role} for worker {worker}",
            cure="it was not written by this version of coldsnap: capture again",
            facts={"worker": worker, "role": role},
        )
    return found
