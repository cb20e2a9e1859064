"""The verb ``publish``: every unit's capsule to a registry by digest, and a descriptor that says where.

Each capsule is opened first, so that its digest binds every blob; a manifest is sent after its blobs; references in the
new descriptor end in the digest. ``publication.py`` has the course.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.capsule.image import open_capsule
from coldsnap.capsule.layout import blob_path
from coldsnap.core.request import Operation as Verb
from coldsnap.core.request import OperationRequest
from coldsnap.errors import Problem
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.assembly import capsule_folder
from coldsnap.ops.operation import Outlet
from coldsnap.ops.publication import Published, plan_publication, run_publication
from coldsnap.ops.publishing import PublishPlan, publish_request
from coldsnap.ops.report import Advance
from coldsnap.ops.tools import Tools
from coldsnap.ship.base import Item, Kind, Outgoing, Stored, Written
from coldsnap.ship.names import RegistryName, parse_reference, parse_registry
from coldsnap.ship.registry import Registry

__all__ = ["AtRegistry", "plan_publish", "publish", "publish_capsules_request"]

_FIELD = "policy.capsule.repository"


@dataclass(frozen=True, kw_only=True, slots=True)
class AtRegistry:
    """Capsules in the repository ``to``: the reference of each unit's, which ends in its digest."""

    to: RegistryName
    references: Mapping[str, str]

    def __str__(self) -> str:
        return str(self.to)

    def document(self) -> dict[str, Any]:
        """As JSON members."""
        return {"to": str(self.to), "references": dict(self.references)}


def publish_capsules_request(
    loaded: LoadedArtifact, *, operation_id: str, to: RegistryName, output: Path, with_secrets: bool = False
) -> OperationRequest:
    """The request of a publication to ``to``."""
    policy = {"capsule": {"repository": str(to)}}
    return publish_request(
        loaded, Verb.PUBLISH, operation_id=operation_id, output=output, policy=policy, with_secrets=with_secrets
    )


def plan_publish(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> PublishPlan:
    """What would be sent; asks the registry, changes nothing. Raises Refused with every reason."""
    return plan_publication(tools, loaded, request, _capsules(tools, loaded, request))


def publish(
    tools: Tools, loaded: LoadedArtifact, request: OperationRequest, *, outlet: Outlet | None = None
) -> Published[AtRegistry]:
    """Push every capsule that is missing there and write the new descriptor. Raises as ``run_publication``."""
    return run_publication(tools, loaded, request, _capsules(tools, loaded, request), outlet=outlet)


def _capsules(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> _Capsules:
    to = parse_registry(request.policy.capsule.repository, field=_FIELD)
    return _Capsules(tools=tools, loaded=loaded, to=to)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Capsules:
    """All capsules of an artifact, to a repository of a registry."""

    tools: Tools
    loaded: LoadedArtifact
    to: RegistryName

    what = "capsules"

    @property
    def target(self) -> str:
        return str(self.to)

    def problems(self) -> Iterator[Problem]:
        for unit in self.loaded.artifact.launch.units:
            digest = self.loaded.capsule_digest(unit.id)
            if not capsule_folder(self.tools, digest).is_dir():
                yield Problem(
                    field=f"capsule.images[{unit.id}]",
                    message="is not on this machine",
                    value=str(digest),
                    cure="publish from where it was captured, or `coldsnap prepare` the artifact first",
                )

    def objects(self) -> list[Outgoing]:
        """Every blob of every capsule once, and each manifest after its blobs."""
        found: dict[Item, Outgoing] = {}
        for unit in self.loaded.artifact.launch.units:
            folder = capsule_folder(self.tools, self.loaded.capsule_digest(unit.id))
            (manifest, manifest_bytes), *blobs = open_capsule(folder, self.loaded.capsule_digest(unit.id)).blobs
            for kind, digest, size in (
                *((Kind.BLOB, digest, size) for digest, size in blobs),
                (Kind.MANIFEST, manifest, manifest_bytes),
            ):
                item = Item(kind, digest)
                found.setdefault(item, Outgoing(item=item, bytes=size, path=blob_path(folder, digest)))
        return list(found.values())

    def look(self, items: Sequence[Item]) -> Mapping[Item, Stored | None]:
        registry = self._registry()
        return {item: registry.stat(item) for item in items}

    def send(self, objects: Sequence[Outgoing], progress: Advance) -> Written:
        return self._registry().write(objects, progress=progress)

    def address(self, written: Written) -> AtRegistry:
        units = self.loaded.artifact.launch.units
        references = {unit.id: self.to.reference(self.loaded.capsule_digest(unit.id)) for unit in units}
        return AtRegistry(to=self.to, references=references)

    def write_address(self, document: dict[str, Any], at: AtRegistry) -> None:
        for image in document["capsule"]["images"]:
            image["reference"] = at.references[image["unit"]]

    def _registry(self) -> Registry:
        """The target; where these capsules are in the same registry already, blobs are mounted from."""
        known = (parse_reference(image.reference) for image in self.loaded.artifact.capsule.images)
        beside = {one.repository.path for one in known if one is not None and one.repository.host == self.to.host}
        return self.tools.remotes.registry(self.to, neighbours=sorted(beside), records=self.tools.state.staging)
