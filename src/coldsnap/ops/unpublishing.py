"""Taking back what was published: manifests from registries, packs from the head of a hub's branch.

    what does the artifact name elsewhere? -> which of it do other artifacts of this host name too? -> the rest goes

What another descriptor that this host knows names at the same place stays, and so does everything when such a
descriptor cannot be read: nothing goes on a guess. Of descriptors that were copied to others nobody here knows.
Asking again after an interruption finds what is gone already, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coldsnap.core.artifact import SnapshotArtifact
from coldsnap.errors import ColdsnapError, Problem, Refused, UserError
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.leases import leases
from coldsnap.ops.tools import Tools
from coldsnap.ship.base import Item, Kind
from coldsnap.ship.names import HubName, ImageReference, hub_repository, parse_reference

__all__ = ["PublishedPart", "UnpublishPlan", "plan_unpublish", "run_unpublish"]

_HISTORY = "older commits of the hub keep it; its page can remove a file from history, or the whole repository"
_BLOBS = "the registry frees its blobs when it collects garbage"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPart:
    """An object at a place elsewhere. ``kept_by`` are descriptors that name it there too, so that it stays.

    ``outcome`` is what became of it, empty in a plan: ``deleted`` or ``was not there``.
    """

    item: Item
    place: str
    kept_by: tuple[str, ...] = ()
    outcome: str = ""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": self.item.kind.value,
            "sha256": str(self.item.digest),
            "place": self.place,
            "kept_by": list(self.kept_by),
            "outcome": self.outcome or None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpublishPlan:
    """What an artifact has elsewhere. ``notes`` say what no deletion reaches."""

    artifact: LoadedArtifact
    parts: tuple[PublishedPart, ...]

    @property
    def going(self) -> tuple[PublishedPart, ...]:
        """What would be deleted."""
        return tuple(part for part in self.parts if not part.kept_by)

    @property
    def notes(self) -> tuple[str, ...]:
        """What stays at a server whatever is deleted, in a sentence each."""
        kinds = {part.item.kind for part in self.going}
        return tuple(note for kind, note in ((Kind.PACK, _HISTORY), (Kind.MANIFEST, _BLOBS)) if kind in kinds)


def plan_unpublish(tools: Tools, loaded: LoadedArtifact) -> UnpublishPlan:
    """What deleting the published parts takes and leaves. Asks no server."""
    users: dict[tuple[str, Item], list[str]] = {}
    unread: list[str] = []
    for one in leases(tools):
        if one.artifact == loaded.digest:
            continue
        try:
            other = load_artifact(Path(one.path))
        except ColdsnapError:
            unread.append(f"{one.path}, which cannot be read (`coldsnap gc --forget-missing` lets go of what is gone)")
            continue
        for place, item in _published(other.artifact):
            users.setdefault((_place(place), item), []).append(one.path)
    parts = []
    for place, item in _published(loaded.artifact):
        kept_by = sorted({*users.get((_place(place), item), ()), *unread})
        parts.append(PublishedPart(item=item, place=place, kept_by=tuple(kept_by)))
    return UnpublishPlan(artifact=loaded, parts=tuple(parts))


def run_unpublish(tools: Tools, plan: UnpublishPlan) -> tuple[PublishedPart, ...]:
    """Delete it: manifests first, then packs in one commit. What is kept is given back as it was planned.

    No operation runs on this host meanwhile, or a publication could find an object there, which then goes, and commit a
    descriptor that names it. What came to be named since the plan was made stays.

    Raises Refused when servers may not be asked, RemoteError (``unsupported`` from a server that deletes nothing),
    ResourceBusy while an operation runs.
    """
    with tools.state.not_in_use():
        now = {(part.place, part.item): part.kept_by for part in plan_unpublish(tools, plan.artifact).parts}
        parts = tuple(replace(part, kept_by=part.kept_by or now[part.place, part.item]) for part in plan.parts)
        return _run(tools, UnpublishPlan(artifact=plan.artifact, parts=parts))


def _run(tools: Tools, plan: UnpublishPlan) -> tuple[PublishedPart, ...]:
    if any(part.item.kind is Kind.PACK for part in plan.going):
        _repository(plan.artifact)  # before anything is deleted
    if plan.going and tools.remotes.offline:
        problem = Problem(
            field="--scope",
            message=f"names servers, which may not be asked: {tools.remotes.offline}",
            cure="run it without offline mode, or with --scope local",
        )
        raise Refused(f"the published parts of {plan.artifact.path}", [problem])
    done: dict[PublishedPart, str] = {}
    for part in plan.going:
        if part.item.kind is Kind.MANIFEST:
            done[part] = _outcome(_remove_manifest(tools, part))
    packs = [part for part in plan.going if part.item.kind is Kind.PACK]
    payloads = plan.artifact.artifact.weights.model_payloads
    if packs and payloads is not None:
        from coldsnap.ship.removing import remove_packs

        hub = tools.remotes.hub(_repository(plan.artifact))
        removed = remove_packs(hub, [part.item for part in packs])
        done |= {part: _outcome(part.item in removed) for part in packs}
    return tuple(replace(part, outcome=done.get(part, "")) for part in plan.parts)


def _repository(loaded: LoadedArtifact) -> HubName:
    payloads = loaded.artifact.weights.model_payloads
    text = payloads.repository if payloads is not None else ""
    if (found := hub_repository(text)) is None:
        message = f"{loaded.path} names {text[:200]!r}, which is no repository of a hub"
        raise UserError(message, cure="somebody edited it: get the descriptor again from who published it")
    return found


def _outcome(was_there: bool) -> str:
    return "deleted" if was_there else "was not there"


def _remove_manifest(tools: Tools, part: PublishedPart) -> bool:
    from coldsnap.ship.removing import remove_manifest

    found = parse_reference(part.place)
    assert found is not None  # noqa: S101 - `_published` names no other
    return remove_manifest(tools.remotes, found.repository, found.digest)


def _place(text: str) -> str:
    """One spelling of a place that ``_published`` gave: what is kept by another name is not deleted by this one."""
    name = parse_reference(text)
    found = name.repository if name is not None else hub_repository(text)
    return found.place if found is not None else text


def _published(artifact: SnapshotArtifact) -> Iterator[tuple[str, Item]]:
    """(place, object) of everything that a descriptor names elsewhere, each once."""
    seen: set[tuple[str, Item]] = set()
    for image in artifact.capsule.images:
        if isinstance(parse_reference(image.reference), ImageReference):
            seen.add((image.reference, Item(Kind.MANIFEST, image.digest)))
    payloads = artifact.weights.model_payloads
    if payloads is not None and payloads.repository:
        place = f"hf://{payloads.repository.removeprefix('hf://')}"
        seen |= {(place, Item(Kind.PACK, one.sha256)) for one in payloads.objects}
    yield from sorted(seen, key=lambda one: (one[1].kind is Kind.PACK, one[0], one[1]))
