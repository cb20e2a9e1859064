"""Forecasts: bytes over measured rates, each with its source, and "at least" where one is not known."""

from __future__ import annotations

from typing import Any

import pytest

from coldsnap.core.forecast import (
    Phase,
    Rate,
    Sample,
    Step,
    Wait,
    Work,
    choose_rate,
    choose_wait,
    forecast,
    samples_of,
    waits_of,
)
from coldsnap.core.receipt import Receipt, receipt_from
from coldsnap.testing.documents import receipt_example

MINE, OTHER = "sha256:mine", "sha256:other"


def sample(bytes_per_s: float, *, num_bytes: int = 1000, artifact: str | None = MINE, name: str = "r") -> Sample:
    seconds = num_bytes / bytes_per_s
    return Sample(step=Step.THAW, bytes=num_bytes, seconds=seconds, source=name, artifact=artifact)


def restore_receipt(result: dict[str, Any], *spans: dict[str, Any], operation: str = "restore") -> Receipt:
    document = receipt_example()
    document["operation"] = operation
    document["operation_id"] = document["timing"]["operation_id"] = f"{operation}-7"
    document["result"] = result
    base = {"clock": "controller", "status": "ok", "start_offset_seconds": 0.0}
    document["timing"]["spans"] = [{**base, "id": f"s{number}", **span} for number, span in enumerate(spans)]
    return receipt_from(document)


def test_time_is_bytes_over_rate() -> None:
    found = forecast(
        [
            Work(phase=Phase.PREPARE, step=Step.UNPACK, bytes=600, why="not prepared: u0"),
            Work(phase=Phase.RESTORE, step=Step.THAW, bytes=300, why="process images"),
        ],
        {Step.UNPACK: Rate(bytes_per_s=200.0, source="a"), Step.THAW: Rate(bytes_per_s=100.0, source="b")},
        [("accept", Wait(name="accept", seconds=0.5, source="c"))],
    )
    assert (found.bytes(Phase.PREPARE), found.seconds(Phase.PREPARE), found.is_whole(Phase.PREPARE)) == (600, 3.0, True)
    assert (found.bytes(Phase.RESTORE), found.seconds(Phase.RESTORE), found.is_whole(Phase.RESTORE)) == (300, 3.5, True)
    assert [one.source for one in found.steps] == ["a", "b", "c"]


def test_what_moves_nothing_takes_no_time_and_needs_no_rate() -> None:
    found = forecast([Work(phase=Phase.PREPARE, step=Step.ADMIT, bytes=0, why="proved")], {}, [])
    assert found.seconds(Phase.PREPARE) == 0.0
    assert found.is_whole(Phase.PREPARE)
    assert found.steps[0].bytes_per_s is None


def test_an_unknown_rate_makes_a_lower_bound() -> None:
    work = [
        Work(phase=Phase.RESTORE, step=Step.THAW, bytes=10, why=""),
        Work(phase=Phase.RESTORE, step=Step.RECOVER, bytes=100, why=""),
    ]
    found = forecast(work, {Step.RECOVER: Rate(bytes_per_s=50.0, source="x")}, [("serve", None)])
    assert not found.is_whole(Phase.RESTORE)
    assert found.seconds(Phase.RESTORE) == 2.0
    assert found.steps[0].seconds is None
    assert found.steps[0].source == "no rate is known here"
    assert found.steps[2].source == "never timed here"


def test_the_median_of_this_artifacts_receipts_wins() -> None:
    samples = [sample(100.0, name="new"), sample(10.0), sample(300.0), sample(999.0, artifact=OTHER)]
    rate = choose_rate(Step.THAW, samples, artifact=MINE, wanted_bytes=1000)
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(100.0)
    assert rate.source == "median of 3 receipts of this artifact, newest new"


def test_only_the_newest_five_count() -> None:
    samples = [*(sample(float(value)) for value in (1, 2, 3, 4, 5)), sample(1e6), sample(1e6)]
    rate = choose_rate(Step.THAW, samples, artifact=MINE, wanted_bytes=1)
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(3.0)


