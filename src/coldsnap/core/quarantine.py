"""Failures of one artifact on one machine, and when they are enough to leave it alone.

A failed restore that is tried again and again is a service that flaps. So after ``LIMIT`` failures that were the
artifact's own (``ladder.COUNTED``), with no success between them, its process tree is not restored on that machine any
more until somebody clears it. A cold start, where the request allows one, goes on.

    <state root>/failures/<artifact hex>.json     one document an artifact; absent when nothing failed
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.ladder import Rung
from coldsnap.core.names import Choice, Id, Items, Text
from coldsnap.core.parsing import Record, head_problems, parse_document, plain_document, rule
from coldsnap.core.receipt import Instant
from coldsnap.errors import Problem

__all__ = [
    "LIMIT",
    "MAX_FAILURES_BYTES",
    "ArtifactFailures",
    "Failure",
    "failures_bytes",
    "parse_failures",
    "quarantine_problem",
    "with_failure",
]

LIMIT = 2
MAX_FAILURES_BYTES = 1024 * 1024
_KEPT = 16
_REASON_CHARACTERS = 4000


class Failure(Record):
    """One restore that failed for a reason of the artifact's own. ``error`` is a class of ``coldsnap.errors``."""

    operation_id: Id
    at: Instant
    rung: Choice[Rung]
    error: Id
    reason: Text


class ArtifactFailures(Record):
    """The failures of ``artifact`` on ``host`` since its last success there, oldest first; at most the newest 16."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-artifact-failures"] = "coldsnap-artifact-failures"
    artifact: Digest
    path: Text
    host: Digest
    failures: Items[Failure]

    @rule
    def _head_is_written(self) -> Iterator[Problem]:
        yield from head_problems(self)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return plain_document(self)

    @property
    def is_quarantined(self) -> bool:
        """Whether there were enough."""
        return len(self.failures) >= LIMIT


def parse_failures(data: bytes) -> ArtifactFailures:
    """Parse the record. Raises InvalidDocument with every problem."""
    return parse_document(ArtifactFailures, data, subject="artifact failures", limit_bytes=MAX_FAILURES_BYTES)


def failures_bytes(record: ArtifactFailures) -> bytes:
    """The record as a file: canonical JSON and a newline."""
    return canonical_json(plain_document(record)) + b"\n"


def with_failure(
    record: ArtifactFailures | None, failure: Failure, *, artifact: Digest, path: str, host: Digest
) -> ArtifactFailures:
    """The record after one more failure. What another machine recorded (a copied state root) is not counted here."""
    earlier = record.failures if record is not None and record.host == host else ()
    short = failure.model_copy(update={"reason": failure.reason[:_REASON_CHARACTERS]})
    return ArtifactFailures(
        format=1,
        kind="coldsnap-artifact-failures",
        artifact=artifact,
        path=path,
        host=host,
        failures=(*earlier, short)[-_KEPT:],
    )


def quarantine_problem(record: ArtifactFailures) -> Problem:
    """Why a quarantined artifact is not restored, and the ways out."""
    last = record.failures[-1]
    return Problem(
        field="quarantine",
        message=f"failed {len(record.failures)} times here, last in {last.operation_id} at {last.at} "
        f"({last.rung.value}, {last.error}: {last.reason})",
        value=str(record.artifact),
        cure=f"mend the cause, then `coldsnap clear-quarantine {record.path}`, or try once with --ignore-quarantine",
    )
