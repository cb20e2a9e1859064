"""Make an overlay: freeze a tree again that was restored here, and keep it if it is worth keeping.

What a restored tree has that the portable one had not: this machine's choices and caches, made while it answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from coldsnap.core.artifact import artifact_digest, artifact_document
from coldsnap.core.bindings import cold_start_of, hygiene_of, runtime_said, service_name_of, staging_of
from coldsnap.core.digest import Digest
from coldsnap.core.drivers import overlay_driver
from coldsnap.core.messages import Exported
from coldsnap.core.overlay import make_overlay, same_capture
from coldsnap.core.points import reached
from coldsnap.core.policy import ArtifactScope
from coldsnap.core.request import EXTENSION_SCHEMA, OperationRequest, request_from
from coldsnap.errors import IntegrityError, ResourceBusy
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.freezers import Freezer, Running, freezer_for
from coldsnap.ops.freezing import freeze_tree
from coldsnap.ops.operation import Operation
from coldsnap.ops.overlay import overlay_path, save_overlay, target_now
from coldsnap.ops.temporary import TemporaryTree
from coldsnap.ops.tools import Tools

__all__ = ["OverlayMade", "capture_overlay", "refuse_overlay_in_use"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlayMade:
    """What became of an overlay capture: ``made``, or ``identical`` to the portable capture and thrown away."""

    outcome: str
    reason: str
    path: str | None = None
    digest: Digest | None = None
    capsule_bytes: int = 0

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "path": self.path,
            "digest": str(self.digest) if self.digest is not None else None,
            "capsule_bytes": self.capsule_bytes,
        }


def refuse_overlay_in_use(tools: Tools, loaded: LoadedArtifact) -> None:
    """Raise ResourceBusy when a service was restored from the overlay of ``loaded``: it may not change below it."""
    records = (tools.services.load(name) for name in tools.services.names())
    users = [
        one.name
        for one in records
        if one is not None and one.overlay is not None and one.artifact_digest == loaded.digest
    ]
    if users:
        raise ResourceBusy(
            f"the overlay of {loaded.path} is in use by {', '.join(users)}",
            cure=f"stop it first: coldsnap stop {users[0]}",
            facts={"services": users},
        )


def capture_overlay(tools: Tools, op: Operation, loaded: LoadedArtifact, tree: TemporaryTree) -> OverlayMade:
    """Freeze ``tree``, a restored ``loaded``, as its overlay on this machine. The tree is gone afterwards.

    Raises ResourceBusy while a service runs from an earlier overlay, IntegrityError when its packs are not the
    artifact's, and what freezing raises. Nothing is kept then.
    """
    refuse_overlay_in_use(tools, loaded)
    prompts, answers = loaded.acceptance()
    request = _request(tools, loaded)
    with _freezer(tools, op, request, loaded, tree) as freezer:
        frozen = freeze_tree(
            tools,
            op,
            request,
            Running(launch=request.launch, units=tree.units, workers=tree.workers, scratch=tree.scratch),
            freezer=freezer,
            prompts=prompts,
            answers=answers,
            check_export=lambda exported: _same_packs(loaded, exported),
        )
    if same_capture(loaded.artifact, frozen.artifact):
        return OverlayMade(
            outcome="identical",
            reason="its capsule and replay objects are the portable artifact's own, so it was thrown away",
        )
    reached("overlay.frozen")
    with op.span("commit"):
        path = save_overlay(tools, make_overlay(loaded.digest, frozen.artifact, target_now(tools, loaded.artifact)))
    reached("overlay.committed")
    return OverlayMade(
        outcome="made",
        reason="its capsule differs from the portable one",
        path=str(path),
        digest=artifact_digest(frozen.artifact),
        capsule_bytes=sum(image.bytes for image in frozen.images.values()),
    )


def _freezer(
    tools: Tools, op: Operation, request: OperationRequest, loaded: LoadedArtifact, tree: TemporaryTree
) -> AbstractContextManager[Freezer]:
    """The one that brought the tree back, unless another driver freezes it."""
    if request.snapshot_driver.id is loaded.artifact.snapshot_driver.id:
        return nullcontext(tree.freezer)
    return freezer_for(tools, op, request.snapshot_driver.id)


def _same_packs(loaded: LoadedArtifact, exported: Mapping[str, Exported]) -> None:
    for worker, pack in loaded.packs().items():
        found = exported[worker].pack
        if found is None or (found.sha256, found.bytes) != (pack.sha256, pack.bytes):
            raise IntegrityError(
                f"the restored worker {worker} exports the pack {found.sha256 if found else 'none'}, "
                f"and the artifact's is {pack.sha256}",
                cure="no overlay was made; `coldsnap verify` proves the artifact",
                facts={"worker": worker, "expected": str(pack.sha256)},
            )


def _request(tools: Tools, loaded: LoadedArtifact) -> OperationRequest:
    """The capture request of an overlay: the portable capture's own, as far as its artifact tells, and local."""
    document = artifact_document(loaded.artifact)
    bindings = loaded.artifact.runtime.bindings
    prompts, _ = loaded.acceptance()
    allowed = [name for report in hygiene_of(bindings) for name in report.allowed_secrets]
    return request_from(
        {
            "format": 4,
            "kind": "coldsnap-operation-request",
            "operation": "capture",
            "id": loaded.artifact.capture_id,
            "snapshot_driver": {"id": overlay_driver(loaded.artifact.snapshot_driver.id).value},
            "output": str(overlay_path(tools, loaded.digest)),
            "launch": document["launch"],
            "policy": {
                "process": {
                    "artifact_scope": ArtifactScope.TARGET_LOCAL.value,
                    "graph_policy": loaded.artifact.graph.policy.value,
                },
            },
            "validation": document["acceptance"],
            "workload": {"cluster_id": service_name_of(bindings) or ""},
            "extension": {
                "schema": EXTENSION_SCHEMA,
                "prompts": [{"text": one.text, "max_tokens": one.max_tokens} for one in prompts],
                "allow_secrets": list(dict.fromkeys(allowed)),
                "cold_start": cold_start_of(bindings),
                "stage": staging_of(bindings),
                **runtime_said(bindings),
            },
        }
    )