def test_other_artifacts_count_when_they_moved_comparable_bytes() -> None:
    small, large = sample(5.0, num_bytes=249, artifact=OTHER), sample(50.0, num_bytes=250, artifact=None, name="l")
    rate = choose_rate(Step.THAW, [small, large], artifact=MINE, wanted_bytes=1000)
    assert rate is not None
    assert (round(rate.bytes_per_s, 9), rate.source) == (50.0, "receipt of other artifacts, newest l")
    assert choose_rate(Step.THAW, [small], artifact=MINE, wanted_bytes=1000) is None
    assert choose_rate(Step.UNPACK, [large], artifact=MINE, wanted_bytes=1) is None


def test_waits_are_of_this_artifact_only() -> None:
    waits = [
        Wait(name="accept", seconds=2.0, source="r2", artifact=MINE),
        Wait(name="accept", seconds=9.0, source="r1", artifact=OTHER),
        Wait(name="serve", seconds=0.1, source="r2", artifact=MINE),
    ]
    found = choose_wait("accept", waits, artifact=MINE)
    assert found == Wait(name="accept", seconds=2.0, source="receipt of this artifact, newest r2")
    assert choose_wait("accept", waits[1:2], artifact=MINE) is None


RESULT: dict[str, Any] = {
    "seconds": {"hydrate": 2.0, "accept": 0.25, "serve": 0.125, "thaw": 1.0},
    "workers": {
        "w0": {"model_bytes": 700, "residual_bytes": 100, "source": "native", "transfer_path": {"pack": "buffered: x"}},
        "w1": {"model_bytes": 200, "residual_bytes": 0, "source": "native", "transfer_path": {"pack": "buffered: x"}},
    },
}
SPANS = (
    {"name": "unpack", "duration_seconds": 4.0, "attributes": {"bytes": 400, "artifact": MINE}},
    {"name": "admit", "duration_seconds": 0.5, "attributes": {"bytes": 0}},
    {"name": "thaw", "duration_seconds": 1.0, "attributes": {"bytes": 300}},
    {"name": "thaw", "duration_seconds": 9.0, "attributes": {"bytes": 1}, "status": "failed"},
    {"name": "gates", "duration_seconds": 3.0, "attributes": {"bytes": 55}},
)


def test_a_restores_receipt_says_how_fast_each_step_was() -> None:
    found = {one.step: one for one in samples_of(restore_receipt(RESULT, *SPANS))}
    assert {step: (one.bytes, one.seconds) for step, one in found.items()} == {
        Step.UNPACK: (400, 4.0),
        Step.THAW: (300, 1.0),
        Step.HYDRATE_CACHED: (1000, 2.0),
    }
    assert {one.artifact for one in found.values()} == {MINE}
    assert {one.source for one in found.values()} == {"restore-7"}
    assert [(one.name, one.seconds) for one in waits_of(restore_receipt(RESULT, *SPANS))] == [
        ("accept", 0.25),
        ("serve", 0.125),
    ]


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"transfer_path": {"pack": "direct: 0% of the range is in the page cache"}}, Step.HYDRATE_DISK),
        ({"source": "recovery"}, Step.RECOVER),
    ],
)
def test_where_the_bytes_came_from_is_told_apart(changes: dict[str, Any], step: Step) -> None:
    result = {**RESULT, "workers": {"w0": {**RESULT["workers"]["w0"], **changes}}}
    assert [one.step for one in samples_of(restore_receipt(result))] == [step]


def test_a_captures_receipt_says_how_fast_it_froze() -> None:
    result = {"seconds": {"freeze": 0.5}, "image_bytes": 200, "artifact_digest": MINE}
    (found,) = samples_of(restore_receipt(result, operation="capture"))
    assert found == Sample(step=Step.FREEZE, bytes=200, seconds=0.5, source="capture-7", artifact=MINE)
    assert list(waits_of(restore_receipt(result, operation="capture"))) == []


@pytest.mark.parametrize("workers", [None, [], "x", {"w0": 7}, {"w0": {"model_bytes": "many"}}])
def test_results_of_another_shape_say_nothing(workers: object) -> None:
    result = {"seconds": "long", "workers": workers}
    assert list(samples_of(restore_receipt(result))) == []


def test_failed_operations_say_nothing() -> None:
    document = receipt_example(state="failed")
    document["result"] = RESULT
    assert list(samples_of(receipt_from(document))) == []
    assert list(waits_of(receipt_from(document))) == []
