"""How long a process tree takes to freeze and to come back, by size: its image, and where the time goes.

    python -m benchmarks.units [--quick] [--rounds N] [--out FILE]      as root, with CRIU

The tree is ``coldsnap.testing.process_tree``: parent and child, threads, a timer, a Unix socket. The child shares
the parent's memory, and CRIU writes it for both. "Answer" is the first reply over that socket, which touches every
page. Images lie in the page cache.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, emit, summary

from coldsnap.capsule.driver import UnitSpec
from coldsnap.capsule.unit import LinuxUnits
from coldsnap.testing.yard import Yard

DEADLINE_S = 60.0


def measure(units: LinuxUnits, megabytes: int, rounds: int) -> dict[str, Any]:
    """One size: every round launches, dumps, and restores."""
    samples: dict[str, list[float]] = {}
    image_bytes = 0

    def note(name: str, seconds: float) -> None:
        samples.setdefault(name, []).append(seconds)

    for _ in range(rounds):
        yard = Yard(folder=Path(tempfile.mkdtemp(prefix="coldsnap-bench-")))
        try:
            unit = yard.launch(megabytes=megabytes)
            note("launch", unit.phases["confirmed"])
            yard.ask(unit)
            report = units.dump(unit, yard.folder / "images", deadline_s=DEADLINE_S)
            image_bytes = report.bytes
            note("dump", report.seconds)
            spec = UnitSpec(unit=f"{yard.token}-back", log_path=yard.folder / "back.log")
            begun = time.monotonic()
            back = yard.keep(units.restore(spec, yard.folder / "images", deadline_s=DEADLINE_S))
            note("restore", time.monotonic() - begun)
            note("restore.init", back.phases["files"])
            note("restore.criu", back.phases["criu"] - back.phases["files"])
            yard.ask(back)
            note("restore.answer", time.monotonic() - begun)
            begun = time.monotonic()
            back.kill()
            note("kill", time.monotonic() - begun)
        finally:
            yard.sweep()
            shutil.rmtree(yard.folder)
    return {"megabytes": megabytes, "image_bytes": image_bytes, "seconds": {k: summary(v) for k, v in samples.items()}}


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "").parse_args()
    units = LinuxUnits()
    rounds = options.rounds or (2 if options.quick else 7)
    sizes = (1, 64) if options.quick else (1, 64, 256)
    result = {"criu": units.criu.version_text, "cases": [measure(units, size, rounds) for size in sizes]}
    emit("units", result, options.out)


if __name__ == "__main__":
    main()
