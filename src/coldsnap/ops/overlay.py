"""Overlays on this machine: ``<state root>/overlays/<hex of the portable artifact>.json``, one an artifact.

Looking for one never fails: what is missing, stale, damaged or in quarantine is a reason to use the portable artifact,
and is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coldsnap.core.artifact import SnapshotArtifact, artifact_digest
from coldsnap.core.digest import Digest
from coldsnap.core.overlay import (
    MAX_OVERLAY_BYTES,
    OverlayDescriptor,
    OverlayTarget,
    overlay_bytes,
    overlay_target,
    parse_overlay,
    stale_problems,
)
from coldsnap.core.request import OperationRequest
from coldsnap.errors import ColdsnapError, IntegrityError, InvalidDocument
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.devices import unit_facts
from coldsnap.ops.gates import restore_gates
from coldsnap.ops.tools import Tools
from coldsnap.store.documents import read_private, replace
from coldsnap.store.faults import translated

__all__ = [
    "FoundOverlay",
    "drop_overlay",
    "find_overlay",
    "overlay_path",
    "overlays",
    "read_overlay",
    "request_of",
    "save_overlay",
    "served_overlay",
    "target_now",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundOverlay:
    """An overlay that is there: usable when ``loaded`` is; ``reason`` says why it is used, or is not.

    ``replaceable``: whether a new one may be made in its place unasked. Not for one in quarantine: its restores failed,
    and a failed restore never leads to a capture.
    """

    loaded: LoadedArtifact | None
    reason: str
    replaceable: bool = True

    @property
    def digest(self) -> Digest | None:
        """The digest of its own artifact document."""
        return self.loaded.digest if self.loaded is not None else None


def overlay_path(tools: Tools, portable: Digest) -> Path:
    """Where the overlay of an artifact is, or would be."""
    return tools.state.overlays / f"{portable.hex}.json"


def target_now(tools: Tools, artifact: SnapshotArtifact) -> OverlayTarget:
    """This machine, as an overlay is bound to it."""
    units = artifact.launch.units
    return overlay_target(
        artifact,
        hosts=dict.fromkeys((unit.id for unit in units), tools.host_identity()),
        facts={unit.id: unit_facts(tools, unit) for unit in units},
    )


def find_overlay(
    tools: Tools, loaded: LoadedArtifact, request: OperationRequest, *, ignore_quarantine: bool = False
) -> FoundOverlay | None:
    """The overlay of ``loaded`` on this machine, and whether it may stand for it now; None when none was made."""
    path = overlay_path(tools, loaded.digest)
    if not os.path.lexists(path):
        return None
    try:
        overlay = read_overlay(tools, loaded.digest)
    except ColdsnapError as error:
        return FoundOverlay(loaded=None, reason=f"it is damaged: {error}")
    stale = stale_problems(
        overlay, digest=loaded.digest, portable=loaded.artifact, target=target_now(tools, loaded.artifact)
    )
    if stale:
        return FoundOverlay(loaded=None, reason="it is stale: " + "; ".join(str(problem) for problem in stale))
    own = _loaded(path, overlay)
    wanted = request_of(own, request)
    gates = restore_gates(tools, own, wanted, address=None, ignore_quarantine=ignore_quarantine)
    closed = [gate for gate in gates if gate.problems]
    if closed:
        problems = "; ".join(str(problem) for gate in closed for problem in gate.problems)
        replaceable = all(gate.name != "quarantine" for gate in closed)
        return FoundOverlay(loaded=None, reason=f"it would not restore here: {problems}", replaceable=replaceable)
    return FoundOverlay(loaded=own, reason="an overlay was made on this machine, and nothing it depends on has changed")


def request_of(own: LoadedArtifact, request: OperationRequest) -> OperationRequest:
    """A request for a portable artifact as one for its overlay ``own``, which another driver may have frozen."""
    driver = request.snapshot_driver.model_copy(update={"id": own.artifact.snapshot_driver.id})
    return request.model_copy(update={"snapshot_driver": driver})


def served_overlay(tools: Tools, portable: Digest, overlay: Digest) -> LoadedArtifact:
    """The overlay that a running service came from. Raises IntegrityError when it is not there any more."""
    path = overlay_path(tools, portable)
    try:
        own = _loaded(path, read_overlay(tools, portable))
    except ColdsnapError as error:
        found = error.message
    else:
        if own.digest == overlay:
            return own
        found = f"it is {own.digest} now"
    raise IntegrityError(
        f"the overlay {overlay} that the service was restored from cannot be read at {path}: {found}",
        cure="stop the service and restore it again",
        facts={"path": str(path), "expected": str(overlay)},
    )


def read_overlay(tools: Tools, portable: Digest) -> OverlayDescriptor:
    """The descriptor. Raises HostError, InvalidDocument with every problem."""
    path = overlay_path(tools, portable)
    data = read_private(path, MAX_OVERLAY_BYTES)
    try:
        return parse_overlay(data)
    except InvalidDocument as error:
        cure = f"remove {path}: restores go on without it, and `coldsnap materialize --overlay` makes another"
        raise InvalidDocument(str(path), error.problems, cure=cure, facts={"path": str(path)}) from error


def save_overlay(tools: Tools, overlay: OverlayDescriptor) -> Path:
    """Commit it: from now on it stands for its portable artifact here. An earlier one is replaced."""
    path = overlay_path(tools, overlay.portable)
    replace(path, overlay_bytes(overlay))
    return path


def drop_overlay(tools: Tools, portable: Digest) -> bool:
    """Remove it; returns whether there was one. Its capsule is garbage then, for ``gc`` or ``delete``. Idempotent."""
    path = overlay_path(tools, portable)
    there = os.path.lexists(path)
    with translated("remove", path):
        path.unlink(missing_ok=True)
    return there


def overlays(tools: Tools) -> Iterator[tuple[Digest, OverlayDescriptor | None]]:
    """Every overlay by its portable artifact's digest; None for one that cannot be read, and is of no use as it is."""
    for path in sorted(tools.state.overlays.glob("*.json")):
        try:
            portable = Digest.from_hex(path.stem)
        except ValueError:
            continue
        try:
            yield portable, read_overlay(tools, portable)
        except ColdsnapError:
            yield portable, None


def _loaded(path: Path, overlay: OverlayDescriptor) -> LoadedArtifact:
    return LoadedArtifact(path=path, artifact=overlay.artifact, digest=artifact_digest(overlay.artifact))
