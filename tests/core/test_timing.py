"""Timing: spans on clocks that are never mixed, live events, and limits that never stop an operation."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.timing import (
    MAX_EVENT_BYTES,
    MAX_EVENTS,
    MAX_TIMING_BYTES,
    Span,
    SpanStatus,
    Timing,
    TimingBuilder,
    event_line,
    parse_timing,
    sum_seconds,
    timing_bytes,
    timing_digest,
    timing_from,
)
from coldsnap.errors import InvalidDocument, OperationInterrupted, UsageError
from coldsnap.testing.documents import timing_example

Document = dict[str, Any]
Event = dict[str, Any]


def fields(document: Document) -> list[str]:
    with pytest.raises(InvalidDocument) as caught:
        timing_from(document)
    assert all(problem.cure for problem in caught.value.problems)
    return [problem.field for problem in caught.value.problems]


def span(name: str, parent: str | None = None, **change: Any) -> Document:
    above = {} if parent is None else {"parent": parent}
    return {
        "id": name,
        **above,
        "name": name,
        "clock": "controller",
        "start_offset_seconds": 0.0,
        "duration_seconds": 1.0,
        "status": "ok",
        **change,
    }


def timing(*spans: Document, **change: Any) -> Document:
    return {**timing_example(), "spans": list(spans), **change}


# ---- the document ----------------------------------------------------------------------------------------------


def test_a_timing_is_read_and_written_back() -> None:
    record = timing_from(timing_example())
    assert parse_timing(timing_bytes(record)) == record
    assert timing_bytes(record).endswith(b"\n")


def test_a_span_may_start_at_a_whole_second_and_carry_plain_values() -> None:
    record = timing_from(timing(span("a", start_offset_seconds=1, attributes={"n": 1, "t": "x", "b": True, "f": 0.5})))
    assert record.spans[0].start_offset_seconds == 1.0
    assert record.spans[0].attributes == {"n": 1, "t": "x", "b": True, "f": 0.5}


CLOCK = timing_example()["clocks"][0]
BAD: list[tuple[str, Document, list[str]]] = [
    ("no clock", timing(clocks=[]), ["clocks"]),
    ("clock twice", timing(clocks=[CLOCK, CLOCK]), ["clocks[1].id"]),
    ("unknown clock", timing(span("a", clock="other")), ["spans[0].clock"]),
    ("span twice", timing(span("a"), span("a")), ["spans[1].id"]),
    ("unknown parent", timing(span("a", "b")), ["spans[0].parent"]),
    ("own parent", timing(span("a", "a")), ["spans[0].parent"]),
    ("circle of two", timing(span("a", "b"), span("b", "a")), ["spans[0].parent", "spans[1].parent"]),
    (
        "circle of three with a tail",
        timing(span("t", "a"), span("a", "b"), span("b", "c"), span("c", "a"), span("free")),
        ["spans[1].parent", "spans[2].parent", "spans[3].parent"],
    ),
    ("negative offset", timing(span("a", start_offset_seconds=-1.0)), ["spans[0].start_offset_seconds"]),
    ("negative duration", timing(span("a", duration_seconds=-1.0)), ["spans[0].duration_seconds"]),
    ("status", timing(span("a", status="great")), ["spans[0].status"]),
    ("nested attribute", timing(span("a", attributes={"x": {}})), ["spans[0].attributes.x"]),
    ("null attribute", timing(span("a", attributes={"x": None})), ["spans[0].attributes.x"]),
    ("too many attributes", timing(span("a", attributes={f"a{i}": i for i in range(33)})), ["spans[0].attributes"]),
    ("too many spans", timing(*(span(f"s{i}") for i in range(2049))), ["spans"]),
    ("too many clocks", timing(clocks=[{**CLOCK, "id": f"c{i}"} for i in range(128)] + [CLOCK]), ["clocks"]),
    ("negative origin", timing(clocks=[{**CLOCK, "origin_unix_ns": -1}]), ["clocks[0].origin_unix_ns"]),
]


@pytest.mark.parametrize(("document", "expected"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_timing_is_refused_where_it_is_bad(document: Document, expected: list[str]) -> None:
    assert fields(document) == expected


def test_exactly_the_limits_are_good() -> None:
    full = timing(
        *(span(f"s{i}", f"s{i - 1}" if i else None) for i in range(2048)),
        clocks=[CLOCK] + [{**CLOCK, "id": f"c{i}"} for i in range(127)],
    )
    full["spans"][0]["attributes"] = {f"a{i}": i for i in range(32)}
    assert len(timing_from(full).spans) == 2048
    data = timing_bytes(timing_from(timing_example()))
    assert parse_timing(data + b" " * (MAX_TIMING_BYTES - len(data)))
    with pytest.raises(InvalidDocument, match="too large"):
        parse_timing(data + b" " * (MAX_TIMING_BYTES + 1 - len(data)))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 7), min_size=8, max_size=8))
def test_circles_are_found_exactly(parents: list[int]) -> None:
    document = timing(*(span(f"s{i}", f"s{parents[i]}") for i in range(8)))

    def comes_back(start: int) -> bool:
        here = parents[start]
        for _ in range(8):
            if here == start:
                return True
            here = parents[here]
        return False

    expected = [f"spans[{i}].parent" for i in range(8) if comes_back(i)]
    assert fields(document) == expected  # eight arrows among eight spans always close a circle


def test_spans_of_one_clock_add_up_and_others_never() -> None:
    record = timing_from(timing(span("a"), span("b", duration_seconds=0.25)))
    assert sum_seconds(record.spans) == 1.25
    assert sum_seconds([]) == 0.0
    other = Span(id="c", name="c", clock="other", start_offset_seconds=0.0, duration_seconds=1.0, status=SpanStatus.OK)
    with pytest.raises(UsageError, match="other"):
        sum_seconds([*record.spans, other])


# ---- the builder -----------------------------------------------------------------------------------------------


def ticking(step: float = 1.0, start: float = 100.0) -> Callable[[], float]:
    """A clock that is ``start`` when first read and ``step`` later at each further reading."""
    times: Iterator[float] = (start + step * n for n in itertools.count())
    return lambda: next(times)


def builder(*, now: Callable[[], float] | None = None, events: list[Event] | None = None) -> TimingBuilder:
    return TimingBuilder(
        operation_id="op-1",
        now=now or ticking(),
        origin_unix_ns=5,
        on_event=None if events is None else events.append,
    )


def checked(made: Timing) -> Timing:
    """The builder's result is a document that the parser takes."""
    assert parse_timing(timing_bytes(made)) == made
    return made


