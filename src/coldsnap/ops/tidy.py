"""Taking things away: ``gc`` for what nobody needs, ``delete`` for one artifact and what only it needs.

Both print a plan first and act on the plan; both ask again at the last moment what is still needed, and
neither runs beside another operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from coldsnap.core.artifact import artifact_digest
from coldsnap.core.digest import Digest
from coldsnap.core.points import reached
from coldsnap.errors import ColdsnapError, ResourceBusy, UserError
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.containers import EndedContainer, ended_containers, remove_ended
from coldsnap.ops.copies import drop_copies, unused_copies
from coldsnap.ops.leases import Lease, find_references, forget, leases
from coldsnap.ops.overlay import drop_overlay, overlay_path, overlays
from coldsnap.ops.quarantine import clear_artifact
from coldsnap.ops.scratch import dead_scratch, remove_scratch
from coldsnap.ops.signing import signature_of
from coldsnap.ops.tools import Tools
from coldsnap.store.copies import MemoryCopies
from coldsnap.store.locks import try_hold
from coldsnap.store.staging import leftovers
from coldsnap.store.sweep import GcItem, GcPlan, GcReport, References, plan_gc, run_gc

__all__ = ["DeletePlan", "TidyPlan", "plan_delete", "plan_tidy", "run_delete", "run_tidy"]

_QUIET_S = 60.0


@dataclass(frozen=True, kw_only=True)
class TidyPlan:
    """What ``gc`` would do: drop leases of artifacts that are gone (only when asked), then sweep."""

    forgotten: tuple[Lease, ...]
    sweep: GcPlan
    scratch: tuple[GcItem, ...]
    orphans: tuple[GcItem, ...] = ()
    drafts: tuple[GcItem, ...] = ()
    copies: tuple[GcItem, ...] = ()
    containers: tuple[EndedContainer, ...] = ()

    @property
    def items(self) -> tuple[GcItem, ...]:
        """Everything that would go."""
        containers = (one.item for one in self.containers)
        return (*self.sweep.items, *self.scratch, *self.orphans, *self.drafts, *self.copies, *containers)


@dataclass(frozen=True, kw_only=True)
class DeletePlan:
    """What ``delete`` would do. ``shared`` are objects that other artifacts need and that stay.

    ``signature`` lies beside the descriptor and goes before it.
    """

    artifact: LoadedArtifact
    sweep: GcPlan
    shared: tuple[tuple[str, str], ...]
    signature: Path | None = None


def plan_tidy(tools: Tools, *, forget_missing: bool = False) -> TidyPlan:
    """Find what nobody needs, and change nothing."""
    gone = tuple(_gone(tools)) if forget_missing else ()

    def needed() -> tuple[References, ...]:
        return find_references(tools, without={one.artifact for one in _gone(tools)} if forget_missing else ())

    return TidyPlan(
        forgotten=gone,
        sweep=plan_gc(tools.state, needed),
        scratch=tuple(dead_scratch(tools.state)),
        orphans=tuple(_orphans(tools, without={one.artifact for one in gone})),
        drafts=tuple(_drafts(tools)),
        copies=tuple(_copies(tools)),
        containers=tuple(ended_containers(tools)),
    )


def run_tidy(tools: Tools, plan: TidyPlan) -> GcReport:
    """Do it. Raises ResourceBusy while another operation runs; a lease whose artifact came back is kept."""
    report = run_gc(plan.sweep)
    still_gone = {one.artifact for one in _gone(tools)}
    for one in plan.forgotten:
        if one.artifact in still_gone:
            forget(tools, one.artifact)
    reached("gc.forgotten")
    removed = tuple(item for item in plan.scratch if remove_scratch(item.path))
    orphans = _remove_orphans(tools, {item.path for item in plan.orphans}) if plan.orphans else ()
    drafts = tuple(item for item in plan.drafts if _remove_draft(item.path))
    drop_copies(tools, {Digest.from_hex(item.path.name) for item in plan.copies})
    copies = tuple(item for item in plan.copies if not item.path.exists())
    containers = tuple(one.item for one in remove_ended(tools, plan.containers))
    return replace(report, removed=(*report.removed, *removed, *orphans, *drafts, *copies, *containers))


def plan_delete(tools: Tools, path: Path) -> DeletePlan:
    """What deleting the artifact at ``path`` takes and leaves.

    Raises ResourceBusy while a service runs from it, UserError for a link: the descriptor that it leads to would stay,
    and name objects that are gone.
    """
    loaded = load_artifact(path)
    if path.is_symlink():
        target = path.resolve()
        raise UserError(
            f"{path} is a link to {target}",
            cure=f"delete that one: coldsnap delete {target}; the link is yours to remove",
            facts={"path": str(path), "target": str(target)},
        )

    def needed() -> tuple[References, ...]:
        # Asked again by the sweep, when no operation runs: a service may have started since the plan was made.
        users = [name for name, digest in _services(tools) if digest == loaded.digest]
        if users:
            raise ResourceBusy(
                f"{path} is in use by {', '.join(users)}",
                cure=f"stop it first: coldsnap stop {users[0]}",
                facts={"services": users},
            )
        return find_references(tools, without={loaded.digest})

    mine = {entry.sha256.hex for entry in loaded.packs().values()}
    mine |= {image.digest.hex for image in loaded.artifact.capsule.images}
    mine |= {unit.image_digest.hex for unit in loaded.artifact.launch.units if unit.image_digest is not None}
    for portable, overlay in overlays(tools):
        if portable == loaded.digest and overlay is not None:
            mine |= {image.digest.hex for image in overlay.artifact.capsule.images}
    sweep = plan_gc(tools.state, needed)
    items = tuple(item for item in sweep.items if item.path.name.split(".")[0] in mine)
    others = [one for one in leases(tools) if one.artifact != loaded.digest]
    return DeletePlan(
        artifact=loaded,
        sweep=replace(sweep, items=items),
        shared=tuple(
            (f"{digest}", one.path)
            for one in others
            for digest in (*one.packs, *one.capsules, *one.roots)
            if digest.hex in mine
        ),
        signature=signature_of(loaded),
    )


def run_delete(tools: Tools, plan: DeletePlan) -> GcReport:
    """Remove the objects first and the descriptor last, so that an interrupted delete can be run again.

    The signature goes right before the descriptor. The other way round an interruption would leave a file that no
    command finds again, beside whatever gets the name next; this way it leaves an artifact that is not signed any more,
    which whoever requires a signature refuses.

    The overlay of the artifact on this machine, and what is known of its failures, go with it. An operation that came
    between the objects and those leaves lease and descriptor as they are, and so does a service that it started: raises
    ResourceBusy then.
    """
    drop_copies(tools, {pack.sha256 for pack in plan.artifact.packs().values()})
    report = run_gc(plan.sweep)
    remove_ended(tools, ended_containers(tools))
    reached("delete.swept")
    with tools.state.not_in_use(deadline_s=_QUIET_S):
        plan.sweep.find_references()  # raises when a service runs from it now
        clear_artifact(tools, plan.artifact.digest)
        drop_overlay(tools, plan.artifact.digest)
        forget(tools, plan.artifact.digest)
        reached("delete.forgotten")
        if plan.signature is not None and signature_of(plan.artifact) == plan.signature:
            _unlink(plan.signature)
        _unlink(plan.artifact.path)
    return report


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path} could not be removed: {error.strerror}", cure="remove the file yourself", facts={"path": str(path)}
        ) from error


def _copies(tools: Tools) -> Iterator[GcItem]:
    """Copies of packs in memory that no service runs from."""
    copies = MemoryCopies(tools.state)
    for digest in unused_copies(tools):
        yield GcItem(
            kind="copy in memory",
            path=copies.folder(digest),
            bytes=copies.bytes(digest),
            reason="no service runs from it",
        )


def _drafts(tools: Tools) -> Iterator[GcItem]:
    """What killed captures left beside the descriptors that they were writing, outside the state root."""
    for one in leases(tools):
        path = Path(one.path)
        with suppress(ColdsnapError):  # the folder is gone, or is no concern of ours any more
            for draft in leftovers(path.parent, stem=f".{path.name}"):
                with try_hold(draft) as free:
                    size = draft.lstat().st_size if free else 0
                if free:
                    yield GcItem(kind="partial", path=draft, bytes=size, reason="its writer is gone")


def _remove_draft(path: Path) -> bool:
    with try_hold(path) as free:
        if free:
            path.unlink(missing_ok=True)
        return free


def _orphans(tools: Tools, without: Collection[Digest] = ()) -> Iterator[GcItem]:
    """Overlays and failure records of artifacts that have no lease here (those ``without`` count as having none)."""
    kept = {one.artifact for one in leases(tools)} - set(without)
    local: set[Digest] = set()
    for portable, overlay in overlays(tools):
        if portable not in kept:
            path = overlay_path(tools, portable)
            yield GcItem(kind="overlay", path=path, bytes=_bytes(path), reason="its artifact is gone")
        elif overlay is not None:
            local.add(artifact_digest(overlay.artifact))
    for path in sorted(tools.state.failures.glob("*.json")):
        if path.stem not in {digest.hex for digest in kept | local}:
            yield GcItem(kind="failures", path=path, bytes=_bytes(path), reason="its artifact is gone")


def _bytes(path: Path) -> int:
    """Its size; 0 when somebody else has removed it meanwhile."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _remove_orphans(tools: Tools, planned: set[Path]) -> tuple[GcItem, ...]:
    with tools.state.not_in_use():
        orphans = tuple(item for item in _orphans(tools) if item.path in planned)
        for item in orphans:
            item.path.unlink(missing_ok=True)
    return orphans


def _gone(tools: Tools) -> Iterator[Lease]:
    """Leases whose descriptor is gone and whose artifact no service runs from (it could not wake without its pack)."""
    used = {digest for _, digest in _services(tools)}
    known = leases(tools)
    leased = {one.artifact for one in known}
    return (one for one in known if one.is_missing(leased) and one.artifact not in used)


def _services(tools: Tools) -> Iterator[tuple[str, Digest | None]]:
    records = map(tools.services.load, tools.services.names())
    return ((record.name, record.artifact_digest) for record in records if record is not None)
