"""From where the capsules and packs of an artifact could be had: decided from names, asking only peers.

    a pack      peers, else the hub repository at its pinned commit
    a capsule   peers, else the registry of the artifact's own reference

``explain``, the gates and the choice of a provider ask here; a hub or registry is asked by ``fetching.py`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from coldsnap.capsule.layout import DOCUMENT_LIMIT_BYTES
from coldsnap.core.digest import Digest
from coldsnap.core.request import OperationRequest
from coldsnap.errors import ColdsnapError, PayloadRejected, Problem, Refused
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.report import Advance
from coldsnap.ops.tools import Tools
from coldsnap.ship.base import Item, Kind, Source
from coldsnap.ship.faults import remote_error
from coldsnap.ship.limits import retried
from coldsnap.ship.names import hub_repository, is_commit, parse_reference
from coldsnap.ship.pull import pulled
from coldsnap.ship.wrappers import FallOver
from coldsnap.store.locks import hold
from coldsnap.store.staging import StagedFile

__all__ = [
    "Origin",
    "Sources",
    "capsule_origin",
    "capsule_sources",
    "pack_origin",
    "pack_sources",
    "packs_at_peers",
]

_LOCK_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """From where something could be had. ``why_not`` is empty when it could, and else says what is in the way."""

    place: str
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Who may be asked for an object: peers, nearest first, and the place that the artifact names."""

    tools: Tools
    near: tuple[Source, ...]
    far: Source | None

    @property
    def name(self) -> str:
        """All of them."""
        return ", else ".join(source.name for source in (*self.near, *((self.far,) if self.far is not None else ())))

    @contextmanager
    def pulled(self, item: Item, size: int | None, folder: Path, *, progress: Advance) -> Iterator[StagedFile]:
        """As ``ship.pull.pulled``, waiting for whoever brings the same object for another capsule or image.

        After other bytes or another size than was asked for each source is tried alone.

        Without a ``size`` it is what each source says, which may be no more than that of a document.
        """
        candidates = self._candidates()
        limits = self.tools.remotes.limits
        lock = self.tools.state.locks / f"fetch-{item.digest.hex}.lock"
        with ExitStack() as stack:
            stack.enter_context(hold(lock, deadline_s=_LOCK_S, purpose=f"fetching {item}"))
            for number, source in enumerate(candidates, start=1):
                try:
                    wanted = size if size is not None else self._stated_bytes(source, item)
                    staged = stack.enter_context(pulled(source, item, wanted, folder, limits=limits, progress=progress))
                except PayloadRejected as error:
                    if number == len(candidates):
                        raise
                    self.tools.reporter.warn(error.message)
                else:
                    break
            yield staged

    def _stated_bytes(self, source: Source, item: Item) -> int:
        found = retried(self.tools.remotes.limits, lambda: source.stat(item))
        if found is None:
            raise remote_error("not_found", f"{source.name} has no {item}", place=source.name)
        if found.bytes > DOCUMENT_LIMIT_BYTES:
            message = f"{source.name} has {item} with {found.bytes} bytes; the limit is {DOCUMENT_LIMIT_BYTES}"
            raise PayloadRejected("size_mismatch", message, cure="it is no capsule's; publish it again")
        return found.bytes

    def _candidates(self) -> list[Source]:
        """All together, standing in for each other; then the place the artifact names, then each peer."""
        far = [self.far] if self.far is not None else []
        everybody = [*self.near, *far]
        if len(everybody) == 1:
            return everybody
        return [FallOver(everybody, on_fault=self._on_fault), *far, *(self.near if len(self.near) > 1 else ())]

    def _on_fault(self, source: Source, error: ColdsnapError) -> None:
        self.tools.reporter.warn(f"{source.name}: {error.message}")


