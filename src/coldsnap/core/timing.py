"""Building a ``Timing`` while an operation runs, and telling about it live.

    builder = TimingBuilder(operation_id="op-1", now=time.monotonic, origin_unix_ns=time.time_ns())
    with builder.span("restore", unit="u0") as span:
        span.set(bytes=17)
    timing = builder.finish()

Pure but for the clock it is given. Spans may be opened from several threads; a span's parent is the one open in the
same context, or the one that is named. Timing never makes an operation fail: past its limits it drops spans or
shortens texts, and says how many spans were dropped.

Live events are records that ``on_event`` gets: ``span-started``, ``span-ended``, and last ``closed`` with the digest of
the final timing. At most ``MAX_EVENTS`` a stream, ``MAX_EVENT_BYTES`` each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from coldsnap.core.canonical import canonical_json
from coldsnap.core.parsing import plain_document
from coldsnap.core.spans import (
    MAX_ATTRIBUTES,
    MAX_CLOCKS,
    MAX_SPANS,
    MAX_TIMING_BYTES,
    Clock,
    Span,
    SpanStatus,
    Timing,
    parse_timing,
    sum_seconds,
    timing_bytes,
    timing_digest,
    timing_from,
)
from coldsnap.errors import OperationInterrupted, UsageError

__all__ = [
    "MAX_EVENTS",
    "MAX_EVENT_BYTES",
    "MAX_TIMING_BYTES",
    "Clock",
    "OpenSpan",
    "Span",
    "SpanStatus",
    "Timing",
    "TimingBuilder",
    "event_line",
    "parse_timing",
    "sum_seconds",
    "timing_bytes",
    "timing_digest",
    "timing_from",
]

MAX_EVENTS = 8192
MAX_EVENT_BYTES = 64 * 1024
_MAX_TEXT = (
    500  # characters of one attribute; 32 of them, escaped at worst, and the rest fit one event and one document
)
_EVENT = {"format": 1, "kind": "coldsnap-timing-event"}
_current: ContextVar[OpenSpan | None] = ContextVar("coldsnap_open_span", default=None)


class OpenSpan:
    """A span that has begun. ``set`` adds attributes until it ends."""

    def __init__(self, builder: TimingBuilder, name: str, parent: str | None, start: float) -> None:
        self.builder = builder
        self.id = ""
        self.name = _shortened(name) or "span"
        self.parent = parent
        self.start_offset_seconds = start
        self._attributes: dict[str, Any] = {}

    def set(self, **attributes: object) -> None:
        """Add attributes; what is no plain value is kept as its text. Past the limit the rest is dropped."""
        for name, value in attributes.items():
            if name in self._attributes or len(self._attributes) < MAX_ATTRIBUTES:
                self._attributes[_shortened(name)] = _plain(value)

    def ended(self, *, clock: str, duration_seconds: float, status: SpanStatus) -> Span:
        """The finished record."""
        return Span(
            id=self.id,
            parent=self.parent,
            name=self.name,
            clock=clock,
            start_offset_seconds=self.start_offset_seconds,
            duration_seconds=duration_seconds,
            status=status,
            attributes=dict(self._attributes),
        )


class TimingBuilder:
    """Collects the spans of one operation on its own clock, and those that others measured on theirs.

    ``now`` is a monotonic clock in seconds; its value at construction is the origin, whose wall time is
    ``origin_unix_ns``.
    """

    def __init__(
        self,
        *,
        operation_id: str,
        now: Callable[[], float],
        origin_unix_ns: int,
        clock: str = "controller",
        source: str = "monotonic",
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._operation_id = operation_id
        self._now = now
        self._origin = now()
        self._clock = clock
        self._clocks = [Clock(id=clock, source=source, origin_unix_ns=origin_unix_ns)]
        self._ids = itertools.count(1)
        self._sequence = itertools.count(1)
        self._open: dict[str, OpenSpan] = {}
        self._ended: list[Span] = []
        self._num_dropped = 0
        self._on_event = on_event
        self._finished: Timing | None = None

    def elapsed_seconds(self) -> float:
        """Seconds since the origin."""
        return max(0.0, self._now() - self._origin)

    @contextmanager
    def span(self, name: str, *, parent: OpenSpan | None = None, **attributes: object) -> Iterator[OpenSpan]:
        """Time the body. An exception makes the span ``failed``, an interruption ``cancelled``; both go on."""
        above = parent if parent is not None else _current.get()
        inside = above if above is not None and above.builder is self else None
        span = OpenSpan(self, name, _nearest(inside), self.elapsed_seconds())
        span.set(**attributes)
        self._begin(span)
        token = _current.set(span)
        status = SpanStatus.FAILED
        try:
            yield span
            status = SpanStatus.OK
        except (OperationInterrupted, KeyboardInterrupt, GeneratorExit):
            status = SpanStatus.CANCELLED
            raise
        finally:
            _current.reset(token)
            self._end(span, status)

    def add_clock(self, clock: str, *, source: str, origin_unix_ns: int = 0) -> None:
        """Name a clock that others measured on. Naming it again changes nothing; past the limit it is dropped."""
        if len(self._clocks) < MAX_CLOCKS and all(known.id != clock for known in self._clocks):
            self._clocks.append(Clock(id=clock, source=source, origin_unix_ns=origin_unix_ns))

    def add_span(
        self,
        name: str,
        *,
        duration_seconds: float,
        start_offset_seconds: float = 0.0,
        clock: str | None = None,
        parent: OpenSpan | None = None,
        status: SpanStatus = SpanStatus.OK,
        attributes: Mapping[str, object] | None = None,
    ) -> None:
        """Add a span that was measured elsewhere; ``clock`` defaults to the builder's own."""
        clock = clock if clock is not None else self._clock
        if all(known.id != clock for known in self._clocks):
            raise UsageError(f"no clock is named {clock!r} here", cure="name it with add_clock first")
        span = OpenSpan(self, name, _nearest(parent), max(0.0, start_offset_seconds))
        span.set(**(attributes or {}))
        if self._begin(span, tell=False):
            del self._open[span.id]
            self._ended.append(span.ended(clock=clock, duration_seconds=max(0.0, duration_seconds), status=status))

    def finish(self) -> Timing:
        """The timing; spans still open are ``unfinished``. Closes the stream of events. Again: the same timing."""
        if self._finished is None:
            for span in list(self._open.values()):
                self._end(span, SpanStatus.UNFINISHED)
            if self._num_dropped:
                span = OpenSpan(self, "spans-dropped", None, self.elapsed_seconds())
                span.id = f"s{next(self._ids)}"
                span.set(count=self._num_dropped)
                self._ended.append(span.ended(clock=self._clock, duration_seconds=0.0, status=SpanStatus.OK))
            spans = tuple(sorted(self._ended, key=lambda span: int(span.id[1:])))
            self._finished = Timing(operation_id=self._operation_id, clocks=tuple(self._clocks), spans=spans)
            self._tell("closed", {"timing_sha256": str(timing_digest(self._finished))}, last=True)
        return self._finished

    def _begin(self, span: OpenSpan, *, tell: bool = True) -> bool:
        if self._finished is not None or len(self._open) + len(self._ended) >= MAX_SPANS - 1:
            self._num_dropped += 1
            return False
        span.id = f"s{next(self._ids)}"
        self._open[span.id] = span
        if tell:
            self._tell("span-started", {"id": span.id, "parent": span.parent, "name": span.name})
        return True

    def _end(self, span: OpenSpan, status: SpanStatus) -> None:
        if self._open.pop(span.id, None) is None:
            return
        duration = max(0.0, self.elapsed_seconds() - span.start_offset_seconds)
        ended = span.ended(clock=self._clock, duration_seconds=duration, status=status)
        self._ended.append(ended)
        self._tell("span-ended", {"span": plain_document(ended)})

    def _tell(self, event: str, body: dict[str, Any], *, last: bool = False) -> None:
        if self._on_event is None:
            return
        sequence = next(self._sequence)
        if last or sequence < MAX_EVENTS:
            self._on_event(
                {
                    **_EVENT,
                    "event": event,
                    "sequence": min(sequence, MAX_EVENTS),
                    "operation_id": self._operation_id,
                    "offset_seconds": self.elapsed_seconds(),
                    **body,
                }
            )


def _nearest(span: OpenSpan | None) -> str | None:
    """The id to name as parent; a dropped span has none, and its own parent stands in."""
    return None if span is None else span.id or span.parent


def event_line(event: Mapping[str, object]) -> bytes:
    """A live event as one line."""
    return canonical_json(dict(event)) + b"\n"


def _shortened(text: str) -> str:
    plain = text.encode("ascii", "backslashreplace").decode("ascii")
    printable = "".join(character if character.isprintable() else " " for character in plain)
    return printable[:_MAX_TEXT]


def _plain(value: object) -> object:
    if isinstance(value, (bool, int)):
        return value if abs(value) < 1 << 63 else str(value)[:_MAX_TEXT]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return _shortened(str(value))