def test_spans_nest_and_are_timed_from_the_origin() -> None:
    building = builder()  # reads 100
    with building.span("outer", unit="u0"), building.span("inner") as inner:  # start at 101 and 102
        inner.set(bytes=17)
    # inner ends at 103, outer at 104
    made = checked(building.finish())
    assert [(s.id, s.parent, s.name, s.start_offset_seconds, s.duration_seconds, s.status) for s in made.spans] == [
        ("s1", None, "outer", 1.0, 3.0, SpanStatus.OK),
        ("s2", "s1", "inner", 2.0, 1.0, SpanStatus.OK),
    ]
    assert made.spans[0].attributes == {"unit": "u0"}
    assert made.spans[1].attributes == {"bytes": 17}
    assert made.clocks[0].origin_unix_ns == 5


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x"), SpanStatus.FAILED),
        (OperationInterrupted("stop"), SpanStatus.CANCELLED),
        (KeyboardInterrupt(), SpanStatus.CANCELLED),
    ],
)
def test_an_exception_marks_the_span_and_goes_on(error: BaseException, status: SpanStatus) -> None:
    building = builder()
    with pytest.raises(type(error)), building.span("a"), building.span("b"):
        raise error
    assert [s.status for s in building.finish().spans] == [status, status]
    with building.span("late"):
        pass
    assert len(building.finish().spans) == 2


def test_siblings_after_a_failure_have_the_right_parent() -> None:
    building = builder()
    with building.span("outer"):
        with pytest.raises(ValueError, match="x"), building.span("bad"):
            raise ValueError("x")
        with building.span("good"):
            pass
    assert [(s.name, s.parent) for s in building.finish().spans] == [("outer", None), ("bad", "s1"), ("good", "s1")]


def test_threads_do_not_inherit_a_parent_but_may_name_one() -> None:
    building = builder()
    seen: list[str | None] = []

    with building.span("outer") as outer:

        def work() -> None:
            with building.span("alone") as alone, building.span("inside") as inside:
                seen.extend([alone.parent, "alone" if inside.parent == alone.id else None])
            with building.span("named", parent=outer) as named:
                seen.append(named.parent)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [None, "alone", outer.id]
    assert len(checked(building.finish()).spans) == 4


def test_two_builders_do_not_mix() -> None:
    one, two = builder(), builder()
    with one.span("a"), two.span("b") as b, one.span("c") as c:
        assert b.parent is None
        assert c.parent is None


