"""Around a verb: a receipt that is never downgraded, timing, and live events that close with its digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.receipt import MAX_RECEIPT_BYTES, Receipt, parse_receipt
from coldsnap.core.request import OperationRequest, request_from, request_sha256
from coldsnap.core.timing import timing_digest
from coldsnap.errors import HostError, OperationInterrupted, PeerError, Problem, Refused
from coldsnap.ops.operation import Outlet, operation
from coldsnap.ops.tools import Tools
from coldsnap.store.documents import read_private
from coldsnap.testing.documents import request_example


def request(**changes: Any) -> OperationRequest:
    return request_from({**request_example(), **changes})


OTHER = {"output": "/srv/artifacts/another.json"}


def receipt_of(tools: Tools, path: Path | None = None) -> Receipt:
    return parse_receipt(read_private(path or tools.state.receipts / "op-1.json", MAX_RECEIPT_BYTES))


def succeed(tools: Tools, wanted: OperationRequest, **result: Any) -> None:
    with operation(tools, wanted) as op:
        op.succeed(result)


def fail(tools: Tools, wanted: OperationRequest, error: BaseException, outlet: Outlet | None = None) -> None:
    with operation(tools, wanted, outlet=outlet):
        raise error


def test_a_success_is_recorded_with_its_request_and_phases(tools: Tools) -> None:
    with operation(tools, request()) as op:
        with op.span("outer"), op.span("inner"):
            pass
        op.succeed({"bytes": 3})
    found = receipt_of(tools)
    assert (found.state.value, found.error, found.result) == ("succeeded", None, {"bytes": 3})
    assert found.request_sha256 == request_sha256(request())
    assert (found.operation_id, found.operation.value, found.engine) == ("op-1", "capture", "transformers")
    assert found.timing is not None
    spans = {span.name: span for span in found.timing.spans}
    assert set(spans) == {"outer", "inner"}
    assert spans["inner"].parent == spans["outer"].id
    assert found.started_at <= found.completed_at


def test_seconds_add_up_by_phase(tools: Tools) -> None:
    with operation(tools, request()) as op:
        for _ in range(2):
            with op.span("twice"):
                pass
        seconds = op.seconds()
    assert set(seconds) == {"twice", "total"}
    assert 0 <= seconds["twice"] <= seconds["total"]


def test_a_failure_keeps_its_reasons_cure_and_facts(tools: Tools) -> None:
    problems = [Problem(field="a", message="is wrong", value="1", cure="mend a"), Problem(field="b", message="too")]
    error = Refused("the thing", problems, cure="mend both", facts={"path": Path("/x"), "n": 1})
    with pytest.raises(Refused) as caught:
        fail(tools, request(), error)
    assert caught.value is error
    found = receipt_of(tools)
    assert found.state.value == "failed"
    assert found.error is not None
    assert (found.error.kind, found.error.cure) == ("Refused", "mend both")
    assert [(p.field, p.message, p.value, p.cure) for p in found.error.reasons] == [
        ("a", "is wrong", "1", "mend a"),
        ("b", "too", None, None),
    ]
    assert found.error.facts == {"path": "/x", "n": 1}


def test_a_foreign_error_is_recorded_by_its_name(tools: Tools) -> None:
    with pytest.raises(ZeroDivisionError):
        fail(tools, request(), ZeroDivisionError("by zero"))
    error = receipt_of(tools).error
    assert error is not None
    assert (error.kind, error.message) == ("ZeroDivisionError", "ZeroDivisionError: by zero")


def test_a_failure_gives_way_to_a_success_of_the_same_request(tools: Tools) -> None:
    with pytest.raises(PeerError):
        fail(tools, request(), PeerError("first try"))
    succeed(tools, request(), try_number=2)
    assert receipt_of(tools).result == {"try_number": 2}


def test_a_success_is_final_and_nothing_runs_again(tools: Tools) -> None:
    succeed(tools, request(), try_number=1)
    before = (tools.state.receipts / "op-1.json").read_bytes()
    ran: list[str] = []
    with pytest.raises(Refused, match="a success is final"), operation(tools, request()):
        ran.append("body")
    assert ran == []
    assert (tools.state.receipts / "op-1.json").read_bytes() == before


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_another_requests_receipt_stops_the_operation_before_it_runs(tools: Tools, state: str) -> None:
    if state == "succeeded":
        succeed(tools, request())
    else:
        with pytest.raises(PeerError):
            fail(tools, request(), PeerError("x"))
    before = (tools.state.receipts / "op-1.json").read_bytes()
    ran: list[str] = []
    with pytest.raises(Refused, match="belongs to another request") as caught, operation(tools, request(**OTHER)):
        ran.append("body")
    assert ran == []
    assert str(tools.state.receipts / "op-1.json") in str(caught.value)
    assert (tools.state.receipts / "op-1.json").read_bytes() == before


def test_the_callers_receipt_is_written_and_guarded_as_well(tools: Tools, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    with operation(tools, request(), outlet=Outlet(receipt_path=mine)) as op:
        op.succeed({})
    assert receipt_of(tools, mine) == receipt_of(tools)
    ran: list[str] = []
    with (
        pytest.raises(Refused, match=r"mine\.json"),
        operation(tools, request(id="op-2", **OTHER), outlet=Outlet(receipt_path=mine)),
    ):
        ran.append("body")
    assert ran == []
    assert not (tools.state.receipts / "op-2.json").exists()


def test_a_success_that_came_meanwhile_is_not_downgraded(tools: Tools) -> None:
    """Somebody else ran the same request to its end while this one was failing."""

    def overtaken() -> None:
        with operation(tools, request()):
            succeed(tools, request(), by="the other")
            raise PeerError("too late")

    with pytest.raises(PeerError) as caught:
        overtaken()
    assert receipt_of(tools).result == {"by": "the other"}
    assert any("was not written" in note for note in caught.value.__notes__)


def test_a_receipt_that_cannot_be_written_does_not_hide_the_error(tools: Tools, tmp_path: Path) -> None:
    outlet = Outlet(receipt_path=tmp_path / "absent" / "r.json")
    with pytest.raises(PeerError, match="the cause") as caught:
        fail(tools, request(), PeerError("the cause"), outlet)
    assert any(str(outlet.receipt_path) in note for note in caught.value.__notes__)
    assert receipt_of(tools).state.value == "failed", "the other receipt is written all the same"


def test_a_success_whose_receipt_cannot_be_written_is_an_error(tools: Tools, tmp_path: Path) -> None:
    outlet = Outlet(receipt_path=tmp_path / "absent" / "r.json")
    with pytest.raises(HostError), operation(tools, request(), outlet=outlet) as op:
        op.succeed({})


def test_an_interruption_says_what_was_undone_and_is_a_failed_receipt(tools: Tools) -> None:
    stop = KeyboardInterrupt()
    stop.add_note("stopped unit u0")
    with pytest.raises(OperationInterrupted, match="capture was interrupted") as caught:
        fail(tools, request(), stop)
    assert caught.value.__notes__ == ["stopped unit u0"]
    error = receipt_of(tools).error
    assert error is not None
    assert error.kind == "OperationInterrupted"


def test_an_operation_with_a_name_of_its_own_goes_by_it(tools: Tools) -> None:
    words = "^prepare was interrupted; nothing was committed"
    with pytest.raises(OperationInterrupted, match=words), operation(tools, request(), verb="prepare"):
        raise KeyboardInterrupt


def test_facts_without_end_are_left_out(tools: Tools) -> None:
    with pytest.raises(PeerError):
        fail(tools, request(), PeerError("x", facts={"log": "y" * (2 << 20)}))
    error = receipt_of(tools).error
    assert error is not None
    assert set(error.facts) == {"left_out"}


def test_live_events_close_with_the_digest_of_the_receipts_timing(tools: Tools) -> None:
    events: list[dict[str, Any]] = []
    with operation(tools, request(), outlet=Outlet(on_event=events.append)) as op, op.span("phase"):
        pass
    timing = receipt_of(tools).timing
    assert timing is not None
    assert events[-1]["event"] == "closed"
    assert events[-1]["timing_sha256"] == str(timing_digest(timing))
    assert [event["event"] for event in events] == ["span-started", "span-ended", "closed"]
    assert json.loads(json.dumps(events[1]["span"])) == events[1]["span"]
