"""How long a large process tree takes to come back: stock CRIU beside memory that is put back by many threads.

    python -m benchmarks.restore_process [--gib N] [--common N] [--processes N] [--tmpfs DIR] [--rounds N] [--out FILE]

As root. The tree is ``--processes`` Python processes that together have touched ``--gib`` GiB of anonymous memory, each
page of it different. As in an engine, the first has most of it: the others share an eighth. ``--common`` GiB more were
touched before the fork, so that all of them have these. It is frozen twice: once with
everything in CRIU's images, once as coldsnap does it. Both images are in ``--tmpfs``, and proved, as those of a
prepared capsule are. Then the two are restored in turn. "Total" is the call, with a unit's init and its
namespaces; "memory" is CRIU and what comes after it until the tree runs. The trees of the first round must have the
memory that was frozen; the others are ended at once.
``freeze`` is one sample of each, with what moving and hashing the memory adds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness import arguments, emit, interleave, ratio, summary

from coldsnap.capsule.driver import DumpReport, RunningUnit, UnitSpec
from coldsnap.capsule.pagemove import MovedPages
from coldsnap.capsule.prepared import PROCESS_FOLDER, RECORD_NAME, PreparedFile, PreparedRecord
from coldsnap.capsule.unit import LinuxUnits
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.testing.yard import wait_for_writer

DEADLINE_S = 300.0
_GIB = 1 << 30
_MIB = 1 << 20

# Children before most of the memory, so that only what is meant to be is shared; each page of a process differs. What
# is common has a flag more (MAP_NORESERVE), so that the kernel does not join it with what a process maps beside it:
# CRIU takes a mapping for inherited only where parent and child have it with the same bounds.
_TREE = """
import mmap, os, signal, sys, zlib
fifo, common_bytes, sizes = sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3:]]
def touched(size, seed, flags=0):
    if not size:
        return b""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    block = os.urandom(1 << 20)
    for start in range(0, size, 1 << 20):
        memory[start : start + (1 << 20)] = block
    for start in range(0, size, 4096):
        memory[start : start + 8] = (start << 8 | seed).to_bytes(8, "little")
    return memory
common = touched(common_bytes, 255, 0x4000)
ready, tell = os.pipe()
number = 0
for child in range(1, len(sizes)):
    if os.fork() == 0:
        number = child
        break
memory = touched(sizes[number], number)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.write(tell, b".")
if number == 0:
    left = len(sizes)
    while left:
        left -= len(os.read(ready, left))
    os.close(os.open(fifo, os.O_WRONLY))
while True:
    signal.sigwait([signal.SIGUSR1])
    os.write(1, b"sum %d %d\\n" % (number, zlib.crc32(memory, zlib.crc32(common))))