def pack_origin(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> Origin:
    """The repository for packs that no peer has."""
    repository, revision = _repository(loaded, request)
    if not repository:
        return Origin(place="", why_not="no repository is named")
    if (name := hub_repository(repository)) is None:
        return Origin(place="", why_not=f"{repository[:200]!r} is no repository of a hub")
    place = f"hf://{name.repository}@{revision}"
    if not is_commit(revision):
        return Origin(place=place, why_not=f"revision {revision} is no commit of 40 hex digits, so it can move")
    return Origin(place=place, why_not=tools.remotes.offline)


def packs_at_peers(tools: Tools, loaded: LoadedArtifact) -> Mapping[Digest, str]:
    """The artifact's packs that a peer has by name and size, and which peer. They are proved when they are fetched."""
    found: dict[Digest, str] = {}
    peers = tools.remotes.near()
    for pack in loaded.packs().values():
        for peer in peers:
            if _holds(tools, peer, Item(Kind.PACK, pack.sha256), pack.bytes):
                found.setdefault(pack.sha256, peer.name)
    return found


def capsule_origin(tools: Tools, loaded: LoadedArtifact, unit: str) -> Origin:
    """From where a unit's capsule could be had."""
    item = Item(Kind.MANIFEST, loaded.capsule_digest(unit))
    for peer in tools.remotes.near():
        if _holds(tools, peer, item, None):
            return Origin(place=peer.name)
    reference = _reference(loaded, unit)
    if parse_reference(reference) is None:
        return Origin(place="", why_not="the artifact names no registry for it")
    return Origin(place=reference, why_not=tools.remotes.offline)


def pack_sources(tools: Tools, loaded: LoadedArtifact, request: OperationRequest, item: Item, size: int) -> Sources:
    """Who may be asked for a pack. Raises Refused when nobody is left to ask."""
    origin = pack_origin(tools, loaded, request)
    repository, revision = _repository(loaded, request)
    name = hub_repository(repository) if not origin.why_not else None
    far = tools.remotes.hub(name, revision=revision) if name is not None else None
    near = tuple(peer for peer in tools.remotes.near() if _holds(tools, peer, item, size))
    return _sources(tools, near, far, "weights.model_payloads", item, origin)


def capsule_sources(tools: Tools, loaded: LoadedArtifact, unit: str) -> Sources:
    """Who may be asked for a unit's capsule. Raises Refused when nobody is left to ask."""
    parsed = parse_reference(_reference(loaded, unit))
    online = parsed is not None and not tools.remotes.offline
    far = tools.remotes.registry(parsed.repository) if parsed is not None and online else None
    item = Item(Kind.MANIFEST, loaded.capsule_digest(unit))
    near = tuple(peer for peer in tools.remotes.near() if _holds(tools, peer, item, None))
    return _sources(tools, near, far, f"capsule.images[{unit}]", item, capsule_origin(tools, loaded, unit))


def _sources(
    tools: Tools, near: tuple[Source, ...], far: Source | None, field: str, item: Item, origin: Origin
) -> Sources:
    if near or far is not None:
        return Sources(tools=tools, near=near, far=far)
    problem = Problem(
        field=field,
        message=f"is not on this machine, and {origin.why_not}",
        value=str(item.digest),
        cure=f"fetch it from {origin.place} once that is allowed" if origin.place else "copy it here, or publish it",
    )
    raise Refused(f"{item} cannot be fetched", [problem])


def _holds(tools: Tools, peer: Source, item: Item, size: int | None) -> bool:
    if peer.name in tools.remotes.told:
        return False  # each question to one that does not answer takes as long as it is waited for
    try:
        found = peer.stat(item)
    except ColdsnapError as error:
        tools.remotes.told.add(peer.name)
        tools.reporter.warn(f"--peer {peer.name} is passed by: {error.message}")
        return False
    return found is not None and size in (None, found.bytes)


def _repository(loaded: LoadedArtifact, request: OperationRequest) -> tuple[str, str]:
    """(repository, revision): the request's own, else the artifact's."""
    native, payloads = request.policy.weights.native, loaded.artifact.weights.model_payloads
    if native.repository:
        return native.repository, native.revision
    return (payloads.repository, payloads.revision) if payloads is not None else ("", "")


def _reference(loaded: LoadedArtifact, unit: str) -> str:
    return next(image.reference for image in loaded.artifact.capsule.images if image.unit == unit)