def test_spans_measured_elsewhere_keep_their_clock() -> None:
    building = builder()
    building.add_clock("worker-w0", source="monotonic of w0")
    building.add_clock("worker-w0", source="named again")
    with building.span("wake") as wake:
        building.add_span("read", duration_seconds=0.5, clock="worker-w0", parent=wake, attributes={"path": "direct"})
    building.add_span("own", duration_seconds=-1.0, start_offset_seconds=-2.0)
    made = checked(building.finish())
    assert [clock.id for clock in made.clocks] == ["controller", "worker-w0"]
    by_name = {s.name: s for s in made.spans}
    assert (by_name["read"].clock, by_name["read"].parent) == ("worker-w0", by_name["wake"].id)
    assert (by_name["own"].clock, by_name["own"].duration_seconds, by_name["own"].start_offset_seconds) == (
        "controller",
        0.0,
        0.0,
    )
    with pytest.raises(UsageError, match="unheard"):
        building.add_span("x", duration_seconds=1.0, clock="unheard")


def test_a_span_left_open_is_unfinished() -> None:
    building = builder()
    context = building.span("open")
    context.__enter__()
    (open_span,) = checked(building.finish()).spans
    assert open_span.status is SpanStatus.UNFINISHED
    context.__exit__(None, None, None)
    assert building.finish().spans == (open_span,)


def test_a_clock_that_goes_back_gives_no_negative_time() -> None:
    times = iter([10.0, 5.0, 1.0, 0.0])
    building = builder(now=lambda: next(times))
    with building.span("a"):
        pass
    (only,) = checked(building.finish()).spans
    assert (only.start_offset_seconds, only.duration_seconds) == (0.0, 0.0)


def test_events_tell_the_story_and_close_with_the_digest() -> None:
    events: list[Event] = []
    building = builder(events=events)
    with building.span("a", unit="u0"), building.span("b"):
        pass
    made = building.finish()
    assert building.finish() is made
    assert [(event["event"], event["sequence"]) for event in events] == [
        ("span-started", 1),
        ("span-started", 2),
        ("span-ended", 3),
        ("span-ended", 4),
        ("closed", 5),
    ]
    assert events[1]["parent"] == events[0]["id"]
    assert events[3]["span"]["attributes"] == {"unit": "u0"}
    assert events[-1]["timing_sha256"] == str(timing_digest(made))
    for event in events:
        line = event_line(event)
        assert line.count(b"\n") == 1
        assert json.loads(line) == event
        assert (event["format"], event["kind"], event["operation_id"]) == (1, "coldsnap-timing-event", "op-1")


def test_too_many_spans_are_dropped_and_counted() -> None:
    events: list[Event] = []
    building = builder(events=events)
    with building.span("outer") as outer:
        for _ in range(3000):
            with building.span("many"):
                pass
        building.add_span("elsewhere", duration_seconds=1.0)
        with building.span("dropped", parent=outer) as dropped, building.span("child of it") as child:
            assert (dropped.id, child.parent) == ("", outer.id)
    made = checked(building.finish())
    assert len(made.spans) == 2048
    assert made.spans[-1].name == "spans-dropped"
    assert made.spans[-1].attributes == {"count": (1 + 3000 + 1 + 2) - 2047}
    assert len(events) <= MAX_EVENTS
    assert events[-1]["event"] == "closed"


def test_events_stay_within_their_limits_whatever_the_attributes() -> None:
    events: list[Event] = []
    building = builder(events=events)
    huge: dict[str, Any] = {f"{i:02}" + "\U0001f600" * 9000: "\u0001é" * 9000 for i in range(40)}
    with building.span("\U0001f600\n" * 9000, **huge) as wide:
        wide.set(more=1)
    assert all(len(event_line(event)) <= MAX_EVENT_BYTES for event in events)
    (only,) = checked(building.finish()).spans
    assert len(only.attributes) == 32


def test_the_stream_of_events_ends_with_closed_even_when_full() -> None:
    events: list[Event] = []
    building = builder(events=events)
    for _ in range(MAX_EVENTS):
        building._tell("span-started", {})  # more than the spans of one timing can cause
    building.finish()
    assert len(events) == MAX_EVENTS
    assert events[-1]["event"] == "closed"
    assert [event["sequence"] for event in events] == list(range(1, MAX_EVENTS + 1))


def test_attributes_become_plain_values() -> None:
    building = builder()
    with building.span("", big=2**70, inf=float("inf"), thing=object, none=None, half="a\ud800", flag=True) as odd:
        odd.set(flag=False)
    (only,) = checked(building.finish()).spans
    assert only.name == "span"
    assert only.attributes["big"] == str(2**70)
    assert only.attributes["inf"] == "inf"
    assert only.attributes["none"] == "None"
    assert only.attributes["flag"] is False


def test_clocks_past_the_limit_are_dropped() -> None:
    building = builder()
    for index in range(200):
        building.add_clock(f"c{index}", source="x")
    assert len(checked(building.finish()).clocks) == 128
