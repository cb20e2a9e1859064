"""Mark and sweep: what nothing refers to any more, and what dead processes left behind (``garbage.py`` finds it).

A pack is kept while any artifact or live service names its digest; the caller says which those are. Finding
them takes time, and a capture may begin meanwhile, so ``run_gc`` shuts operations out first, asks
again, and removes only what was in the plan *and* is garbage still. An interrupted sweep leaves nothing
half removed that could be taken for whole: records go before their packs, folders are renamed before they are emptied.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.points import reached
from coldsnap.errors import ColdsnapError, ResourceBusy
from coldsnap.store.admission import record_path
from coldsnap.store.faults import translated
from coldsnap.store.garbage import GcItem, find_garbage
from coldsnap.store.locks import try_hold
from coldsnap.store.payloads import PACK_SUFFIX, PayloadStore
from coldsnap.store.staging import PARTIAL_SUFFIX, sync_folder
from coldsnap.store.stateroot import StateRoot

__all__ = ["GcItem", "GcPlan", "GcReport", "KeptObject", "References", "plan_gc", "run_gc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class References:
    """What one artifact, live service or other user needs to be kept. ``label`` says which, for people."""

    label: str
    packs: frozenset[Digest] = frozenset()
    capsules: frozenset[Digest] = frozenset()
    roots: frozenset[Digest] = frozenset()

    def is_within(self, other: References) -> bool:
        """Whether ``other`` keeps all of this."""
        return self.packs <= other.packs and self.capsules <= other.capsules and self.roots <= other.roots


FindReferences = Callable[[], Iterable[References]]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptObject:
    """A pack or capsule that stays, and whose labels refer to it."""

    kind: str
    digest: Digest
    needed_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GcPlan:
    """What a sweep would remove now. ``unknown`` are names that coldsnap does not make, and never touches."""

    state_root: StateRoot
    find_references: FindReferences
    items: tuple[GcItem, ...]
    kept: tuple[References, ...]
    unknown: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        """What removing all items frees."""
        return sum(item.bytes for item in self.items)

    def kept_objects(self) -> tuple[KeptObject, ...]:
        """Every pack and capsule that is kept, with everybody who needs it: it goes when the last of them has gone."""
        users: dict[tuple[str, Digest], list[str]] = {}
        for one in self.kept:
            for kind, digests in (("pack", one.packs), ("capsule", one.capsules)):
                for digest in digests:
                    users.setdefault((kind, digest), []).append(one.label)
        found = sorted(users.items(), key=lambda item: (item[0][0], item[0][1].hex))
        return tuple(
            KeptObject(kind=kind, digest=digest, needed_by=tuple(sorted(labels))) for (kind, digest), labels in found
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GcReport:
    """What a sweep did. ``spared`` were in the plan, but came into use or could not be removed, with the reason."""

    removed: tuple[GcItem, ...]
    spared: tuple[tuple[GcItem, str], ...]

    @property
    def freed_bytes(self) -> int:
        """The bytes that were freed."""
        return sum(item.bytes for item in self.removed)


def plan_gc(state_root: StateRoot, find_references: FindReferences) -> GcPlan:
    """Find garbage and change nothing.

    ``find_references`` gives what must be kept; it is asked again by :func:`run_gc`. It must raise rather than
    leave out an artifact that it cannot read.
    """
    try:
        with state_root.not_in_use():
            quiet = True
    except ResourceBusy:
        quiet = False  # an operation runs: folders that look left over may be its own
    return _plan(state_root, find_references, quiet=quiet)


def run_gc(plan: GcPlan) -> GcReport:
    """Remove what is in the plan and is garbage still. Raises ResourceBusy while any operation runs."""
    root = plan.state_root
    removed: list[GcItem] = []
    spared: list[tuple[GcItem, str]] = []
    with root.not_in_use():
        reached("gc.shut")
        now = {item.path: item for item in _plan(root, plan.find_references, quiet=True).items}
        for item in plan.items:
            if item.path not in now:
                spared.append((item, "it is in use now, or gone already"))
                continue
            try:
                done = _remove(root, item)
            except ColdsnapError as error:
                spared.append((item, error.message))
                continue
            if done:
                removed.append(item)
            else:
                spared.append((item, "somebody is working on it"))
        for folder in sorted({item.path.parent for item in removed}):
            sync_folder(folder)
        reached("gc.swept")
    return GcReport(removed=tuple(removed), spared=tuple(spared))


def _plan(state_root: StateRoot, find_references: FindReferences, *, quiet: bool) -> GcPlan:
    references = tuple(find_references())
    unknown: list[Path] = []
    items = find_garbage(
        state_root,
        packs={digest.hex for one in references for digest in one.packs},
        capsules={digest.hex for one in references for digest in one.capsules},
        roots={digest.hex for one in references for digest in one.roots},
        unknown=unknown,
        quiet=quiet,
    )
    return GcPlan(
        state_root=state_root,
        find_references=find_references,
        items=tuple(items),
        kept=references,
        unknown=tuple(unknown),
    )


def _remove(root: StateRoot, item: GcItem) -> bool:
    """Remove one item; False when somebody holds it."""
    if item.kind == "pack":
        return _remove_pack(root, item.path)
    if item.path.is_dir() and not item.path.is_symlink():
        removed = _remove_folder(item.path)
        _remove_lock(root.locks / f"{item.kind}-{item.path.name}.lock")
        return removed
    if item.kind in ("partial", "lock"):
        return _remove_lock(item.path)
    _unlink(item.path)
    return True


def _remove_pack(root: StateRoot, path: Path) -> bool:
    digest = Digest.from_hex(path.name.removesuffix(PACK_SUFFIX))
    store = PayloadStore(root)
    try:
        with store.lock(digest, deadline_s=0.0):
            _unlink(record_path(path))  # first: a pack without a record is only proved again
            reached("gc.unproved")
            _unlink(path)
            _unlink(store.lock_path(digest))  # held, so whoever waits for it starts again with a new one
    except ResourceBusy:
        return False
    return True


def _remove_lock(path: Path) -> bool:
    with try_hold(path) as free:
        if free:
            _unlink(path)
        return free


def _remove_folder(path: Path) -> bool:
    with translated("remove", path):
        doomed = path
        if not path.name.endswith(PARTIAL_SUFFIX):
            doomed = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
            path.rename(doomed)
        reached("gc.unnamed")
        shutil.rmtree(doomed)
    return True


def _unlink(path: Path) -> None:
    with translated("remove", path):
        path.unlink(missing_ok=True)
