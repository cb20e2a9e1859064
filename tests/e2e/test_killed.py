"""A controller that is killed, or told to stop, at any moment: nothing false is committed, no process is left, and the
same command works afterwards.

The moments are those that ``--timing-events`` tells. The command waits after each line that says that a phase began
until it is let go on, so a signal hits it there, however late the test reads the line.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.core.lifecycle import ServiceState
from coldsnap.core.messages import Answer
from coldsnap.errors import EngineError
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.leases import leases
from coldsnap.ops.live import service_status
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete, run_tidy
from coldsnap.ops.verify import verify_artifact
from coldsnap.store.admission import record_path
from coldsnap.testing.stand import PATIENCE_S, UNSEEN, Stand, processes_of, wait_for
from coldsnap.testing.watched import Watched

pytestmark = pytest.mark.criu

CAPTURE = ("gates", "launch", "load", "answer", "export", "sleep", "inspect", "freeze", "scan", "capsule", "commit")
RESTORE = ("gates", "unpack", "admit", "evict", "seed", "thaw", "hydrate", "accept", "serve", "release")


@pytest.fixture(autouse=True)
def _tidied(stand: Stand) -> Iterator[None]:
    """Only the stand's own artifact stays; this runs before the check for what is left."""
    yield
    stand.stop_all()
    run_tidy(stand.tools, plan_tidy(stand.tools, forget_missing=True))
    for one in leases(stand.tools):
        if one.artifact != stand.loaded.digest:
            run_delete(stand.tools, plan_delete(stand.tools, Path(one.path)))
    shutil.rmtree(stand.tools.state.prepared / stand.loaded.capsule_digest("u0").hex, ignore_errors=True)


def nothing_runs(stand: Stand) -> None:
    wait_for("the processes of a killed command to end", lambda: not processes_of(stand.folder))


def is_whole_or_absent(stand: Stand, output: Path) -> bool:
    """An artifact that exists is proved to its last byte."""
    if not output.exists():
        return False
    problems = [problem for proof in verify_artifact(stand.tools, load_artifact(output)) for problem in proof.problems]
    assert problems == []
    return True


@pytest.mark.parametrize("phase", CAPTURE)
def test_sigkill_of_a_capture(stand: Stand, folder: Path, phase: str, expected: tuple[Answer, ...]) -> None:
    output = folder / "a.json"
    words: list[str | Path] = ["capture", stand.recipe_file(), "--port", str(stand.port), "-o", output]
    with Watched(stand, folder, *words) as watched:
        watched.until(phase)
        code, out, _ = watched.end(signal.SIGKILL)
    assert (code, out) == (-signal.SIGKILL, "")
    nothing_runs(stand)
    assert not is_whole_or_absent(stand, output) or phase == "commit"
    name = str(output.relative_to(stand.folder))
    if not output.exists():
        stand.capture(f"again-{phase}", name)
    again = load_artifact(output)
    stand.restore(f"again-{phase}-restore", again)
    assert stand.ask(UNSEEN) == expected
    stand.stop_all()
    report = run_tidy(stand.tools, plan_tidy(stand.tools))
    assert report.spared == ()
    stand.assert_nothing_left()
    assert is_whole_or_absent(stand, output), "gc takes nothing that the new artifact needs"


def forget_proofs(stand: Stand) -> None:
    """So that unpacking and proving take their time again."""
    shutil.rmtree(stand.tools.state.prepared / stand.loaded.capsule_digest("u0").hex, ignore_errors=True)
    record_path(stand.tools.store.path(stand.result.pack_digests[0])).unlink(missing_ok=True)


def answers_unless_ending(stand: Stand) -> tuple[Answer, ...] | None:
    """What the service answers; None when it was told to end before its restore was killed, and then it does end."""
    try:
        return stand.ask(UNSEEN)
    except EngineError:
        wait_for("the service that does not answer to end", lambda: not processes_of(stand.folder))
        return None


