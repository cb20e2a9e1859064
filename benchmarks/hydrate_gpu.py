"""Files to a GPU and back, by every path, beside what the link, the disk and one core can do.

    python -m benchmarks.hydrate_gpu [--quick] [--out FILE] [--bytes N] [--disk FOLDER] [--only PART,...] [--fake]

The model has the tensors of a Qwen3-8B (16.4 GB in 399), filled with bytes no two blocks of which are equal, and
there is a residual: the gaps between tensors and a second allocation. Parts, in this order:

link       copies of 1 GiB from and to locked memory: the limit of everything below
capture    device -> pack on the disk. ``passes``: bytes read from the device over bytes of the model.
           Beside it a plain write of the same disk with fsync, and SHA-256 on one core, which no pack is faster than
first_use  proof of the pack by its extents, file in the page cache, as ``admit_file`` does it
pagecache  the pack from the page cache
staged     pack and residual in a tmpfs with huge pages, copied there or, without a capture, laid out (``stage_s``).
           ``ahead``: its pages registered outside the clock. The others: everything inside, that is mapping, locking,
           copying, unlocking. Afterwards the device is cleared, filled again, and every digest compared
unproved   the same from a source that nobody proved, hashed on the way
disk       cold, O_DIRECT, beside plain O_DIRECT reads of the same bytes with as many threads
loaders    a safetensors file with bytes of the pack, page cache warm: ours beside what other loaders take

Rates are payload over seconds. ``of_link`` compares with the link's own rate in this run. Without a GPU nothing is
measured; ``--fake`` runs it all on the bookkeeping driver, to see that it runs, and its figures mean nothing.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks._gpu import Counting, Model, copy_file, driver_version, lay_out_pack, plain_read, plain_write, warm
from benchmarks._loaders import compare_loaders
from benchmarks.harness import arguments, emit, interleave, ratio, summary, timed

from coldsnap.errors import MissingCapability
from coldsnap.hydrate import ProvedSource, Segment, TransferPath, TransferReport, UnprovedSource
from coldsnap.hydrate import hydrate_file as hydrate
from coldsnap.hydrate.backing import backing_of
from coldsnap.hydrate.choose import file_facts
from coldsnap.hydrate.cuda import CudaMemory, Driver, RegisteredFile, open_driver
from coldsnap.hydrate.cuda.slots import Slots
from coldsnap.store.admission import admit_file
from coldsnap.store.pack import (
    HashedSource,
    WrittenPack,
    hash_sources,
    write_hashed,
)
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.cuda import FakeDriver

MIB, GIB = 1 << 20, 1 << 30
PAGE = 4096
CORES = len(os.sched_getaffinity(0))
OTHER_BYTES = 128 * MIB


class Bench:
    """The device, the model on it, and its files."""

    def __init__(self, driver: Driver, folder: Path, *, shrink: int, rounds: int, fake: bool) -> None:
        self.counting = Counting(driver)
        self.memory = CudaMemory(self.counting)
        self.folder, self.shrink, self.rounds, self.fake = folder, shrink, rounds, fake
        self.closing = ExitStack()
        self.model = Model(self.memory, shrink)
        self.link_gb_per_s = 0.0
        self.reports: dict[str, Any] = {}
        self.pack_path = folder / "pack"
        self.pack_bytes = 0

    def close(self) -> None:
        self.closing.close()
        self.memory.close()

    # Parts.

    def link(self) -> dict[str, Any]:
        driver, size = self.counting, GIB // self.shrink // PAGE * PAGE
        self.memory.attach()
        ptr = self.memory.allocations[0].ptr
        with Slots(driver, slot_bytes=size, num_slots=1) as slots:
            view, block = slots.slot(0).view, random.Random(3).randbytes(MIB)
            for at in range(0, size, MIB):
                view[at : at + MIB] = block[: size - at]
            slots.lock(0)
            stream = driver.create_stream()

            def many(copy: Callable[[], None]) -> float:
                def act() -> None:
                    for _ in range(12):
                        copy()
                    driver.synchronize(stream)

                return 12 * size / timed(act) / 1e9

            address, spare = slots.slot(0).address, self.memory.reserve(size, tag="link").ptr
            into = [many(lambda: driver.copy_in(spare, address, size, stream)) for _ in range(self.rounds)]
            out = [many(lambda: driver.copy_out(address, ptr, size, stream)) for _ in range(self.rounds)]
            driver.destroy_stream(stream)
        self.link_gb_per_s = statistics.median(into)
        return {"to_device_gb_per_s": summary(into), "to_host_gb_per_s": summary(out)}

    def capture(self) -> dict[str, Any]:
        store = PayloadStore(StateRoot.open(self.folder / "state"))
        before = self.counting.read_bytes
        hashed: list[HashedSource] = []
        hash_s = timed(lambda: hashed.extend(hash_sources(self.model.sources())))
        written: list[WrittenPack] = []
        write_s = timed(lambda: written.append(write_hashed(store, hashed)))
        passes = (self.counting.read_bytes - before) / self.model.bytes
        self.pack_path, self.pack_bytes, self.model.extents = written[0].path, written[0].bytes, written[0].extents
        self.digest = written[0].digest
        plain_bytes = min(self.pack_bytes, 4 * GIB) // self.shrink
        data = random.Random(2).randbytes(8 * MIB)
        hash_rate = [len(data) / timed(lambda: sha256(data)) / 1e9 for _ in range(5)]
        plain_s = timed(lambda: plain_write(self.folder / "plain", data, plain_bytes))
        return {
            "hash_s": hash_s,
            "write_s": write_s,
            "total_s": hash_s + write_s,
            "gb_per_s": self.pack_bytes / (hash_s + write_s) / 1e9,
            "passes": passes,
            "plain_write_gb_per_s": plain_bytes / plain_s / 1e9,
            "sha256_one_core_gb_per_s": summary(hash_rate),
            "pack_bytes": self.pack_bytes,
        }

    def first_use(self) -> dict[str, Any]:
        extents = [(one.offset, one.size, one.sha256) for one in self.model.extents]
        digest, size = self.digest, self.pack_bytes

        def prove() -> None:
            with admit_file(self.pack_path, digest, size, extents=extents, record=False) as admitted:
                self.reports["first_use"] = str(admitted.evidence)

        fd = self._open(self.pack_path)
        warm(fd, size)
        cached = file_facts(fd, [(0, size)], wanted_bytes=size).cached_fraction
        return {"seconds": summary([timed(prove) for _ in range(3)]), "cached_fraction": cached, "aim_s": 2.5}

    def pagecache(self) -> dict[str, Any]:
        fd = self._open(self.pack_path)
        warm(fd, self.pack_bytes)
        cases = {
            name: self._case(f"pagecache.{name}", [(fd, self.pack_bytes, self.model.segments())], path=path)
            for name, path in (("rule", None), ("mapped", TransferPath.MAPPED))
        }
        return self._rates(interleave(cases, rounds=3), self.model.bytes)

    def staged(self) -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(prefix="coldsnap-staged-"))
        self.closing.callback(folder.rmdir)
        mount = ["mount", "-t", "tmpfs", "-o", "huge=always,mode=700,size=90%", "coldsnap", str(folder)]
        subprocess.run(mount, check=True)
        self.closing.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
        pack_path, residual_path = folder / "pack", folder / "residual"
        begun = time.monotonic()
        if self.model.extents:
            copy_file(self.pack_path, pack_path)
        else:  # no capture in this run
            self.model.extents, self.pack_bytes = lay_out_pack(
                self.memory, hash_sources(self.model.sources()), pack_path
            )
        stage_s = time.monotonic() - begun
        self.model.write_residual(residual_path)
        pack, residual = self._open(pack_path), self._open(residual_path)
        parts = [
            (pack, self.pack_bytes, self.model.segments()),
            (residual, self.model.residual.bytes, self.model.rest()),
        ]
        self._staged_parts = parts
        total = self.model.bytes + sum(one.size for one in self.model.residual.extents)
        with ExitStack() as ahead:
            files = [ahead.enter_context(RegisteredFile(self.memory, fd, file_bytes=size)) for fd, size, _ in parts]

            def register() -> None:
                for file in files:
                    file.register_all()

            register_s = timed(register)
            run = self._case("staged.ahead", parts, registered=files)
            samples = {"ahead": [run() for _ in range(self.rounds)]}
            verified = {"ahead": self.model.verified(run)}
        rule = self._case("staged.rule", parts)
        cases = {"rule": rule}
        for path, threads in (("mapped", 10), ("mapped", 12), ("mixed", 0), ("registered", 0), ("buffered", 0)):
            name = f"{path}.{threads}" if threads else path
            cases[name] = self._case(f"staged.{name}", parts, path=TransferPath(path), num_threads=threads)
        samples |= interleave(cases, rounds=self.rounds)
        verified["rule"] = self.model.verified(rule)
        result = self._rates(samples, total)
        met = {
            "ahead": result["gb_per_s"]["ahead"]["median"] >= 49,
            "rule": result["gb_per_s"]["rule"]["median"] >= 45,
        }
        return result | {
            "stage_s": stage_s,
            "register_ahead_s": register_s,
            "huge_pages": backing_of(pack).huge_pages,
            "verified": verified,
            "aim_gb_per_s": {"ahead": 49, "rule": 45},
            "aim_met": met,
        }

    def unproved(self) -> dict[str, Any]:
        fd, size, segments = self._staged_parts[0]

        def run() -> float:
            source = UnprovedSource(fd=fd, bytes=size)
            return timed(lambda: self._note("unproved", hydrate(source, segments, self.memory)))

        return self._rates({"rule": [run() for _ in range(3)]}, self.model.bytes)

    def disk(self) -> dict[str, Any]:
        fd = self._open(self.pack_path)
        limit = min(self.pack_bytes, 6 * GIB // self.shrink)
        segments = [one for one in self.model.segments() if one.file_offset + one.size <= limit]
        end = max(one.file_offset + one.size for one in segments)
        direct = os.open(self.pack_path, os.O_RDONLY | os.O_DIRECT)
        self.closing.callback(os.close, direct)

        def cold(work: Callable[[], object]) -> Callable[[], float]:
            def sample() -> float:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                return timed(work)

            return sample

        ours = self._case("disk.rule", [(fd, self.pack_bytes, segments)])
        os.fsync(fd)
        samples = interleave({"plain": cold(lambda: plain_read(direct, end, 16)), "rule": cold(ours)}, rounds=3)
        payload = sum(one.size for one in segments)
        found = ratio([s / payload for s in samples["rule"]], [s / end for s in samples["plain"]])
        return self._rates(samples, payload) | {"ratio": found, "aim": 0.95, "aim_met": found["median"] >= 0.95}

    def loaders(self) -> dict[str, Any]:
        return compare_loaders(
            self.memory, self.pack_path, self.model.extents, self.folder, total=2 * GIB // self.shrink
        )

    # What parts share.

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY)
        self.closing.callback(os.close, fd)
        return fd

    def _note(self, name: str, report: TransferReport) -> None:
        self.reports[name] = {
            "path": report.path.value,
            "reason": report.reason,
            "num_threads": report.num_threads,
            "registered_share": report.registered_bytes / report.bytes,
            "last_seconds": report.seconds,
        }

    def _case(
        self,
        name: str,
        parts: Sequence[tuple[int, int, list[Segment]]],
        *,
        path: TransferPath | None = None,
        num_threads: int = 0,
        registered: Sequence[RegisteredFile | None] = (None, None),
    ) -> Callable[[], float]:
        def act() -> None:
            for number, ((fd, size, segments), file) in enumerate(zip(parts, registered, strict=False)):
                source = ProvedSource(fd=fd, bytes=size, evidence="written by this benchmark")
                report = hydrate(source, segments, self.memory, path=path, num_threads=num_threads, registered=file)
                self._note(name if number == 0 else f"{name}.residual", report)
            self.memory.trim()

        return lambda: timed(act)

    def _rates(self, samples: dict[str, list[float]], payload: int) -> dict[str, Any]:
        rates = {name: [payload / s / 1e9 for s in seconds] for name, seconds in samples.items()}
        return {
            "payload_bytes": payload,
            "seconds": {name: summary(seconds) for name, seconds in samples.items()},
            "gb_per_s": {name: summary(rate) for name, rate in rates.items()},
            "of_link": {
                name: statistics.median(rate) / self.link_gb_per_s for name, rate in rates.items() if self.link_gb_per_s
            },
        }


PARTS = ("link", "capture", "first_use", "pagecache", "staged", "unproved", "disk", "loaders")


def main() -> int:
    parser = arguments("files to a GPU and back")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where the pack goes; a disk, not tmpfs")  # noqa: S108
    parser.add_argument("--only", default="", help=f"some of {','.join(PARTS)}, each needs those before it")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begin no other part after so many seconds")
    parser.add_argument("--fake", action="store_true", help="no GPU; the figures mean nothing")
    options = parser.parse_args()
    try:
        driver: Driver = FakeDriver() if options.fake else open_driver()
    except MissingCapability as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 0
    begun, shrink = time.monotonic(), 64 if options.quick else 1
    result: dict[str, Any] = {}
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="coldsnap-bench-", dir=options.disk) as folder:
        bench = Bench(driver, Path(folder), shrink=shrink, rounds=options.rounds or 7, fake=options.fake)
        try:
            for part in PARTS:
                if options.only and part not in options.only.split(","):
                    continue
                if time.monotonic() - begun > options.budget_s:
                    errors[part] = "not begun: the time was up"
                    continue
                try:
                    result[part] = getattr(bench, part)()
                except Exception as error:  # noqa: BLE001 - the other parts' figures must not be lost
                    traceback.print_exc()
                    errors[part] = f"{type(error).__name__}: {error}"
                print(f"{part}: {_short(result.get(part), errors.get(part))}", file=sys.stderr)
            facts = bench.memory.facts
        finally:
            bench.close()
    device = {"name": facts.name, "cuda": driver.version(), "driver": driver_version(), "fake": options.fake}
    device |= {"compute_capability": list(facts.compute_capability), "total_bytes": facts.total_bytes}
    emit(
        "hydrate-gpu",
        {"device": device, "model_bytes": bench.model.bytes, "num_tensors": len(bench.model.ranges), **result}
        | {"transfers": bench.reports, "errors": errors},
        options.out,
        code=("src/coldsnap/hydrate", "src/coldsnap/store", "benchmarks"),
        commit=options.commit,
    )
    return 1 if errors else 0


def _short(part: dict[str, Any] | None, error: str | None) -> str:
    if part is None:
        return f"FAILED {error}"
    rates = part.get("gb_per_s")
    if isinstance(rates, dict):
        return ", ".join(f"{name} {one['median']:.1f} GB/s" for name, one in rates.items())
    return ", ".join(
        f"{name} {one['median']:.2f}" if isinstance(one, dict) and "median" in one else f"{name} {one:.2f}"
        for name, one in part.items()
        if isinstance(one, float) or (isinstance(one, dict) and "median" in one)
    )


if __name__ == "__main__":
    sys.exit(main())
