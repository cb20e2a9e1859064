"""The list of cases is a pure function that leaves nothing out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from coldsnap.core.points import POINTS as NAMED
from coldsnap.testing.faults.case import Case
from coldsnap.testing.faults.damage import HOWS, KINDS, MATTERS
from coldsnap.testing.faults.families import FAMILIES
from coldsnap.testing.faults.gpus import DRIVERS, list_gpu_cases
from coldsnap.testing.faults.listing import list_cases, list_real_cases
from coldsnap.testing.faults.operations import OPERATIONS
from coldsnap.testing.faults.rogue import MUTATIONS
from coldsnap.testing.faults.strangers import SCENES

POINTS: list[tuple[str, str, int]] = [
    ("controller", "restore.leased", 1),
    ("controller", "document.named", 5),
    ("worker", "worker.mapped", 1),
]
PROFILE: dict[str, Any] = {name: {"points": POINTS, "writes": {"controller": 30, "worker": 3}} for name in OPERATIONS}


def test_the_same_seed_gives_the_same_cases_and_another_others() -> None:
    once, twice, other = (list_cases(PROFILE, seed=seed) for seed in (1, 1, 2))
    assert once == twice
    assert [case.name for case in once] != [case.name for case in other]
    assert len({case.name for case in once}) == len(once)


def test_every_family_is_there_and_every_case_can_be_run() -> None:
    cases = list_cases(PROFILE, seed=1)
    on_gpus = [case for kind in DRIVERS for case in list_gpu_cases(kind, seed=1)]
    assert {case.family for case in (*cases, *on_gpus)} == set(FAMILIES)
    assert {case.family for case in cases} == set(FAMILIES) - {"call"}
    assert {case.operation for case in cases} <= set(OPERATIONS)
    assert {case.engine for case in cases} == {"fake"}


def test_every_point_gets_a_kill_and_something_else_or_one_of_them_in_a_variant() -> None:
    acts: dict[tuple[str, str, str], set[str]] = {}
    for case in list_cases(PROFILE, seed=1):
        if case.family == "point":
            key = (case.operation, case.params["role"], case.params["point"])
            acts.setdefault(key, set()).add(case.params["act"])
    for operation in OPERATIONS:
        for role, point, _ in POINTS:
            found = acts[operation, role, point]
            assert found
            assert OPERATIONS[operation].is_variant or ("kill" in found and len(found) >= 2)


def test_a_point_that_is_reached_often_is_struck_at_one_of_the_times() -> None:
    times = {
        case.params["nth"]
        for case in list_cases(PROFILE, seed=1)
        if case.family == "point" and case.params["point"] == "document.named" and "nth" in case.params
    }
    assert times <= set(range(1, 6))
    assert len(times) > 1


def test_write_boundaries_are_spread_over_all_of_them() -> None:
    cases = [case for case in list_cases(PROFILE, seed=1) if case.family == "write" and case.operation == "capture"]
    for role, count in (("controller", 30), ("worker", 3)):
        for how in ("torn", "before", "after"):
            places = sorted(c.params["nth"] for c in cases if c.params["role"] == role and c.params["how"] == how)
            assert 1 <= places[0] <= max(1, count // 3)
            assert places[-1] <= count
            assert len(places) == len(set(places))
    assert {c.params["nth"] for c in cases if c.params["role"] == "worker"} == {1, 2, 3}


def test_every_file_mutation_and_scene_has_its_cases() -> None:
    counted = Counter(
        (case.family, case.params.get("file") or case.params.get("mutation") or case.params.get("scene"))
        for case in list_cases(PROFILE, seed=1)
    )
    assert set(MATTERS) == set(KINDS)
    for family, names in (("damage", KINDS), ("reply", MUTATIONS), ("scene", SCENES)):
        for name in names:
            assert counted[family, name] >= 3
    used = {case.params["how"] for case in list_cases(PROFILE, seed=1) if case.family == "damage"}
    assert used == set(HOWS)


def test_real_cases_are_named_apart() -> None:
    cases = list_real_cases(seed=1)
    assert len({case.name for case in cases}) == len(cases) > 30
    assert all(case.name.startswith("real ") and case.engine == "real" for case in cases)
    assert all(case.params.get("role", "controller") == "controller" for case in cases)  # it has no hook inside


def test_a_name_holds_everything_that_tells_cases_apart() -> None:
    case = Case(family="write", operation="capture", params={"role": "worker", "nth": 3, "how": "torn"}, seed=1)
    assert case.name == "write capture worker nth=3 torn"


@pytest.mark.parametrize("kind", sorted(DRIVERS))
def test_cases_on_gpus_are_named_apart_and_strike_points_that_exist(kind: str) -> None:
    cases = list_gpu_cases(kind, seed=1)
    assert len({case.name for case in cases}) == len(cases) > 30
    assert all(case.name.startswith(f"{kind} ") and case.engine == kind for case in cases)
    assert {case.operation for case in cases} <= set(OPERATIONS)
    assert {case.family for case in cases} <= set(FAMILIES)
    assert {case.params["point"] for case in cases if case.family == "point"} <= set(NAMED)
    assert cases != list_gpu_cases(kind, seed=2)
    assert sorted(case.name for case in cases) == sorted(case.name for case in list_gpu_cases(kind, seed=2))


def test_each_step_that_only_gpus_have_is_struck_and_each_call_goes_wrong_in_each_way() -> None:
    cases = [case for kind in DRIVERS for case in list_gpu_cases(kind, seed=1)]
    struck = {case.params["point"] for case in cases if case.family == "point" and case.params["act"] == "kill"}
    assert {"capture.held", "capture.suspended", "capture.template", "restore.resumed"} <= struck
    calls = Counter(case.params["call"] for case in cases if case.family == "call")
    assert calls == {"lock": 5, "checkpoint": 5, "restore": 5, "unlock": 5, "state": 10}
