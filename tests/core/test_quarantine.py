"""The record of an artifact's failures: when they are enough, and what it says then."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.core.ladder import Rung
from coldsnap.core.quarantine import (
    LIMIT,
    ArtifactFailures,
    Failure,
    failures_bytes,
    parse_failures,
    quarantine_problem,
    with_failure,
)
from coldsnap.errors import InvalidDocument

ARTIFACT, HERE, THERE = Digest.of(b"artifact"), Digest.of(b"here"), Digest.of(b"there")


def failure(index: int = 1, **changes: object) -> Failure:
    return Failure(
        **{  # type: ignore[arg-type]
            "operation_id": f"restore-{index}",
            "at": "2026-11-29T15:00:00Z",
            "rung": Rung.NATIVE,
            "error": "CriuError",
            "reason": "no",
            **changes,
        }
    )


def record_of(num_failures: int, *, host: Digest = HERE) -> ArtifactFailures:
    record: ArtifactFailures | None = None
    for index in range(num_failures):
        record = with_failure(record, failure(index), artifact=ARTIFACT, path="/a.json", host=host)
    assert record is not None
    return record


def test_two_failures_are_enough() -> None:
    assert LIMIT == 2
    assert not record_of(1).is_quarantined
    assert record_of(2).is_quarantined


def test_another_machines_failures_do_not_count() -> None:
    moved = with_failure(record_of(1), failure(), artifact=ARTIFACT, path="/a.json", host=THERE)
    assert (len(moved.failures), moved.host, moved.is_quarantined) == (1, THERE, False)


def test_only_the_newest_are_kept() -> None:
    record = record_of(40)
    assert [one.operation_id for one in record.failures] == [f"restore-{index}" for index in range(24, 40)]


def test_a_long_reason_is_cut() -> None:
    record = with_failure(None, failure(reason="x" * 10_000), artifact=ARTIFACT, path="/a.json", host=HERE)
    assert record.failures[0].reason == "x" * 4000


def test_the_problem_names_field_value_and_way_out() -> None:
    problem = quarantine_problem(record_of(2))
    assert (problem.field, problem.value) == ("quarantine", str(ARTIFACT))
    assert "failed 2 times here, last in restore-1 at 2026-11-29T15:00:00Z (native, CriuError: no)" in problem.message
    assert problem.cure is not None
    assert "coldsnap clear-quarantine /a.json" in problem.cure
    assert "--ignore-quarantine" in problem.cure


def test_written_and_read_back() -> None:
    record = record_of(2)
    data = failures_bytes(record)
    assert data.endswith(b"\n")
    assert parse_failures(data) == record
    assert failures_bytes(parse_failures(data)) == data


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": 2}, "format"),
        ({"kind": "coldsnap-receipt"}, "kind"),
        ({"extra": 1}, "extra"),
        ({"artifact": "sha256:ab"}, "artifact"),
        ({"host": None}, "host"),
        ({"failures": [{**json.loads(failure().model_dump_json()), "at": "yesterday"}]}, "failures[0].at"),
        ({"failures": [{**json.loads(failure().model_dump_json()), "rung": "lift"}]}, "failures[0].rung"),
    ],
)
def test_damaged_records_are_refused_by_name(change: dict[str, object], field: str) -> None:
    document = {**json.loads(failures_bytes(record_of(1))), **change}
    with pytest.raises(InvalidDocument) as caught:
        parse_failures(json.dumps(document).encode())
    assert field in [problem.field for problem in caught.value.problems]


def test_a_missing_head_is_told() -> None:
    document = json.loads(failures_bytes(record_of(1)))
    del document["format"], document["kind"]
    with pytest.raises(InvalidDocument) as caught:
        parse_failures(json.dumps(document).encode())
    assert {problem.field for problem in caught.value.problems} == {"format", "kind"}


@settings(max_examples=60)
@given(data=st.binary(max_size=100))
def test_arbitrary_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    with pytest.raises(InvalidDocument):
        parse_failures(data)