"""


def _sums(unit: RunningUnit, processes: int) -> list[str]:
    """What every process of the tree says its memory is."""
    log = Path(unit.record().log_path)
    already = len(log.read_text().splitlines())
    for pid in unit.pids():
        os.kill(pid, signal.SIGUSR1)
    ends = time.monotonic() + DEADLINE_S
    while len(said := log.read_text().splitlines()[already:]) < processes:
        if time.monotonic() > ends:
            raise AssertionError(f"{processes - len(said)} processes do not answer")
        time.sleep(0.01)
    return sorted(said)


def _prove(images: Path) -> None:
    """Write the record that `coldsnap prepare` would have left."""
    files = []
    for path in sorted(images.iterdir()):
        found = path.stat()
        with path.open("rb") as file:
            digest = Digest.from_hash(hashlib.file_digest(file, "sha256"))
        files.append(
            PreparedFile(
                path=f"{PROCESS_FOLDER}/{path.name}",
                bytes=found.st_size,
                sha256=digest,
                device=found.st_dev,
                inode=found.st_ino,
                mtime_ns=found.st_mtime_ns,
            )
        )
    record = PreparedRecord(capsule=Digest.of(b"a benchmark"), files=tuple(files))
    path = images.parent / RECORD_NAME
    path.write_bytes(canonical_json(record.model_dump(mode="json")))
    path.chmod(0o600)


def _freeze(units: LinuxUnits, unit: RunningUnit, folder: Path, *, stock: bool, last: bool) -> DumpReport:
    folder.mkdir(mode=0o700)
    images = folder / PROCESS_FOLDER
    with ExitStack() as stack:
        if stock:
            nothing = MovedPages(memory=(), stopped=(), left={})
            stack.enter_context(mock.patch("coldsnap.capsule.dump.move_pages", return_value=nothing))
        report = units.dump(unit, images, deadline_s=DEADLINE_S, leave_running=not last)
    _prove(images)
    return report


def _sizes(mebibytes: int, processes: int) -> list[int]:
    """Bytes of each process: whole MiB, at least one, and together what was asked for."""
    each = max(1, mebibytes // 8 // max(1, processes - 1))
    others = [each * _MIB] * (processes - 1)
    return [max(_MIB, mebibytes * _MIB - sum(others)), *others]


def measure(units: LinuxUnits, options: argparse.Namespace, disk: Path, tmpfs: Path) -> dict[str, Any]:
    """One size: freeze both ways, then restore in turn."""
    sizes = _sizes(int(options.gib * 1024), options.processes)
    fifo = disk / "ready"
    os.mkfifo(fifo)
    common_bytes = int(options.common * 1024) * _MIB
    command = (sys.executable, "-I", "-S", "-c", _TREE, str(fifo), *map(str, (common_bytes, *sizes)))
    unit = units.launch(UnitSpec(unit="bench", log_path=disk / "log", command=command), deadline_s=DEADLINE_S)
    running = [unit]
    samples: dict[str, list[float]] = {}
    try:
        wait_for_writer(fifo)
        expected = _sums(unit, options.processes)
        reports = {
            "stock": _freeze(units, unit, tmpfs / "stock", stock=True, last=False),
            "ours": _freeze(units, unit, tmpfs / "ours", stock=False, last=True),
        }
        proved: set[str] = set()

        def case(name: str) -> Callable[[], float]:
            def restore() -> float:
                spec = UnitSpec(unit=f"bench-{name}", log_path=disk / f"{name}.log")
                begun = time.perf_counter()
                back = units.restore(spec, tmpfs / name / PROCESS_FOLDER, deadline_s=DEADLINE_S)
                seconds = time.perf_counter() - begun
                running.append(back)
                samples.setdefault(f"{name}.memory", []).append(back.phases["pids"] - back.phases["files"])
                if name not in proved:
                    if _sums(back, options.processes) != expected:
                        raise AssertionError(f"the memory of {name} is not what was frozen")
                    proved.add(name)
                back.kill(DEADLINE_S)
                return seconds

            return restore

        totals = interleave({name: case(name) for name in reports}, rounds=options.rounds)
    finally:
        for one in running:
            one.kill(DEADLINE_S)
    return {
        "touched_bytes": sum(sizes),
        "process_bytes": sizes,
        "common_bytes": common_bytes,
        "image_bytes": {name: report.bytes for name, report in reports.items()},
        "freeze_seconds": {name: {"total": one.seconds, **one.phases} for name, one in reports.items()},
        "total_seconds": {name: summary(values) for name, values in totals.items()},
        "memory_seconds": {name: summary(samples[f"{name}.memory"]) for name in totals},
        "times_stock": {
            "total": ratio(totals["ours"], totals["stock"]),
            "memory": ratio(samples["ours.memory"], samples["stock.memory"]),
        },
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--gib", type=float, default=1.5, help="memory that the tree has touched (default: 1.5)")
    parser.add_argument("--common", type=float, default=0.0, help="GiB that all have since the fork (default: 0)")
    parser.add_argument("--processes", type=int, default=2, help="in the tree (default: 2)")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="where the images are")  # noqa: S108
    options = parser.parse_args()
    if options.quick:
        options.gib = min(options.gib, 0.125)
        options.common = min(options.common, 0.125)
    options.rounds = options.rounds or (2 if options.quick else 9)
    units = LinuxUnits()
    free_bytes = shutil.disk_usage(options.tmpfs).free
    if free_bytes < (needed := int(2.1 * (options.gib + options.processes * options.common) * _GIB)):
        raise SystemExit(
            f"{options.tmpfs} has {free_bytes} bytes free and the images take {needed}; see --tmpfs, --gib, --common"
        )
    with (
        tempfile.TemporaryDirectory(prefix="coldsnap-bench-") as disk,
        tempfile.TemporaryDirectory(prefix="coldsnap-bench-", dir=options.tmpfs) as tmpfs,
    ):
        result = measure(units, options, Path(disk), Path(tmpfs))
    head = {"criu": units.criu.version_text, "images": str(options.tmpfs)}
    emit("restore-process", {**head, **result}, options.out, commit=options.commit)


if __name__ == "__main__":
    main()
