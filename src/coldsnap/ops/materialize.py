"""Materialize: write the packs that are missing here, from a tree that was restored without them for this alone.

    gates -> which packs are missing -> a temporary recovery restore -> right answers? -> the engine's own writer
          -> each pack read back and proved -> (an overlay of the same tree) -> the tree is ended

The temporary restore has a fresh id, opens no port and is no service; whatever happens, an interruption included, it is
ended. Nothing that runs is touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from coldsnap.core.artifact import ObjectRecord
from coldsnap.core.digest import Digest
from coldsnap.core.drivers import admit_features, overlay_driver, required_features
from coldsnap.core.ladder import COUNTED, Rung, blame
from coldsnap.core.messages import MaterializeBody, Materialized, Verb
from coldsnap.core.points import reached
from coldsnap.core.policy import Materialize
from coldsnap.core.request import OperationRequest
from coldsnap.core.selection import Provider
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.errors import ColdsnapError, IntegrityError, PayloadRejected, Problem, Refused
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.assembly import NATIVE_MANIFEST
from coldsnap.ops.gates import refuse_unless_open, restore_gates
from coldsnap.ops.leases import lease
from coldsnap.ops.operation import Operation, Outlet, operation
from coldsnap.ops.overlaying import OverlayMade, capture_overlay, refuse_overlay_in_use
from coldsnap.ops.planning import choose_engine
from coldsnap.ops.prepare import worker_file
from coldsnap.ops.quarantine import remember_failure
from coldsnap.ops.temporary import TemporaryTree, temporary_tree
from coldsnap.ops.tools import Tools
from coldsnap.store.admission import admit_file

__all__ = ["MaterializePlan", "MaterializeResult", "PackOutcome", "materialize", "materialize_request", "plan_packs"]

_SPARE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class MaterializePlan:
    """The packs of an artifact by digest: those to write, and those that are here and proved."""

    missing: Mapping[Digest, ObjectRecord]
    present: Mapping[Digest, ObjectRecord]
    overlay: bool

    @property
    def provider(self) -> Provider:
        """What the temporary restore takes its model bytes from."""
        return Provider.RECOVERY if self.missing else Provider.NATIVE

    @property
    def missing_bytes(self) -> int:
        """What will be written."""
        return sum(pack.bytes for pack in self.missing.values())

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "packs": [
                {"owner": str(pack.owner), "sha256": str(digest), "bytes": pack.bytes, "outcome": outcome}
                for outcome, packs in (("to be written", self.missing), ("already here", self.present))
                for digest, pack in packs.items()
            ],
            "bytes": self.missing_bytes,
            "temporary_restore": self.provider.value if self.missing or self.overlay else None,
            "overlay": "to be made" if self.overlay else None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOutcome:
    """What became of one pack: ``written``, ``shared`` (somebody else wrote it meanwhile) or ``already here``."""

    owner: str
    sha256: Digest
    bytes: int
    outcome: str
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "owner": self.owner,
            "sha256": str(self.sha256),
            "bytes": self.bytes,
            "outcome": self.outcome,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class MaterializeResult:
    """Every pack of the artifact is here and proved. ``source`` is None when no tree had to be restored for it."""

    packs: tuple[PackOutcome, ...]
    overlay: OverlayMade | None
    source: str | None
    seconds: Mapping[str, float]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "packs": [pack.document() for pack in self.packs],
            "overlay": self.overlay.document() if self.overlay is not None else None,
            "source": self.source,
            "seconds": dict(self.seconds),
        }


def materialize_request(loaded: LoadedArtifact, *, operation_id: str) -> OperationRequest:
    """The temporary restore as a request: under a name that no service has, from the pinned checkpoint."""
    return activation_request(
        loaded, operation_id=operation_id, name=operation_id[:128], weights="recovery", materialize="off"
    )


def plan_packs(
    tools: Tools, loaded: LoadedArtifact, request: OperationRequest, *, overlay: bool = False
) -> MaterializePlan:
    """Pass every gate and find what is missing; changes nothing. A damaged pack counts as missing.

    Raises Refused with every reason, ResourceBusy for an overlay that a service runs from.
    """
    gates = restore_gates(tools, loaded, request, address=None)
    refuse_unless_open(f"{loaded.path} would not restore here", gates)
    if overlay:
        refuse_overlay_in_use(tools, loaded)
    present: dict[Digest, ObjectRecord] = {}
    missing: dict[Digest, ObjectRecord] = {}
    for pack in loaded.packs().values():
        (present if _is_here(tools, pack) else missing)[pack.sha256] = pack
    plan = MaterializePlan(missing=missing, present=present, overlay=overlay)
    problems = list(_problems(tools, loaded, plan))
    if problems:
        raise Refused(f"the packs of {loaded.path} cannot be materialized", problems)
    return plan


def materialize(
    tools: Tools,
    loaded: LoadedArtifact,
    request: OperationRequest,
    *,
    overlay: bool = False,
    outlet: Outlet | None = None,
) -> MaterializeResult:
    """Write the packs that are missing and prove them; with ``overlay`` also capture this machine's overlay.

    ``request`` is a ``materialize_request``. Raises Refused, AcceptanceFailed, IntegrityError for bytes that are not
    the captured ones (no file of theirs stays), OutOfSpace, and what the rooms below raise.
    """
    with tools.state.in_use(), operation(tools, request, outlet=outlet) as op:
        lease(tools, loaded.path, loaded.artifact)
        with op.span("gates"):
            plan = plan_packs(tools, loaded, request, overlay=overlay)
        reached("materialize.admitted")
        for pack in plan.missing.values():
            tools.store.set_aside(pack.sha256, pack.bytes)
        outcomes = [_outcome(pack, "already here") for pack in plan.present.values()]
        made: OverlayMade | None = None
        source = plan.provider.value if plan.missing or overlay else None
        if source is not None:
            try:
                written, made = _restored(tools, op, loaded, request, plan)
                outcomes += written
            except ColdsnapError as error:
                _count(tools, op, loaded, plan, error)
                raise
        result = MaterializeResult(packs=tuple(outcomes), overlay=made, source=source, seconds=op.seconds())
        op.succeed(result.document())
    return result


def _restored(
    tools: Tools, op: Operation, loaded: LoadedArtifact, request: OperationRequest, plan: MaterializePlan
) -> tuple[list[PackOutcome], OverlayMade | None]:
    reason = "packs are to be written" if plan.missing else "an overlay is to be made"
    with temporary_tree(tools, op, loaded, request, provider=plan.provider, reason=reason) as tree:
        written = [_write(tools, op, loaded, tree, pack) for pack in plan.missing.values()]
        made = capture_overlay(tools, op, loaded, tree) if plan.overlay else None
    return written, made


def _write(tools: Tools, op: Operation, loaded: LoadedArtifact, tree: TemporaryTree, pack: ObjectRecord) -> PackOutcome:
    """Ask the worker that has these bytes for the pack, then read the file back and prove it, believing nobody."""
    live = next(one for one in tree.workers if one.worker == pack.owner.id)
    manifest = worker_file(tree.prepared, pack.owner.id, NATIVE_MANIFEST)
    body = MaterializeBody(
        state_root=str(tools.state.path),
        native_manifest=str(manifest),
        pack_sha256=pack.sha256,
        pack_bytes=pack.bytes,
    )
    with op.span("materialize"), tools.reporter.phase(f"write the pack of {pack.owner.id}"):
        reply = live.call(Verb.MATERIALIZE, body, Materialized, deadline_s=tools.deadlines.export_s)
    reached("materialize.written")
    path = tools.store.path(pack.sha256)
    if (reply.pack.sha256, reply.pack.bytes, reply.pack.path) != (pack.sha256, pack.bytes, str(path)):
        raise IntegrityError(
            f"worker {pack.owner.id} says that it wrote {reply.pack.sha256} to {reply.pack.path}, "
            f"and was asked for {pack.sha256}",
            cure="report this: the engine's integration has another writer",
            facts={"expected": str(pack.sha256), "found": str(reply.pack.sha256)},
        )
    with (
        op.span("verify"),
        tools.reporter.phase(f"verify the pack of {pack.owner.id}", total_bytes=pack.bytes) as advance,
        admit_file(path, pack.sha256, pack.bytes, record=False, progress=advance),
    ):
        pass
    return _outcome(pack, "shared" if reply.shared else "written", reply.seconds)


def _outcome(pack: ObjectRecord, outcome: str, seconds: float = 0.0) -> PackOutcome:
    return PackOutcome(owner=str(pack.owner), sha256=pack.sha256, bytes=pack.bytes, outcome=outcome, seconds=seconds)


def _is_here(tools: Tools, pack: ObjectRecord) -> bool:
    """Whether the store has the pack, proved. Raises PayloadRejected for what is neither a pack nor a damaged one."""
    if not tools.store.exists(pack.sha256):
        return False
    try:
        with tools.store.admit(pack.sha256, pack.bytes):
            return True
    except PayloadRejected as error:
        if error.reason in ("size_mismatch", "digest_mismatch"):
            return False
        raise


def _problems(tools: Tools, loaded: LoadedArtifact, plan: MaterializePlan) -> Iterator[Problem]:
    plugin = choose_engine(tools.engines, loaded.artifact.launch.engine)
    if plan.overlay:
        yield from _overlay_problems(tools, loaded, plugin)
    if not loaded.packs():
        yield Problem(
            field="weights.model_payloads",
            message="names no pack, so there is none to write",
            value="none",
            cure="capture again with an engine whose model bytes can be packed",
        )
    if plan.missing and Materialize.REQUIRED.value not in plugin.supports.materialize:
        yield Problem(
            field="policy.weights.native.materialize",
            message=f"is not supported by engine {plugin.name}, whose integration has no writer of packs",
            value=Materialize.REQUIRED.value,
            cure="capture again, or copy the pack from where it is",
        )
    free = shutil.disk_usage(tools.state.path).free
    if plan.missing and plan.missing_bytes + _SPARE_BYTES > free:
        yield Problem(
            field="space",
            message=f"the missing packs have {plan.missing_bytes} bytes and {free} are free",
            value=str(tools.state.path),
            cure="free some space (`coldsnap gc --dry-run` shows what can go), or use another --state-root",
        )


def _overlay_problems(tools: Tools, loaded: LoadedArtifact, plugin: EnginePlugin) -> Iterator[Problem]:
    """Why this host cannot freeze the tree again, where another driver does that than the one that brings it back."""
    own = loaded.artifact.snapshot_driver.id
    driver = overlay_driver(own)
    if driver is own:
        return
    if driver.value not in plugin.supports.drivers:
        yield Problem(
            field="snapshot_driver.id",
            message=f"has no overlays with engine {plugin.name}: they are frozen by {driver.value}, which it has not",
            value=own.value,
            cure="leave --overlay out",
        )
        return
    needed = required_features(driver, loaded.artifact.launch.execution)
    for problem in admit_features(needed, tools.probe(needed)):
        yield replace(problem, cure=f"leave --overlay out: {driver.value} freezes an overlay of {own.value}")


def _count(tools: Tools, op: Operation, loaded: LoadedArtifact, plan: MaterializePlan, error: ColdsnapError) -> None:
    rung = Rung.RECOVERY if plan.provider is Provider.RECOVERY else Rung.NATIVE
    if (
        op.phase not in ("unpack", "thaw", "resume", "hydrate", "accept")
        or blame(error, rung=rung, phase=op.phase) not in COUNTED
    ):
        return
    try:
        remember_failure(tools, loaded.digest, loaded.path, operation_id=op.request.id, rung=rung, error=error)
    except ColdsnapError as failure:
        error.add_note(f"the failure could not be recorded: {failure.message}")
