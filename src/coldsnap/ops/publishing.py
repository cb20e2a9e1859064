"""What ``publish`` and ``publish-native`` share: their request, their gates, and the new descriptor.

A published artifact is a new descriptor: the same capture, with addresses where its capsules or packs can be had. The
one it was made from is read and never written. The descriptor comes last, with exclusive create; a repetition
that would write the very same one finds it there and is content.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.core.artifact import SnapshotArtifact, artifact_bytes, artifact_digest, artifact_document, artifact_from
from coldsnap.core.bindings import hygiene_of
from coldsnap.core.digest import Digest
from coldsnap.core.request import EXTENSION_SCHEMA, Operation, OperationRequest, request_from
from coldsnap.errors import ColdsnapError, Problem, Refused, ResourceBusy
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.leases import lease, lease_of, put_back
from coldsnap.ops.tools import Tools
from coldsnap.ship.base import Item, Stored, Written
from coldsnap.store.documents import write_new
from coldsnap.store.locks import hold

__all__ = [
    "PublishPlan",
    "PublishedObject",
    "alone",
    "check_online",
    "check_publish",
    "commit_descriptor",
    "outcomes",
    "planned",
    "publish_request",
    "secrets_of",
]

_LOCK_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedObject:
    """What became of one object, or would: ``sent``, ``mounted``, ``already there``, ``to be sent``."""

    item: Item
    bytes: int
    outcome: str

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": self.item.kind.value,
            "sha256": str(self.item.digest),
            "bytes": self.bytes,
            "outcome": self.outcome,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishPlan:
    """What a publication would send. ``unknown``: why nobody could be asked, when nobody could."""

    target: str
    objects: tuple[PublishedObject, ...]
    unknown: str = ""

    @property
    def to_send_bytes(self) -> int:
        """The bytes that would be sent, at most."""
        return sum(one.bytes for one in self.objects if one.outcome == "to be sent")

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "dry_run": True,
            "to": self.target,
            "objects": [one.document() for one in self.objects],
            "bytes": self.to_send_bytes,
            "unknown": self.unknown or None,
        }


def publish_request(
    loaded: LoadedArtifact,
    verb: Operation,
    *,
    operation_id: str,
    output: Path,
    policy: Mapping[str, Any],
    with_secrets: bool = False,
) -> OperationRequest:
    """The publication as a request. ``with_secrets`` names every secret that the artifact's images are allowed."""
    document = artifact_document(loaded.artifact)
    request: dict[str, Any] = {
        "format": 4,
        "kind": "coldsnap-operation-request",
        "operation": verb.value,
        "id": operation_id,
        "snapshot_driver": {"id": loaded.artifact.snapshot_driver.id.value},
        "artifact": str(loaded.path),
        "output": str(output.absolute()),
        "launch": document["launch"],
        "policy": policy,
    }
    if with_secrets:
        request["extension"] = {"schema": EXTENSION_SCHEMA, "allow_secrets": list(secrets_of(loaded.artifact))}
    return request_from(request)


def secrets_of(artifact: SnapshotArtifact) -> tuple[str, ...]:
    """The names of secrets that are in the artifact's images because its capture allowed them."""
    names = (name for report in hygiene_of(artifact.runtime.bindings) for name in report.allowed_secrets)
    return tuple(dict.fromkeys(names))


def check_publish(tools: Tools, loaded: LoadedArtifact, request: OperationRequest, *problems: Problem) -> None:
    """Raise Refused with ``problems`` and every reason of the artifact's own why it may not be published so."""
    found = [*_output_problems(loaded, request), *_secret_problems(loaded, request), *problems]
    if found:
        raise Refused(f"{loaded.path} cannot be published", found)


def check_online(tools: Tools, target: str) -> Iterator[Problem]:
    """A publication needs the network."""
    if tools.remotes.offline:
        yield Problem(
            field="--to",
            message=f"cannot be asked: {tools.remotes.offline}",
            value=target,
            cure="run it without offline mode",
        )


