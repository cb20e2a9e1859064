"""Probes of CRIU without a GPU: one round trip of a small process, and one of a template that goes on running."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from coldsnap.capsule.checks import check_root
from coldsnap.capsule.criu import Criu
from coldsnap.capsule.driver import UnitSpec
from coldsnap.capsule.dump import dump
from coldsnap.capsule.probes.bench import STEP_DEADLINE_S, Bench, Subject, subject_unit
from coldsnap.capsule.restore import restore
from coldsnap.capsule.running import launch
from coldsnap.errors import CriuError, MissingCapability

__all__ = ["prove_process_tree", "prove_template"]

_CHECK_TIMEOUT_S = 30.0


def prove_process_tree(bench: Bench) -> str:
    """``criu check``, then a small process is launched under our init, dumped, restored and ended."""
    check_root()
    criu = bench.find()
    _criu_check(criu)
    with tempfile.TemporaryDirectory(prefix="coldsnap-probe-") as folder:
        spec = UnitSpec(unit="probe", log_path=Path(folder) / "log", command=("/bin/sleep", "600"))
        images = Path(folder) / "images"
        unit = launch(spec, deadline_s=STEP_DEADLINE_S, tied=True)
        try:
            dump(unit, images, criu=criu, deadline_s=STEP_DEADLINE_S)
        finally:
            unit.kill()
        restore(spec, images, criu=criu, deadline_s=STEP_DEADLINE_S, tied=True).kill()
    return f"CRIU {criu.version_text} passed its own check and a round trip"


def prove_template(bench: Bench) -> str:
    """A process is frozen and runs on; its frozen copy comes back, beside it, and answers too."""
    criu = bench.find()
    with subject_unit(bench) as (spec, images):
        source = Subject(unit=launch(spec, deadline_s=STEP_DEADLINE_S, tied=True))
        try:
            pid = source.ask("ping")
            dump(source.unit, images, criu=criu, deadline_s=STEP_DEADLINE_S, leave_running=True)
            if source.ask("ping") != pid:
                raise CriuError(
                    "a process that was frozen and left running is another one afterwards", facts={"log": []}
                )
            copy = Subject(unit=restore(spec, images, criu=criu, deadline_s=STEP_DEADLINE_S, tied=True))
            try:
                if copy.ask("ping") != pid:
                    raise CriuError("a frozen template came back with another PID", facts={"log": []})
            finally:
                copy.unit.kill()
        finally:
            source.unit.kill()
    return f"CRIU {criu.version_text} froze a process that ran on, and brought its copy back beside it"


def _criu_check(criu: Criu) -> None:
    try:
        done = subprocess.run(
            [str(criu.path), "check"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_CHECK_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingCapability(f"`criu check` does not end well: {error}") from error
    if done.returncode:
        said = " / ".join(line.strip() for line in done.stdout.splitlines() if "Error" in line) or done.stdout.strip()
        raise CriuError(
            f"`criu check` failed: {said}",
            cure="use a kernel with CONFIG_CHECKPOINT_RESTORE, or a newer CRIU",
            facts={"log": said.splitlines()},
        )
