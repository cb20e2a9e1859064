"""The course of a publication, whatever is published and wherever to.

gates -> what is missing there is sent -> a new descriptor that says where. What differs between capsules
      (``publish.py``) and packs (``publish_native.py``) is a ``Publication``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from coldsnap.core.artifact import artifact_document
from coldsnap.core.digest import Digest
from coldsnap.core.request import OperationRequest
from coldsnap.errors import Problem
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.operation import Outlet, operation
from coldsnap.ops.publishing import (
    PublishedObject,
    PublishPlan,
    alone,
    check_online,
    check_publish,
    commit_descriptor,
    outcomes,
    planned,
)
from coldsnap.ops.report import Advance
from coldsnap.ops.tools import Tools
from coldsnap.ship.base import Item, Outgoing, Stored, Written

__all__ = ["Address", "Publication", "Published", "plan_publication", "run_publication"]


class Address(Protocol):
    """Where published objects are; its text is for people."""

    def document(self) -> dict[str, Any]:
        """As JSON members."""


A = TypeVar("A", bound=Address)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published(Generic[A]):
    """What a publication did: the new descriptor, where the objects are, what became of each.

    ``sent_bytes`` is what had to be moved.
    """

    artifact_path: Path
    artifact_digest: Digest
    at: A
    objects: tuple[PublishedObject, ...]
    sent_bytes: int
    seconds: Mapping[str, float]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "artifact": str(self.artifact_path),
            "artifact_digest": str(self.artifact_digest),
            **self.at.document(),
            "objects": [one.document() for one in self.objects],
            "sent_bytes": self.sent_bytes,
            "seconds": dict(self.seconds),
        }


class Publication(Protocol[A]):
    """One artifact to one place. ``target`` is the place for people, ``what`` the kind of objects in the plural."""

    @property
    def target(self) -> str: ...

    @property
    def what(self) -> str: ...

    def problems(self) -> Iterator[Problem]:
        """Why it cannot be published from here. Asks nobody."""

    def objects(self) -> list[Outgoing]:
        """Every distinct object once, in the order in which they are to be there. Only after no problem."""

    def look(self, items: Sequence[Item]) -> Mapping[Item, Stored | None]:
        """What the place has of them; changes nothing."""

    def send(self, objects: Sequence[Outgoing], progress: Advance) -> Written:
        """Make all of them be there. Raises as a sink does."""

    def address(self, written: Written) -> A:
        """Where the objects are after that. Raises IntegrityError for an answer that no descriptor may name."""

    def write_address(self, document: dict[str, Any], at: A) -> None:
        """Into the document of the new descriptor."""


def plan_publication(
    tools: Tools, loaded: LoadedArtifact, request: OperationRequest, publication: Publication[A]
) -> PublishPlan:
    """What would be sent; asks the place, changes nothing. Raises Refused with every reason."""
    check_publish(tools, loaded, request, *publication.problems())
    sizes = {one.item: one.bytes for one in publication.objects()}
    if tools.remotes.offline:
        return PublishPlan(target=publication.target, objects=planned(sizes, {}), unknown=tools.remotes.offline)
    return PublishPlan(target=publication.target, objects=planned(sizes, publication.look(list(sizes))))


def run_publication(
    tools: Tools,
    loaded: LoadedArtifact,
    request: OperationRequest,
    publication: Publication[A],
    *,
    outlet: Outlet | None = None,
) -> Published[A]:
    """Send what is missing and write the new descriptor at ``request.output``. Idempotent.

    Raises Refused, RemoteError, PayloadRejected for an object that is damaged here, MissingCapability, ResourceBusy.
    """
    output, target = Path(request.output), publication.target
    with tools.state.in_use(), operation(tools, request, outlet=outlet) as op:
        with op.span("gates"):
            check_publish(tools, loaded, request, *publication.problems(), *check_online(tools, target))
            objects = publication.objects()
        sizes = {one.item: one.bytes for one in objects}
        with alone(tools, target), op.span("upload") as span:
            title = f"publish {publication.what} to {target}"
            with tools.reporter.phase(title, total_bytes=sum(sizes.values())) as advance:
                written = publication.send(objects, advance)
            span.set(bytes=written.sent_bytes, objects=len(written.sent))
        at = publication.address(written)
        op.stays = f"the {publication.what} are at {at}"
        with op.span("commit"):
            document = artifact_document(loaded.artifact)
            publication.write_address(document, at)
            _, digest = commit_descriptor(tools, output, document)
        op.stays = f"{output} was committed before that, and stays"
        result = Published(
            artifact_path=output,
            artifact_digest=digest,
            at=at,
            objects=outcomes(sizes, written),
            sent_bytes=written.sent_bytes,
            seconds=op.seconds(),
        )
        op.succeed(result.document())
    return result
