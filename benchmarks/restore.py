"""Where the time of a restore goes: phases of restores of captured artifacts, and what a client outside saw.

    python -m benchmarks.restore ARTIFACT.json... [--modes ahead,cached,beside,disk] [--rounds N]

as root, on the machine whose state root has the artifacts' packs and capsules. Nothing else may run as the service
``coldsnap-bench``. Modes, in turn within a round:

ahead    packs are in memory (huge pages) before the clock starts
cached   packs are read from the state root and are in the page cache
beside   packs are on the disk alone; the copy into memory begins with the restore, which waits for it (phase ``stage``)
disk     packs are on the disk alone, and are read from there

The clock is that of the demo (docs/benchmarks.md): the call of the verb to the first token that a client outside the
process tree sees. Phases are seconds of the operation's own spans. Without an artifact one of the fake engine on a fake
GPU is captured first.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._gpu import warm as read_all
from benchmarks._proof_tools import fake_subject
from benchmarks.harness import arguments, emit, summary

from coldsnap.cli.wiring import make_tools
from coldsnap.core.drivers import DriverId
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.demo_parts import Restores, Story, free_port, new_id
from coldsnap.ops.planning import plan_capture
from coldsnap.ops.recipe import Recipe
from coldsnap.ops.tools import Tools

MODES = ("ahead", "cached", "beside", "disk")


def timelines(tools: Tools, artifact: Path, *, rounds: Mapping[str, int]) -> dict[str, Any]:
    """What restores of one artifact take, by mode; ``rounds`` says how many of each, in turn."""
    port = free_port()
    by_mode = {mode: Restores(tools, artifact, port, Story(name="coldsnap-bench")) for mode in rounds}
    packs = [tools.store.path(pack.sha256) for pack in load_artifact(artifact).packs().values()]
    for number in range(max(rounds.values())):
        for mode, restores in by_mode.items():
            if number < rounds[mode]:
                restores.prepare(stage=mode == "ahead")
                for pack in packs:
                    (warm if mode == "cached" else forget)(pack)
                restores.by_call(ask=False, stage=mode in ("ahead", "beside"))
    return {mode: _summary(restores) for mode, restores in by_mode.items()}


def warm(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb") as file:
        read_all(file.fileno(), path.stat().st_size)


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _summary(restores: Restores) -> dict[str, Any]:
    phases = dict.fromkeys(name for one in restores.phases for name in one)
    return {
        "first_token_s": summary([one.first_token_s for one in restores.timelines]),
        "http_ready_s": summary([one.http_ready_s for one in restores.timelines]),
        "port_open_s": summary([one.port_open_s for one in restores.timelines]),
        "phases_s": {name: summary([one.get(name, 0.0) for one in restores.phases]) for name in phases},
        "transfers": list(dict.fromkeys(how for one in restores.transfers for how in one.values())),
    }


def _fake(rounds: Mapping[str, int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="coldsnap-bench-", dir="/var/tmp") as name:
        subject, output = fake_subject(Path(name), Path(name), size="", serve=()), Path(name, "artifact.json")
        recipe = Recipe(name="bench", engine=subject.plugin.name, model=str(subject.model()), serve=dict(subject.serve))
        try:
            planned = plan_capture(
                recipe, subject.plugin, operation_id=new_id("bench"), output=output, driver=DriverId.N610
            )
            capture(subject.tools, planned.request, planned.model)
            return timelines(subject.tools, output, rounds=rounds)
        finally:
            subject.close()


def main() -> None:
    """Measure and print."""
    parser = arguments("phases of restores")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("artifacts", nargs="*", type=Path, metavar="ARTIFACT.json")
    parser.add_argument("--modes", default=",".join(MODES), help="some of %(default)s")
    parser.add_argument("--state-root", type=Path, default=Path("/var/lib/coldsnap"))
    options = parser.parse_args()
    modes = options.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes: {', '.join(sorted(unknown))}: choose of {', '.join(MODES)}")
    rounds = dict.fromkeys(modes, options.rounds or (1 if options.quick else 5))
    if options.artifacts:
        tools = make_tools(options.state_root)
        found = {str(path): timelines(tools, path.absolute(), rounds=rounds) for path in options.artifacts}
    else:
        found = {"fake": _fake(rounds)}
    emit("restore", {"artifacts": found}, options.out, commit=options.commit)


if __name__ == "__main__":
    main()