@pytest.mark.parametrize("phase", RESTORE)
def test_sigkill_of_a_restore(stand: Stand, folder: Path, phase: str, expected: tuple[Answer, ...]) -> None:
    """Another service of that name runs before; it goes on until everything is ready, and never afterwards."""
    stand.restore(f"old-{phase}")
    old = service_status(stand.tools, "svc").pids
    forget_proofs(stand)
    with Watched(stand, folder, "restore", stand.loaded.path, "--port", str(stand.port)) as watched:
        watched.until(phase)
        code, out, _ = watched.end(signal.SIGKILL)
    assert (code, out) == (-signal.SIGKILL, "")

    def settled() -> bool:
        if "svc" not in stand.tools.services.names():
            return not processes_of(stand.folder)
        state = service_status(stand.tools, "svc").state
        return state == ServiceState.READY or not processes_of(stand.folder)

    wait_for("the processes of a killed command to end", settled)
    runs = "svc" in stand.tools.services.names() and service_status(stand.tools, "svc").state == ServiceState.READY
    if phase in ("gates", "unpack"):
        assert runs
        assert service_status(stand.tools, "svc").pids == old
    if phase in ("thaw", "hydrate", "accept", "serve"):
        assert not runs
        assert service_status(stand.tools, "svc").state == "lost"
    if runs:
        given = answers_unless_ending(stand)
        assert given == expected or (given is None and phase in ("admit", "evict", "seed"))
    stand.restore(f"anew-{phase}")
    assert stand.ask(UNSEEN) == expected
    stand.assert_nothing_left(but_for=["svc"])


@pytest.mark.parametrize(
    ("phase", "number"), [("load", signal.SIGINT), ("export", signal.SIGTERM), ("freeze", signal.SIGINT)]
)
def test_a_capture_told_to_stop_says_what_was_undone(
    stand: Stand, folder: Path, phase: str, number: signal.Signals
) -> None:
    output = folder / "a.json"
    words: list[str | Path] = ["capture", stand.recipe_file(), "--port", str(stand.port), "-o", output]
    with Watched(stand, folder, *words) as watched:
        watched.until(phase)
        code, out, err = watched.end(number, group=number is signal.SIGINT)
    assert code == 130, err
    said = json.loads(out)
    assert (said["error"], said["exit_code"]) == ("OperationInterrupted", 130)
    assert "stopped unit u0" in said["notes"]
    assert "stopped unit u0" in err
    assert not output.exists()
    stand.assert_nothing_left()


@pytest.mark.parametrize("phase", ["unpack", "thaw", "hydrate", "accept"])
def test_a_restore_told_to_stop_says_what_was_undone(stand: Stand, folder: Path, phase: str) -> None:
    forget_proofs(stand)
    with Watched(stand, folder, "restore", stand.loaded.path, "--port", str(stand.port)) as watched:
        watched.until(phase)
        code, out, err = watched.end(signal.SIGINT, group=True)
    assert code == 130, err
    said = json.loads(out)
    assert said["error"] == "OperationInterrupted"
    undone = said.get("notes", [])
    assert ("forgot the unfinished service record" in undone) == (phase != "unpack")
    if phase != "thaw":  # the tree may be back by the time the signal is seen
        assert ("stopped restored unit u0" in undone) == (phase in ("hydrate", "accept"))
    stand.assert_nothing_left()


def test_a_service_outlives_the_command_that_restored_it(stand: Stand, expected: tuple[Answer, ...]) -> None:
    with stand.cli("restore", stand.loaded.path, "--port", str(stand.port), "--json", "--quiet") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out)["state"] == "ready"
    assert stand.ask(UNSEEN) == expected
    stand.assert_nothing_left(but_for=["svc"])


def test_two_restores_of_one_name_do_not_meet(stand: Stand, folder: Path) -> None:
    """The second is refused while the first works, and says who works on it."""
    forget_proofs(stand)
    with Watched(stand, folder, "restore", stand.loaded.path, "--port", str(stand.port)) as watched:
        watched.until("unpack")
        with stand.cli("restore", stand.loaded.path, "--port", str(stand.port), "--json") as second:
            out, _ = second.communicate(timeout=PATIENCE_S)
        assert (second.returncode, json.loads(out)["error"]) == (4, "ResourceBusy")
        code, first, err = watched.end(signal.SIGCONT)  # which does nothing to a process that runs
    assert code == 0, err
    assert json.loads(first)["state"] == "ready"
