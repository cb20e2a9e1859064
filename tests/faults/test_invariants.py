"""What must hold is really looked at: each thing that must not be is planted in a pen, and is found."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.messages import Answer
from coldsnap.testing.faults import verbs
from coldsnap.testing.faults.case import Case, Struck, run_case
from coldsnap.testing.faults.invariants import (
    Violation,
    check_answers,
    check_committed,
    check_nothing_left,
    check_strays,
    committed_now,
    is_serving,
)
from coldsnap.testing.faults.lane import Lane
from coldsnap.testing.faults.operations import OPERATIONS, Operation
from coldsnap.testing.faults.pen import Lines, Pen
from coldsnap.testing.faults.processes import everyone, newest_engine, newest_init
from coldsnap.testing.faults.running import Outcome

from .conftest import in_pen  # isort: skip

pytestmark = pytest.mark.criu

Ask = Callable[[str], Any]


@contextlib.contextmanager
def in_a_hurry(lane: Lane) -> Iterator[None]:
    """For what never ends by itself."""
    usual = lane.patience_s
    lane.patience_s = 1.0
    try:
        yield
    finally:
        lane.patience_s = usual


def told(found: Iterable[Violation]) -> list[str]:
    return [f"{one.kind}: {one.text}" for one in found]


@in_pen
def a_pen_sees_its_own_processes_and_nothing_of_it_is_left(lane: Lane) -> Any:
    return [
        everyone(),
        os.getpid(),
        told(check_nothing_left(lane)),
        told(check_committed(lane, committed_now(lane))),
    ]


def test_a_pen_sees_its_own_processes_and_nothing_of_it_is_left(ask: Ask) -> None:
    assert ask("a_pen_sees_its_own_processes_and_nothing_of_it_is_left") == [[], 1, [], []]


@in_pen
def what_is_left_is_found(lane: Lane) -> Any:
    bystander = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    (lane.state / "staging" / "pack.0123.partial").touch()
    (lane.temporary / "forgotten").touch()
    (lane.yard / "m").mkdir()
    subprocess.run(["mount", "--bind", str(lane.model), str(lane.yard / "m")], check=True)
    held = os.open(lane.state / "locks" / "in-use.lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    found = told(check_nothing_left(lane))
    bystander.kill()
    bystander.wait()
    os.close(held)
    subprocess.run(["umount", str(lane.yard / "m")], check=True)
    (lane.yard / "m").rmdir()
    (lane.temporary / "forgotten").unlink()
    return [found, told(check_nothing_left(lane))]


def test_what_is_left_is_found(ask: Ask) -> None:
    found, afterwards = ask("what_is_left_is_found")
    assert sorted(line.split()[1] for line in found) == ["held", "mount", "process", "temporary", "temporary"]
    assert any("(sleep)" in line for line in found)
    assert [line.split()[1] for line in afterwards] == ["temporary"]


@in_pen
def strays_are_found_and_ended_and_the_service_is_none(lane: Lane) -> Any:
    lane.must(verbs.do_restore)
    none = told(check_strays(lane))
    (lane.state / "services" / "svc" / "service.json").unlink()
    with in_a_hurry(lane):
        return [none, told(check_strays(lane)), everyone()]


def test_strays_are_found_and_ended_and_the_service_is_none(ask: Ask) -> None:
    none, found, left = ask("strays_are_found_and_ended_and_the_service_is_none")
    assert none == []
    assert len(found) == 2
    assert any("(coldsnap-init)" in line for line in found)
    assert left == []


@in_pen
def a_wrong_answer_is_found(lane: Lane) -> Any:
    nobody = [told(check_answers(lane)), is_serving(lane)]
    lane.must(verbs.do_restore)
    right = [told(check_answers(lane)), is_serving(lane)]
    first, *rest = lane.reference
    lane.reference = (Answer(token_ids=first.token_ids[::-1], text=first.text), *rest)
    wrong = [told(check_answers(lane)), is_serving(lane)]
    lane.reference = (first, *rest)
    lane.must(verbs.do_stop)
    return [nobody, right, wrong]


def test_a_wrong_answer_is_found(ask: Ask) -> None:
    nobody, right, wrong = ask("a_wrong_answer_is_found")
    assert nobody == [[], False]
    assert right == [[], True]
    assert wrong[0][0].startswith("wrong-answer: ")
    assert wrong[1] is False


@in_pen
def damage_is_found(lane: Lane) -> Any:
    committed = committed_now(lane)
    (pack,) = (lane.state / "model-payloads" / "sha256").glob("*.pack")
    whole = pack.read_bytes()
    pack.unlink()
    gone = [told(check_committed(lane, committed)), told(check_committed(lane, committed, gone=True))]
    pack.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return [gone, told(check_committed(lane, committed)), told(check_committed(lane, {}))]


def test_damage_is_found(ask: Ask) -> None:
    (gone, allowed), changed, misnamed = ask("damage_is_found")
    assert len(gone) == 1
    assert gone[0].endswith(".pack is gone")
    assert allowed == []
    assert any(line.endswith(".pack changed") for line in changed)
    assert len(misnamed) == 1
    assert ".pack holds sha256:" in misnamed[0]


@in_pen
def a_base_that_an_earlier_case_damaged_is_noticed(lane: Lane) -> Any:
    (pack,) = (lane.state / "model-payloads" / "sha256").glob("*.pack")
    before, kept = pack.stat(), lane.base / pack.relative_to(lane.state)
    whole = pack.read_bytes()
    pack.chmod(0o600)
    try:
        pack.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        lane.reset()
        with pytest.raises(AssertionError, match="the base itself is damaged") as caught:
            committed_now(lane)
    finally:
        pack.write_bytes(whole)
        pack.chmod(before.st_mode)
        os.utime(pack, ns=(before.st_atime_ns, before.st_mtime_ns))
    return [
        before.st_ino == kept.stat().st_ino,
        str(caught.value).endswith(pack.name),
        len(committed_now(lane)) == len(lane.committed),
    ]


def test_a_base_that_an_earlier_case_damaged_is_noticed(ask: Ask) -> None:
    assert ask("a_base_that_an_earlier_case_damaged_is_noticed") == [True, True, True]


@in_pen
def the_artifact_may_be_damaged_without_the_base(lane: Lane) -> Any:
    """Also in place, and when it is as large as a pack."""
    kept = lane.base / lane.artifact.name
    whole = kept.read_bytes()
    try:
        kept.write_bytes(whole + b" " * 100_000)
        lane.reset()
        lane.artifact.write_bytes(b"x")
        return kept.stat().st_size == len(whole) + 100_000
    finally:
        kept.write_bytes(whole)


def test_the_artifact_may_be_damaged_without_the_base(ask: Ask) -> None:
    assert ask("the_artifact_may_be_damaged_without_the_base") is True


def inflict(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    return Struck(outcome=Outcome(status="broken", kind="KeyError", text="x"), happened=True, restored=True)


@in_pen
def a_case_that_leaves_a_process_and_a_broken_verb_has_violations(lane: Lane) -> Any:
    case = Case(family="point", operation="explain", params={"how": "badly"}, seed=1)
    with in_a_hurry(lane):
        return run_case(lane, case, inflict).document()


def test_a_case_that_leaves_a_process_and_a_broken_verb_has_violations(ask: Ask) -> None:
    row = ask("a_case_that_leaves_a_process_and_a_broken_verb_has_violations")
    assert row["name"] == "point explain badly"
    assert [kind for kind, _ in row["violations"]] == ["stuck", "leftover"]
    assert row["restored"] is True


@in_pen
def every_world_is_what_it_says(lane: Lane) -> Any:
    found = {}
    for name in ("capture", "prepare", "recover", "replace", "wake", "wake-warm", "restore-overlay", "cold"):
        OPERATIONS[name].world(lane)
        found[name] = [
            lane.artifact.exists(),
            len(list(lane.state.glob("capsules/*"))),
            len(list(lane.state.glob("prepared/*/prepared.json"))),
            len(list(lane.state.glob("model-payloads/sha256/*.pack"))),
            len(list(lane.state.glob("overlays/*.json"))),
            newest_init() is not None and newest_engine() is not None,
            lane.ask() is not None,
        ]
        lane.run(verbs.do_stop)
    return found


def test_every_world_is_what_it_says(ask: Ask) -> None:
    assert ask("every_world_is_what_it_says") == {
        # artifact, capsules, prepared, packs, overlays, processes, serves
        "capture": [False, 0, 0, 0, 0, False, False],
        "prepare": [True, 1, 0, 1, 0, False, False],
        "recover": [True, 1, 1, 0, 0, False, False],
        "replace": [True, 1, 1, 1, 0, True, True],
        "wake": [True, 1, 1, 1, 0, True, False],
        "wake-warm": [True, 1, 1, 1, 0, True, False],
        "restore-overlay": [True, 2, 1, 1, 1, False, False],
        "cold": [True, 0, 0, 1, 0, False, False],
    }


def test_a_pen_that_is_ended_takes_everything_with_it(criu: None, tmp_path: Path) -> None:
    def live(lines: Lines) -> None:
        child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, start_new_session=True)
        lines.say([child.pid, Path("/proc/self/ns/pid").readlink().name])
        lines.hear()

    with Pen(live, tmp_path / "log") as pen:
        said = pen.lines.hear()
        assert said is not None
        pid, namespace = said
        assert pid > 1
        assert namespace in namespaces()
    assert namespace not in namespaces()


def namespaces() -> set[str]:
    """PID namespaces that have a process on this machine."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):
            found.add(path.readlink().name)
    return found
