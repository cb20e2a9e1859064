"""Receipts: strict, and never downgraded."""

from __future__ import annotations

from typing import Any

import pytest

from coldsnap.core.digest import Digest
from coldsnap.core.receipt import (
    Receipt,
    may_replace,
    may_run,
    parse_receipt,
    receipt_bytes,
    receipt_document,
    receipt_from,
)
from coldsnap.errors import InvalidDocument
from coldsnap.testing.documents import digest_of, receipt_example

Document = dict[str, Any]


def fields(document: Document) -> list[str]:
    with pytest.raises(InvalidDocument) as caught:
        receipt_from(document)
    assert all(problem.cure for problem in caught.value.problems)
    return [problem.field for problem in caught.value.problems]


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_a_receipt_is_read_and_written_back(state: str) -> None:
    receipt = receipt_from(receipt_example(state=state))
    assert parse_receipt(receipt_bytes(receipt)) == receipt
    assert receipt_from(receipt_document(receipt)) == receipt
    assert ("error" in receipt_document(receipt)) is (state == "failed")


def test_a_receipt_needs_neither_timing_nor_result() -> None:
    document = receipt_example()
    del document["timing"]
    del document["result"]
    assert receipt_from(document).timing is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": 1}, ["format"]),
        ({"kind": "receipt"}, ["kind"]),
        ({"operation_id": ""}, ["operation_id"]),
        ({"operation": "warm"}, ["operation"]),
        ({"state": "done"}, ["state"]),
        ({"state": "failed"}, ["error"]),
        ({"error": {"kind": "X", "message": "m"}}, ["error"]),
        ({"error": {"kind": "a b", "message": 5}}, ["error.kind", "error.message"]),
        ({"request_sha256": "x"}, ["request_sha256"]),
        ({"snapshot_driver": "auto"}, ["snapshot_driver"]),
        ({"snapshot_driver": "n580"}, ["replay_semantics"]),
        ({"replay_semantics": "guess"}, ["replay_semantics"]),
        ({"duration_seconds": -0.1}, ["duration_seconds"]),
        ({"duration_seconds": "1"}, ["duration_seconds"]),
        ({"result": []}, ["result"]),
        ({"timing": {}}, ["timing.operation_id", "timing.clocks", "timing.spans", "timing.format", "timing.kind"]),
        ({"more": 1}, ["more"]),
    ],
)
def test_a_bad_field_is_named(change: Document, expected: list[str]) -> None:
    assert sorted(fields({**receipt_example(), **change})) == sorted(expected)


@pytest.mark.parametrize("name", ["format", "kind", "operation_id", "request_sha256", "started_at", "completed_at"])
def test_what_must_be_there(name: str) -> None:
    document = receipt_example()
    del document[name]
    assert fields(document) == [name]


@pytest.mark.parametrize(
    "text", ["2026-11-29T14:37:00Z", "2026-11-29T14:37:00.1Z", "2026-02-28T23:59:59.123456789Z", "2026-12-31T23:59:60Z"]
)
def test_times_are_utc(text: str) -> None:
    assert receipt_from({**receipt_example(), "started_at": text}).started_at == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-11-29",
        "2026-11-29T14:37:00",
        "2026-11-29T14:37:00+00:00",
        "2026-11-29 14:37:00Z",
        "2026-11-29T14:37:00.Z",
        "2026-13-29T14:37:00Z",
        "2026-00-29T14:37:00Z",
        "2026-11-32T14:37:00Z",
        "2026-11-00T14:37:00Z",
        "2026-11-29T24:37:00Z",
        "2026-11-29T14:60:00Z",
        "2026-11-29T14:37:61Z",
        "2026-11-29T14:37:00Z\n",
    ],
)
def test_other_times_are_refused(text: str) -> None:
    assert fields({**receipt_example(), "completed_at": text}) == ["completed_at"]


def receipt(state: str, request: str = "request", **change: Any) -> Receipt:
    return receipt_from({**receipt_example(state=state), "request_sha256": digest_of(request), **change})


SUCCEEDED, FAILED = receipt("succeeded"), receipt("failed")


@pytest.mark.parametrize("new", [SUCCEEDED, FAILED, receipt("failed", operation_id="again")])
def test_a_failure_may_give_way_to_the_same_request(new: Receipt) -> None:
    assert may_run(FAILED, new.request_sha256) is None
    assert may_replace(FAILED, new) is None


@pytest.mark.parametrize("new", [FAILED, receipt("succeeded", operation_id="again")])
def test_a_success_is_final(new: Receipt) -> None:
    problem = may_replace(SUCCEEDED, new)
    assert problem is not None
    assert "final" in problem.message
    assert problem.cure
    assert may_run(SUCCEEDED, SUCCEEDED.request_sha256) is not None


@pytest.mark.parametrize("old", [SUCCEEDED, FAILED])
@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_another_request_is_refused_at_that_path(old: Receipt, state: str) -> None:
    problem = may_replace(old, receipt(state, "other"))
    assert problem is not None
    assert problem.value == digest_of("other")
    assert "another request" in problem.message
    assert may_run(old, Digest.of(b"other")) is not None


def test_writing_the_same_receipt_again_is_no_change() -> None:
    assert may_replace(SUCCEEDED, receipt("succeeded")) is None
