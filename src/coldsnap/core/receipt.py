"""The receipt of an operation, format 2: what was asked, what came of it, how long it took.

A receipt at a path belongs to one request. A failed one may give way to any later receipt of the same request; a
success is final. Both are checked before anything runs (``may_run``) and again before writing (``may_replace``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.drivers import DRIVERS, DriverId
from coldsnap.core.names import Choice, Id, Items, Line, Table, Unfit
from coldsnap.core.parsing import Record, check_document, head_problems, parse_document, plain_document, rule
from coldsnap.core.paths import show
from coldsnap.core.request import Operation
from coldsnap.core.timing import MAX_TIMING_BYTES, Timing
from coldsnap.errors import Problem

__all__ = [
    "MAX_RECEIPT_BYTES",
    "Instant",
    "Receipt",
    "ReceiptError",
    "ReceiptProblem",
    "ReceiptState",
    "may_replace",
    "may_run",
    "parse_receipt",
    "receipt_bytes",
    "receipt_document",
    "receipt_from",
]

MAX_RECEIPT_BYTES = MAX_TIMING_BYTES + 8 * 1024 * 1024
_SUBJECT = "operation receipt"
_INSTANT = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(\.\d{1,9})?Z", re.ASCII)


def _instant(text: str) -> str:
    match = _INSTANT.fullmatch(text)
    month, day, hour, minute, second = (int(part) for part in match.groups()[1:6]) if match else (0, 0, 0, 0, 0)
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour <= 23 and minute <= 59 and second <= 60):
        raise Unfit("is not a UTC time", "write it as 2026-11-29T14:37:00.123456Z")
    return text


Instant = Annotated[str, AfterValidator(_instant)]


class ReceiptState(StrEnum):
    """How the operation ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"


class ReceiptProblem(Record):
    """One of the reasons of a refusal, as in ``errors.Problem``."""

    field: str
    message: str
    value: str | None = None
    cure: str | None = None


class ReceiptError(Record):
    """Why an operation failed. ``kind`` is the name of a class in ``coldsnap.errors``."""

    kind: Id
    message: str
    cure: str | None = None
    reasons: Items[ReceiptProblem] = ()
    facts: Table[str, Any] = Field(default_factory=dict)


class Receipt(Record):
    """A receipt. ``started_at`` and ``completed_at`` are UTC; only ``duration_seconds`` measures."""

    format: Literal[2] = 2
    kind: Literal["coldsnap-operation-receipt"] = "coldsnap-operation-receipt"
    operation_id: Id
    operation: Choice[Operation]
    state: Choice[ReceiptState]
    request_sha256: Digest
    engine: Id
    snapshot_driver: Choice[DriverId]
    replay_semantics: Line
    started_at: Instant
    completed_at: Instant
    duration_seconds: float = Field(ge=0)
    timing: Timing | None = None
    result: Table[str, Any] = Field(default_factory=dict)
    error: ReceiptError | None = None

    @rule
    def _head_is_written(self) -> Iterator[Problem]:
        yield from head_problems(self)

    @rule
    def _error_iff_failed(self) -> Iterator[Problem]:
        if self.state is ReceiptState.FAILED and self.error is None:
            yield Problem(field="error", message="is missing from a failed receipt", cure="say why it failed")
        if self.state is ReceiptState.SUCCEEDED and self.error is not None:
            yield Problem(
                field="error",
                message="is given in a receipt that succeeded",
                value=show(self.error.kind),
                cure="remove it, or write state failed",
            )

    @rule
    def _replay_is_the_drivers(self) -> Iterator[Problem]:
        expected = DRIVERS[self.snapshot_driver].replay_semantics
        if self.replay_semantics != expected:
            yield Problem(
                field="replay_semantics",
                message=f"is not that of driver {self.snapshot_driver}",
                value=show(self.replay_semantics),
                cure=f"write {expected}",
            )


def parse_receipt(data: bytes) -> Receipt:
    """Parse a receipt. Raises InvalidDocument with every problem."""
    return parse_document(Receipt, data, subject=_SUBJECT, limit_bytes=MAX_RECEIPT_BYTES)


def receipt_from(document: object) -> Receipt:
    """As ``parse_receipt``, from plain values in memory."""
    return check_document(Receipt, document, subject=_SUBJECT)


def receipt_document(receipt: Receipt) -> dict[str, Any]:
    """The receipt as plain values."""
    return plain_document(receipt)


def receipt_bytes(receipt: Receipt) -> bytes:
    """The receipt as a file: canonical JSON and a newline."""
    return canonical_json(receipt_document(receipt)) + b"\n"


def may_run(old: Receipt, request_sha256: Digest) -> Problem | None:
    """Why an operation whose receipt would go where ``old`` is must not run, or None."""
    if old.request_sha256 != request_sha256:
        return Problem(
            field="receipt",
            message=f"belongs to another request, {old.request_sha256}",
            value=str(request_sha256),
            cure="name another receipt file",
        )
    if old.state is ReceiptState.SUCCEEDED:
        return Problem(
            field="receipt",
            message=f"says that operation {old.operation_id} succeeded, and a success is final",
            value=str(request_sha256),
            cure="there is nothing left to do; name another receipt file to run it again",
        )
    return None


def may_replace(old: Receipt, new: Receipt) -> Problem | None:
    """Why ``new`` must not be written over ``old``, or None. Writing the very same receipt again is allowed."""
    return None if old == new else may_run(old, new.request_sha256)
