"""A part of the campaign, some of every family, with the fake engine: `./run faults` does all of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.testing.faults import campaign
from coldsnap.testing.faults.base import make_base
from coldsnap.testing.faults.campaign import Campaign, Sums, run_campaign
from coldsnap.testing.faults.case import Case, Row
from coldsnap.testing.faults.families import FAMILIES
from coldsnap.testing.faults.gpus import DRIVERS
from coldsnap.testing.faults.lane import Lane

pytestmark = [pytest.mark.criu, pytest.mark.timeout(3600)]  # a case that hangs is found by its own limits

_HOW_MANY = {"point": 18, "write": 7, "damage": 10, "race": 3, "reply": 3, "scene": 3}
_ON_A_GPU = {"point": 3, "call": 2}


def some_of_each(cases: list[Case]) -> list[Case]:
    """The first of every family, of one kind of engine at a time; the list is shuffled by the seed."""
    wanted = _HOW_MANY if all(case.engine == "fake" for case in cases) else _ON_A_GPU
    return [case for family in FAMILIES for case in _first(cases, family, wanted.get(family, 2))]


def _first(cases: list[Case], family: str, number: int) -> Iterator[Case]:
    found = (case for case in cases if case.family == family and case.params.get("act") != "stop")
    return (case for case, _ in zip(found, range(number), strict=False))


@pytest.fixture(scope="module")
def sums(criu: None) -> Sums:
    before = set(Path(tempfile.gettempdir()).glob("coldsnap-faults-*"))
    found = run_campaign(
        Campaign(
            seed=3,
            choose=some_of_each,
            max_s=3600.0,
            num_pens=2,
            num_inputs=30,
            with_real_engine=False,
            say=lambda text: None,
            tell=lambda row: None,
        )
    )
    assert set(Path(tempfile.gettempdir()).glob("coldsnap-faults-*")) <= before
    return found


def test_everything_that_must_hold_holds_after_every_fault(sums: Sums) -> None:
    assert sums.trouble == []
    assert {row.name: row.violations for row in sums.rows if row.violations} == {}
    assert len(sums.rows) == sums.num_listed


def test_every_family_has_faults_that_happened(sums: Sums) -> None:
    document = sums.document()
    assert set(document["families"]) == (set(FAMILIES) - {"call"}) | set(DRIVERS)
    assert sum(row.name.startswith("initialised call ") and row.happened for row in sums.rows) == _ON_A_GPU["call"]
    assert document["faults"] >= 0.9 * document["cases_run"]
    assert document["sigkills"] >= 10
    assert document["criu_faults"] >= 10
    assert {"done", "killed", "refused"} <= set(document["outcomes"])


def test_every_parser_was_fuzzed_and_none_was_wrong(sums: Sums) -> None:
    assert len(sums.parsers) == 20
    for tally in sums.parsers.values():
        assert tally["inputs"] == 30
        assert tally["accepted"] + tally["refused"] == 30
        assert tally["wrong"] == []


def test_sums_count_what_happened_and_what_must_not_have() -> None:
    def row(name: str, happened: bool = True, **changes: object) -> Row:
        values = {
            "restored": False,
            "sigkills": 0,
            "outcome": "refused",
            "reason": "",
            "violations": (),
            "seconds": 1.0,
        }
        return Row(name=name, happened=happened, **{**values, **changes})  # type: ignore[arg-type]

    sums = Sums(
        rows=[
            row("point b", restored=True, sigkills=1, outcome="killed", points=("pack.named", "no.point")),
            row("damage a", violations=(("wrong-answer", "x"), ("leftover", "y"))),
            row("disk c", happened=False, restored=True, sigkills=1),
        ],
        num_listed=4,
    )
    document = sums.document()
    assert (document["faults"], document["sigkills"], document["criu_faults"]) == (2, 1, 1)
    assert (document["wrong_answers"], document["leftovers"], document["damaged"], document["stuck"]) == (1, 1, 0, 0)
    assert (document["cases_listed"], document["cases_run"]) == (4, 3)
    assert document["faults_that_did_not_happen"] == ["disk c"]
    assert document["points"]["hit"] == 1
    assert "pack.named" not in document["points"]["missing"]
    assert document["families"] == {"damage": 1, "point": 1}
    assert document["outcomes"] == {"killed": 1, "refused": 1}
    assert [one[0] for one in document["rows"]] == ["damage a", "disk c", "point b"]
    assert document["violations"] == [["damage a", "wrong-answer", "x"], ["damage a", "leftover", "y"]]


def test_pens_that_do_not_come_up_are_told_and_cost_no_result(criu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def the_first_alone(lane: Lane, model: Path | None) -> None:
        if lane.desk.parent.name != "0":
            raise AssertionError("no second one")
        make_base(lane, model)

    monkeypatch.setattr(campaign, "make_base", the_first_alone)
    found = run_campaign(
        Campaign(
            seed=3,
            choose=lambda cases: [case for case in cases if case.name.startswith("access verify")][:2],
            max_s=3600.0,
            num_pens=2,
            num_inputs=0,
            with_real_engine=False,
            say=lambda text: None,
            tell=lambda row: None,
        )
    )
    assert [row.name.split()[0] for row in found.rows] == ["access", "access"]
    assert len(found.trouble) == 3
    assert [text.split(":")[0] for text in found.trouble] == ["a pen did not come up"] * 3
