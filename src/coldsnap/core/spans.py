"""Where the time of an operation went, format 1: clocks, and spans on them.

Offsets are seconds since the origin of the span's own clock. Two clocks never share a sum: one may be a host's
monotonic clock and another an observer's, and their difference is unknown. ``sum_seconds`` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.execution import repeated
from coldsnap.core.names import Choice, Count, Id, Items, Line, SomeItems, Table, Unfit
from coldsnap.core.parsing import Record, check_document, head_problems, parse_document, parsed, plain_document, rule
from coldsnap.core.paths import show
from coldsnap.errors import Problem, UsageError

__all__ = [
    "MAX_ATTRIBUTES",
    "MAX_CLOCKS",
    "MAX_SPANS",
    "MAX_TIMING_BYTES",
    "Clock",
    "Span",
    "SpanStatus",
    "Timing",
    "parse_timing",
    "sum_seconds",
    "timing_bytes",
    "timing_digest",
    "timing_from",
]

MAX_CLOCKS = 128
MAX_SPANS = 2048
MAX_ATTRIBUTES = 32
MAX_TIMING_BYTES = 8 * 1024 * 1024
_SUBJECT = "timing"


def _scalar(value: Any) -> Any:
    if not isinstance(value, (str, bool, int, float)):
        raise Unfit("is not a plain value", "write text, a number, true or false")
    return value


Scalar = Annotated[Any, BeforeValidator(_scalar), WithJsonSchema({"type": ["string", "number", "boolean"]})]


class SpanStatus(StrEnum):
    """How a span ended."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNFINISHED = "unfinished"


class Clock(Record):
    """A clock of one process on one host. ``origin_unix_ns`` is only for showing; it never enters a duration."""

    id: Id
    source: Line
    origin_unix_ns: Count


class Span(Record):
    """Something that took time. ``parent`` is a span that it was part of."""

    id: Id
    parent: Id | None = None
    name: Line
    clock: Id
    start_offset_seconds: float = Field(ge=0)
    duration_seconds: float = Field(ge=0)
    status: Choice[SpanStatus]
    attributes: Table[Line, Scalar] = Field(default_factory=dict)

    @rule
    def _attributes_are_few(self) -> Iterator[Problem]:
        if len(self.attributes) > MAX_ATTRIBUTES:
            yield _too_many("attributes", len(self.attributes), MAX_ATTRIBUTES)


class Timing(Record):
    """Where the time of an operation went: clocks, and spans on them. Spans of two clocks are never added up."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-operation-timing"] = "coldsnap-operation-timing"
    operation_id: Id
    clocks: SomeItems[Clock]
    spans: Items[Span]

    @rule
    def _head_is_written(self) -> Iterator[Problem]:
        yield from head_problems(self)

    @rule
    def _clocks_are_few(self) -> Iterator[Problem]:
        if len(self.clocks) > MAX_CLOCKS:
            yield _too_many("clocks", len(self.clocks), MAX_CLOCKS)

    @rule
    def _spans_are_few(self) -> Iterator[Problem]:
        if len(self.spans) > MAX_SPANS:
            yield _too_many("spans", len(self.spans), MAX_SPANS)

    @rule
    def _clock_ids_once(self) -> Iterator[Problem]:
        yield from _ids_once("clocks", self.clocks)

    @rule
    def _span_ids_once(self) -> Iterator[Problem]:
        yield from _ids_once("spans", self.spans)

    @rule
    def _clocks_exist(self) -> Iterator[Problem]:
        known = {clock.id for clock in self.clocks}
        for index, span in parsed(self.spans, "clock"):
            if span.clock not in known:
                yield _unknown(f"spans[{index}].clock", "clock", span.clock)

    @rule
    def _parents_exist(self) -> Iterator[Problem]:
        known = {span.id for span in self.spans}
        for index, span in parsed(self.spans, "parent"):
            if span.parent is not None and span.parent not in known:
                yield _unknown(f"spans[{index}].parent", "span", span.parent)

    @rule
    def _parents_make_no_circle(self) -> Iterator[Problem]:
        parents = {span.id: span.parent for span in self.spans}
        free: set[str] = set()
        for index, span in enumerate(self.spans):
            chain: dict[str, None] = {}
            here: str | None = span.id
            while here is not None and here not in free and here not in chain:
                chain[here] = None
                here = parents.get(here)
            if here is not None and here in chain:
                if here == span.id:
                    yield Problem(
                        field=f"spans[{index}].parent",
                        message="makes a circle of parents",
                        value=show(span.parent),
                        cure="a span cannot be part of itself",
                    )
            else:
                free.update(chain)


def parse_timing(data: bytes) -> Timing:
    """Parse a timing. Raises InvalidDocument with every problem."""
    return parse_document(Timing, data, subject=_SUBJECT, limit_bytes=MAX_TIMING_BYTES)


def timing_from(document: object) -> Timing:
    """As ``parse_timing``, from plain values in memory."""
    return check_document(Timing, document, subject=_SUBJECT)


def timing_bytes(timing: Timing) -> bytes:
    """The timing as a file: canonical JSON and a newline."""
    return canonical_json(plain_document(timing)) + b"\n"


def timing_digest(timing: Timing) -> Digest:
    """SHA-256 of the canonical JSON, without the newline; the closing live event carries it."""
    return Digest.of(canonical_json(plain_document(timing)))


def sum_seconds(spans: Iterable[Span]) -> float:
    """The durations added up. Raises UsageError when the spans are on different clocks."""
    total, clock = 0.0, None
    for span in spans:
        if clock is not None and span.clock != clock:
            raise UsageError(
                f"span {span.id} is on clock {span.clock} and cannot be added to spans on {clock}",
                cure="add up the spans of each clock alone",
            )
        clock = span.clock
        total += span.duration_seconds
    return total


def _too_many(field: str, found: int, limit: int) -> Problem:
    return Problem(field=field, message="has too many entries", value=str(found), cure=f"write at most {limit}")


def _ids_once(name: str, items: Iterable[Clock | Span]) -> Iterator[Problem]:
    for index, key in repeated((i, item.id) for i, item in parsed(items, "id")):
        yield Problem(
            field=f"{name}[{index}].id", message="is taken by an earlier entry", value=show(key), cure="use another id"
        )


def _unknown(field: str, noun: str, name: str) -> Problem:
    return Problem(
        field=field, message=f"names no {noun} of this timing", value=show(name), cure=f"name a {noun} of it"
    )
