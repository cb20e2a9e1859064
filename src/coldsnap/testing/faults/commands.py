"""The command itself, started as a user starts it, struck at a point: its exit status and what it leaves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from coldsnap.testing.faults.case import Case, Struck
from coldsnap.testing.faults.cli import COMMAND
from coldsnap.testing.faults.invariants import Violation
from coldsnap.testing.faults.lane import NAME, PORT, Lane
from coldsnap.testing.faults.operations import Operation
from coldsnap.testing.faults.running import Outcome
from coldsnap.testing.faults.strikes import SIGKILLS, Act, Strike, write_strike

__all__ = ["COMMANDS", "commanded"]

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "restore": ("restore", "ARTIFACT", "--name", NAME, "--port", str(PORT), "--quiet"),
    "prepare": ("prepare", "ARTIFACT", "--quiet"),
    "sleep": ("sleep", NAME),
    "wake": ("wake", NAME),
    "stop": ("stop", NAME),
    "gc": ("gc", "--forget-missing"),
    "delete": ("delete", "ARTIFACT", "--yes"),
    "verify": ("verify", "ARTIFACT"),
}
"""The words of the command by operation."""

_EXITS = {Act.KILL: -9, Act.INTERRUPT: 130, Act.BUG: 70, Act.STALL: 0}
_LONG_S = 120.0


def commanded(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``point`` and ``act``."""
    act = Act(case.params["act"])
    token = f"t{chance.getrandbits(48):x}"
    write_strike(lane.desk / COMMAND, Strike(token=token, act=act, point=case.params["point"], seconds=0.2))
    words = [str(lane.artifact) if word == "ARTIFACT" else word for word in COMMANDS[operation.name]]
    done = subprocess.run(
        [sys.executable, "-m", "coldsnap.testing.faults.cli", str(lane.desk), *words, "--state-root", str(lane.state)],
        env={**os.environ, "PYTHONPATH": str(_engine_package(lane.desk / "packages"))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_LONG_S,
        check=False,
    )
    happened = lane.struck(token)
    wrong = []
    if happened and done.returncode != _EXITS[act]:
        wrong.append(Violation("stuck", f"exit status {done.returncode}, not {_EXITS[act]}: {done.stdout[-300:]}"))
    return Struck(
        outcome=Outcome(
            status={0: "done", -9: "killed"}.get(done.returncode, "refused"), text=done.stdout.strip()[-160:]
        ),
        happened=happened,
        restored=operation.restored or "unit.criu" in lane.points(),
        sigkills=int(happened and act in SIGKILLS),
        wrong=tuple(wrong),
    )


def _engine_package(folder: Path) -> Path:
    """What makes the fake engine one that is installed, for a command started from here."""
    info = folder / "coldsnap_struck_engine-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coldsnap-struck-engine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[coldsnap.engines]\nfake = coldsnap.testing.engine:PLUGIN\n")
    return folder
