"""Artifacts that failed here: remembered at each failed restore, forgotten at a success, refused after too many.

What counts is decided in ``core/ladder.py``; the document and its limit are in ``core/quarantine.py``. A state root
that was copied to another machine brings no quarantine with it.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.ladder import Rung
from coldsnap.core.quarantine import (
    MAX_FAILURES_BYTES,
    ArtifactFailures,
    Failure,
    failures_bytes,
    parse_failures,
    quarantine_problem,
    with_failure,
)
from coldsnap.errors import ColdsnapError, Problem
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.tools import Tools
from coldsnap.store.documents import read_private, replace
from coldsnap.store.faults import translated
from coldsnap.store.locks import hold

__all__ = [
    "artifact_digest_of",
    "clear_artifact",
    "clear_failures",
    "failures_of",
    "quarantine_problems",
    "quarantined",
    "remember_failure",
]

_LOCK_DEADLINE_S = 10.0


def failures_of(tools: Tools, artifact: Digest) -> ArtifactFailures | None:
    """What failed here since the last success. Raises InvalidDocument, HostError for a record that cannot be read."""
    path = _path(tools, artifact)
    if not os.path.lexists(path):
        return None
    record = parse_failures(read_private(path, MAX_FAILURES_BYTES))
    return record if record.host == tools.host_identity() else None


def quarantine_problems(tools: Tools, artifact: Digest) -> tuple[Problem, ...]:
    """Why the artifact is in quarantine here, or nothing. A record that cannot be read might say that it is."""
    try:
        record = failures_of(tools, artifact)
    except ColdsnapError as error:
        problem = Problem(
            field="quarantine",
            message=f"cannot be told: {error}",
            value=str(_path(tools, artifact)),
            cure=f"`coldsnap clear-quarantine {artifact}` removes the record",
        )
        return (problem,)
    return (quarantine_problem(record),) if record is not None and record.is_quarantined else ()


def quarantined(tools: Tools) -> tuple[ArtifactFailures, ...]:
    """Every artifact that is in quarantine here, by path. Records that cannot be read are left out."""
    found = []
    for path in sorted(tools.state.failures.glob("*.json")):
        try:
            record = failures_of(tools, Digest.from_hex(path.stem))
        except (ColdsnapError, ValueError):
            continue
        if record is not None and record.is_quarantined:
            found.append(record)
    return tuple(sorted(found, key=lambda one: one.path))


def remember_failure(
    tools: Tools, artifact: Digest, path: Path, *, operation_id: str, rung: Rung, error: ColdsnapError
) -> ArtifactFailures:
    """Record one more failure; returns the record. Raises HostError when it cannot be written."""
    failure = Failure(
        operation_id=operation_id,
        at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        rung=rung,
        error=type(error).__name__,
        reason=error.message.replace("\0", ""),
    )
    lock = tools.state.locks / f"failures-{artifact.hex}.lock"
    with hold(lock, deadline_s=_LOCK_DEADLINE_S, purpose=f"recording a failure of {path}"):
        try:
            earlier = failures_of(tools, artifact)
        except ColdsnapError:
            earlier = None  # unreadable: begin again
        record = with_failure(earlier, failure, artifact=artifact, path=str(path), host=tools.host_identity())
        replace(_path(tools, artifact), failures_bytes(record))
    return record


def clear_failures(tools: Tools, artifact: Digest) -> bool:
    """Forget what failed; returns whether there was anything. Idempotent."""
    path = _path(tools, artifact)
    there = os.path.lexists(path)
    with translated("remove", path):
        path.unlink(missing_ok=True)
    return there


def artifact_digest_of(tools: Tools, text: str) -> Digest:
    """The artifact somebody means by ``text``: a digest, a descriptor's file, or the file of its overlay here.

    Raises what reading a descriptor raises.
    """
    path = Path(text).absolute()
    try:
        return Digest.from_hex(path.stem) if path.parent == tools.state.overlays else Digest.parse(text)
    except ValueError:
        return load_artifact(path).digest


def clear_artifact(tools: Tools, artifact: Digest) -> tuple[Digest, ...]:
    """Forget the failures of an artifact and of its overlay here; returns the digests there were any of."""
    overlay = str(tools.state.overlays / f"{artifact.hex}.json")
    cleared = [artifact] if clear_failures(tools, artifact) else []
    for path in sorted(tools.state.failures.glob("*.json")):
        try:
            record = parse_failures(read_private(path, MAX_FAILURES_BYTES))
        except ColdsnapError:
            continue
        if record.path == overlay and clear_failures(tools, record.artifact):
            cleared.append(record.artifact)
    return tuple(cleared)


def _path(tools: Tools, artifact: Digest) -> Path:
    return tools.state.failures / f"{artifact.hex}.json"