def _output_problems(loaded: LoadedArtifact, request: OperationRequest) -> Iterator[Problem]:
    output = Path(request.output)
    if output.absolute() == loaded.path:
        cure = "name a new file: the artifact stays as it is"
        yield Problem(field="output", message="is the artifact itself", value=str(output), cure=cure)
    elif os.path.lexists(output):
        if not _is_same_capture(output, loaded):
            cure = "name a new file; a committed artifact is never overwritten"
            yield Problem(field="output", message="exists and is something else", value=str(output), cure=cure)
    elif not output.parent.is_dir():
        cure = f"mkdir -p {output.parent}"
        yield Problem(field="output", message="is in no folder that exists", value=str(output), cure=cure)
    elif not os.access(output.parent, os.W_OK):
        yield Problem(field="output", message="cannot be written", value=str(output), cure="choose another folder")


def _is_same_capture(path: Path, loaded: LoadedArtifact) -> bool:
    """Whether a descriptor of this capture lies there: perhaps the one that is about to be made. Commit compares."""
    try:
        return load_artifact(path).artifact.capture_id == loaded.artifact.capture_id
    except ColdsnapError:
        return False


def _secret_problems(loaded: LoadedArtifact, request: OperationRequest) -> Iterator[Problem]:
    accepted = set(request.extension.allow_secrets) if request.extension is not None else set()
    for report in hygiene_of(loaded.artifact.runtime.bindings):
        held = [name for name in report.allowed_secrets if name not in accepted]
        if not report.publishable and (held or not report.allowed_secrets):
            yield Problem(
                field=f"hygiene.{report.unit}",
                message="holds secrets that its capture allowed, and whoever gets the capsule could read them",
                value=", ".join(held) or "not publishable",
                cure="capture again without them, or say --publish-with-secrets if everybody there may know them",
            )


@contextmanager
def alone(tools: Tools, target: str) -> Iterator[None]:
    """Be the one on this host who publishes to ``target``, or this digest: workers with one pack upload it once."""
    tools.state.check(tools.state.locks)
    name = hashlib.sha256(target.encode()).hexdigest()[:32]
    with hold(tools.state.locks / f"publish-{name}.lock", deadline_s=_LOCK_S, purpose=f"publishing to {target}"):
        yield


def outcomes(objects: Mapping[Item, int], written: Written) -> tuple[PublishedObject, ...]:
    """What a ``write`` did, an object each."""
    words = {**dict.fromkeys(written.sent, "sent"), **dict.fromkeys(written.mounted, "mounted")}
    return tuple(
        PublishedObject(item=item, bytes=size, outcome=words.get(item, "already there"))
        for item, size in objects.items()
    )


def planned(objects: Mapping[Item, int], there: Mapping[Item, Stored | None]) -> tuple[PublishedObject, ...]:
    """What a ``write`` would do, as far as the store was asked."""
    return tuple(
        PublishedObject(item=item, bytes=size, outcome="already there" if there.get(item) is not None else "to be sent")
        for item, size in objects.items()
    )


def commit_descriptor(tools: Tools, output: Path, document: dict[str, Any]) -> tuple[SnapshotArtifact, Digest]:
    """Write the new descriptor, leased first. Raises ResourceBusy when another one has the name meanwhile.

    When it cannot be written, the artifact's lease is what it was: the very same descriptor may lie elsewhere already.
    """
    artifact = artifact_from(document)
    data, digest = artifact_bytes(artifact), artifact_digest(artifact)
    with alone(tools, str(digest)):
        before = lease_of(tools, digest)
        lease(tools, output, artifact)
        try:
            _write(output, data, digest)
        except BaseException:
            put_back(tools, digest, before)
            raise
    return artifact, digest


def _write(output: Path, data: bytes, digest: Digest) -> None:
    if not os.path.lexists(output):
        write_new(output, data)
    elif load_artifact(output).digest != digest:
        message = f"{output} exists already, with other addresses, and is never overwritten"
        raise ResourceBusy(message, cure="name a new file", facts={"path": str(output)})
