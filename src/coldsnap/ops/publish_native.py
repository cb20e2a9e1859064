"""The verb ``publish-native``: every distinct pack to a hub repository, and a descriptor that pins the commit.

What is missing there is hashed and uploaded, once each, and makes one commit. A pack's path there follows from its
digest and from nothing else. ``publication.py`` has the course.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.core.request import Operation as Verb
from coldsnap.core.request import OperationRequest
from coldsnap.errors import IntegrityError, Problem
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.operation import Outlet
from coldsnap.ops.publication import Published, plan_publication, run_publication
from coldsnap.ops.publishing import PublishPlan, publish_request
from coldsnap.ops.report import Advance
from coldsnap.ops.tools import Tools
from coldsnap.ship.base import Item, Kind, Outgoing, Stored, Written
from coldsnap.ship.names import HubName, is_commit, parse_hub

__all__ = ["AtHub", "plan_publish_native", "publish_native", "publish_packs_request"]

_FIELD = "policy.weights.native.repository"


@dataclass(frozen=True, kw_only=True, slots=True)
class AtHub:
    """Packs in a repository, at a commit that holds them all."""

    repository: str
    revision: str

    def __str__(self) -> str:
        return f"hf://{self.repository}, commit {self.revision}"

    def document(self) -> dict[str, Any]:
        """As JSON members."""
        return {"repository": self.repository, "revision": self.revision}


def publish_packs_request(
    loaded: LoadedArtifact, *, operation_id: str, to: HubName, output: Path, with_secrets: bool = False
) -> OperationRequest:
    """The request of a publication to ``to``; the revision it names is the branch that is written."""
    policy = {"weights": {"native": {"repository": to.repository, "revision": to.branch}}}
    return publish_request(
        loaded, Verb.PUBLISH_NATIVE, operation_id=operation_id, output=output, policy=policy, with_secrets=with_secrets
    )


def plan_publish_native(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> PublishPlan:
    """What would be sent; asks the hub, changes nothing. Raises Refused with every reason."""
    return plan_publication(tools, loaded, request, _packs(tools, loaded, request))


def publish_native(
    tools: Tools, loaded: LoadedArtifact, request: OperationRequest, *, outlet: Outlet | None = None
) -> Published[AtHub]:
    """Upload every pack that is missing there and write the new descriptor. Raises as ``run_publication``."""
    return run_publication(tools, loaded, request, _packs(tools, loaded, request), outlet=outlet)


def _packs(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> _Packs:
    native = request.policy.weights.native
    to = parse_hub(f"hf://{native.repository.removeprefix('hf://')}@{native.revision}", field=_FIELD)
    return _Packs(tools=tools, loaded=loaded, to=to)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packs:
    """All packs of an artifact, to a repository of a hub."""

    tools: Tools
    loaded: LoadedArtifact
    to: HubName

    what = "packs"

    @property
    def target(self) -> str:
        return str(self.to)

    def problems(self) -> Iterator[Problem]:
        if not self.loaded.packs():
            cure = "capture again with an engine whose model bytes can be packed"
            yield Problem(field="weights.model_payloads", message="names no pack", value="none", cure=cure)
        for pack in {pack.sha256: pack for pack in self.loaded.packs().values()}.values():
            if not self.tools.store.exists(pack.sha256):
                yield Problem(
                    field=f"weights.model_payloads[{pack.owner.id}]",
                    message="is not on this machine",
                    value=str(pack.sha256),
                    cure="publish from where it was captured, or `coldsnap materialize` the artifact first",
                )

    def objects(self) -> list[Outgoing]:
        """Every distinct pack once."""
        packs = {pack.sha256: pack.bytes for pack in self.loaded.packs().values()}
        return [
            Outgoing(item=Item(Kind.PACK, digest), bytes=size, path=self.tools.store.path(digest))
            for digest, size in packs.items()
        ]

    def look(self, items: Sequence[Item]) -> Mapping[Item, Stored | None]:
        hub = self.tools.remotes.hub(self.to)
        head = hub.head()
        return {item: hub.at(head).stat(item) if head is not None else None for item in items}

    def send(self, objects: Sequence[Outgoing], progress: Advance) -> Written:
        return self.tools.remotes.hub(self.to).write(objects, progress=progress)

    def address(self, written: Written) -> AtHub:
        if not is_commit(written.revision):
            raise IntegrityError(
                f"{self.to} gave {written.revision[:80]!r} as the commit of the packs",
                cure="a commit has 40 hex digits: is it a hub?",
                facts={"revision": written.revision[:80]},
            )
        return AtHub(repository=self.to.repository, revision=written.revision)

    def write_address(self, document: dict[str, Any], at: AtHub) -> None:
        document["weights"]["model_payloads"] |= at.document()
