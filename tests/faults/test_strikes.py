"""Strikes fall where and when they were told to, once, and are noted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldsnap.core import points
from coldsnap.core.points import reached
from coldsnap.testing.faults.running import Outcome, start
from coldsnap.testing.faults.strikes import Act, Notes, Strike, Striker, read_strike, write_strike


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "notes")


@pytest.fixture(autouse=True)
def _no_hook() -> Iterator[None]:
    yield
    points.install(None)


def strike(act: Act = Act.BUG, **changes: object) -> Strike:
    return Strike.model_validate({"token": "t1", "act": act, "point": "pack.named", **changes})


def run(notes: Notes, tmp_path: Path, verb: Callable[[], object], one: Strike | None, **options: object) -> Outcome:
    def act() -> dict[str, object]:
        verb()
        return {"answer": 1}

    child = start(act, notes=notes, log=tmp_path / "log", strike=one, **options)  # type: ignore[arg-type]
    return child.wait(60.0)


def test_a_strike_travels_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    assert read_strike(path) is None
    write_strike(path, strike(Act.STALL, seconds=0.5, nth=3))
    assert read_strike(path) == strike(Act.STALL, seconds=0.5, nth=3)


@pytest.mark.parametrize(
    ("act", "expected"),
    [(Act.BUG, RuntimeError), (Act.MEMORY, MemoryError), (Act.FULL, OSError), (Act.BROKEN, OSError)],
)
def test_only_the_nth_time_counts(notes: Notes, act: Act, expected: type[Exception]) -> None:
    points.install(Striker(lambda: strike(act, nth=2), notes, role="controller"))
    reached("pack.named")
    reached("pack.synced")
    with pytest.raises(expected):
        reached("pack.named")
    reached("pack.named")
    assert notes.lines() == [
        ["point", "controller", "pack.named"],
        ["point", "controller", "pack.synced"],
        ["point", "controller", "pack.named"],
        ["struck", "t1"],
        ["point", "controller", "pack.named"],
    ]


def test_another_strike_begins_to_count_anew(notes: Notes) -> None:
    due = [strike()]
    points.install(Striker(lambda: due[0], notes, role="worker"))
    with pytest.raises(RuntimeError):
        reached("pack.named")
    due[0] = strike(token="t2")
    with pytest.raises(RuntimeError):
        reached("pack.named")


def test_a_verb_is_done_killed_interrupted_refused_or_broken(notes: Notes, tmp_path: Path) -> None:
    def verb() -> None:
        reached("pack.named")

    done = run(notes, tmp_path, verb, None)
    assert (done.status, done.result) == ("done", {"answer": 1})
    killed = run(notes, tmp_path, verb, strike(Act.KILL))
    assert (killed.status, killed.text) == ("killed", f"ended with {-signal.SIGKILL}")
    stopped = run(notes, tmp_path, verb, strike(Act.INTERRUPT))
    assert (stopped.status, stopped.kind) == ("refused", "KeyboardInterrupt")
    broken = run(notes, tmp_path, verb, strike(Act.BUG))
    assert (broken.status, broken.reason) == ("broken", "RuntimeError: injected at pack.named")


def test_a_verb_that_does_not_end_is_hung_and_ended(notes: Notes, tmp_path: Path) -> None:
    def verb() -> None:
        signal.pause()

    child = start(verb, notes=notes, log=tmp_path / "log")
    assert child.wait(0.1).status == "hung"
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


# -- write boundaries ---------------------------------------------------------------------------------


def write_twice(folder: Path) -> None:
    fd = os.open(folder / "aside", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, b"a" * 1000)
    os.pwrite(fd, b"b" * 1000, 1000)
    os.fsync(fd)
    (folder / "aside").rename(folder / "named")


def at_boundary(notes: Notes, tmp_path: Path, nth: int, **changes: object) -> Path:
    folder = tmp_path / "watched"
    folder.mkdir()
    one = strike(Act.KILL, point=None, boundary=True, nth=nth, **changes)
    run(notes, tmp_path, lambda: write_twice(folder), one, watched=folder)
    return folder


def test_every_boundary_is_counted(notes: Notes, tmp_path: Path) -> None:
    folder = at_boundary(notes, tmp_path, 0)
    assert [line[0] for line in notes.lines()] == ["write"] * 4  # two writes, a sync, a rename
    assert (folder / "named").read_bytes() == b"a" * 1000 + b"b" * 1000


@pytest.mark.parametrize(("after", "size"), [(False, 1000), (True, 2000)])
def test_a_kill_before_or_after_a_write(notes: Notes, tmp_path: Path, after: bool, size: int) -> None:
    folder = at_boundary(notes, tmp_path, 2, after=after)
    assert len((folder / "aside").read_bytes()) == size
    assert not (folder / "named").exists()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_torn_write_leaves_a_part(notes: Notes, tmp_path: Path, nth: int) -> None:
    folder = at_boundary(notes, tmp_path, nth, tear=True, seed=5)
    data = (folder / "aside").read_bytes()
    assert data == (b"a" * 1000 + b"b" * 1000)[: len(data)]
    assert len(data) < {1: 1000, 2: 2000, 3: 2000}[nth]


def test_a_torn_rename_does_not_happen(notes: Notes, tmp_path: Path) -> None:
    folder = at_boundary(notes, tmp_path, 4, tear=True)
    assert [path.name for path in folder.iterdir()] == ["aside"]


def test_other_folders_are_nobodys_boundary(notes: Notes, tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    (tmp_path / "other").mkdir()
    one = strike(Act.KILL, point=None, boundary=True, nth=1)
    outcome = run(notes, tmp_path, lambda: write_twice(tmp_path / "other"), one, watched=tmp_path / "watched")
    assert outcome.status == "done"


def test_the_engine_program_finds_its_strike_by_itself(tmp_path: Path) -> None:
    """Also when it was written after the process began, which is how a restored process is told."""
    write_strike(tmp_path / "worker.json", strike(Act.KILL, point="worker.loaded"))
    code = "from coldsnap.testing import engine_main; from coldsnap.core.points import reached\n"
    code += "engine_main.main = lambda: reached('worker.loaded')\n"
    code += "from coldsnap.testing.faults import worker; worker.main()"
    done = subprocess.run([sys.executable, "-c", code, "--faults", str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert ["struck", "t1"] in Notes(tmp_path / "notes").lines()
