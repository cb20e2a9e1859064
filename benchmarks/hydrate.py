"""File to stable host memory, beside a plain parallel ``preadv`` of the same file in the same run.

    python -m benchmarks.hydrate [--quick] [--out FILE] [--bytes N] [--dir FOLDER]

Every sample reads the whole file into the same allocation, freshly unmapped and remapped, so that
each pays for the first touch of its pages. The remapping itself is not in the time.

plain.*      threads that take 4 MiB of the file each and ``preadv`` it to the same place in memory: no
             plan, no checks, no reports. ``buffered`` through the page cache with one thread a core,
             ``direct`` with O_DIRECT and 8 threads (cold only: warm, it reads the disk for nothing).
ours.*       ``hydrate_file``, path and threads by its own rule. ``whole``: one segment. ``model``: segments
             of the sizes a model has, at addresses 64 bytes apart, in an order in the file that
             has nothing to do with the order in memory, as in a pack.
*.verified   the same from an unproved source, so every segment is hashed; beside it the plain read
             followed by hashing with as many threads.

``ratios`` compare within each round; when cold, with the faster of the two plain ways of that round.
``cpu_s`` is the processor time of all threads: on a machine that others use too, it says more than seconds.
``cpu_ratios`` compare it, when cold with ``plain.direct``.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, emit, interleave, ratio, summary, timed

from coldsnap.core.digest import Digest
from coldsnap.hydrate import HostMemory, ProvedSource, Segment, TransferPath, TransferReport, UnprovedSource
from coldsnap.hydrate import hydrate_file as hydrate
from coldsnap.hydrate.choose import file_facts

MIB = 1 << 20
PIECE = 4 * MIB
PAGE = 4096
CORES = len(os.sched_getaffinity(0))
AIM = 0.95


def model_sizes(total: int) -> list[int]:
    """Sizes of weights, layer after layer, until ``total`` is used up by padded slots."""
    layer = [6 * MIB, 3 * MIB, 3 * MIB, 6 * MIB, 17 * MIB, 17 * MIB, 17 * MIB, 2048, 2048, 256, 256]
    sizes: list[int] = []
    left = total
    for size in itertools.chain([total // 8], itertools.cycle(layer)):
        slot = -(-size // PAGE) * PAGE
        if slot > left:
            return sizes
        sizes.append(size)
        left -= slot
    return sizes


class Bench:
    """The file, the memory, and the ways to fill one from the other."""

    def __init__(self, path: Path, total: int) -> None:
        self.total = total
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        block = random.Random(1).randbytes(8 * MIB)
        for at in range(0, total, len(block)):
            os.pwrite(self.fd, at.to_bytes(8, "little") + block[8:], at)
        os.fsync(self.fd)
        self.direct_fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.memory = HostMemory()
        self.base = self.memory.reserve(total, tag="benchmark").ptr
        self.whole = [Segment(ptr=self.base, size=total, file_offset=0)]
        self.model = self._model_segments()
        self.reports: dict[str, TransferReport] = {}
        self.cpu_s: dict[str, list[float]] = {}
        self.cached: dict[str, list[float | None]] = {"warm": [], "cold": []}

    def _model_segments(self) -> list[Segment]:
        sizes = model_sizes(self.total)
        places, at = [], 0
        for size in sizes:
            places.append((at, size))
            at += -(-size // 64) * 64
        random.Random(2).shuffle(places)
        segments, offset = [], 0
        for at, size in places:
            digest = Digest.from_hash(self._hash(offset, size))
            segments.append(Segment(ptr=self.base + at, size=size, file_offset=offset, sha256=digest))
            offset += -(-size // PAGE) * PAGE
        return segments

    def _hash(self, offset: int, size: int) -> hashlib._Hash:
        state = hashlib.sha256()
        for at in range(offset, offset + size, PIECE):
            state.update(os.pread(self.fd, min(PIECE, offset + size - at), at))
        return state

    def close(self) -> None:
        self.memory.release()
        os.close(self.direct_fd)
        os.close(self.fd)

    def case(self, name: str, cache: str, work: Callable[[], object]) -> Callable[[], float]:
        """One sample of ``work``, with fresh pages and the page cache in the wanted state."""

        def sample() -> float:
            if cache == "cold":
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                for at in range(0, self.total, PIECE):
                    os.pread(self.fd, PIECE, at)
            facts = file_facts(self.fd, [(0, self.total)], wanted_bytes=self.total)
            self.cached[cache].append(facts.cached_fraction)
            self._fresh_pages()
            begun = time.process_time()
            seconds = timed(work)
            self.cpu_s.setdefault(name, []).append(time.process_time() - begun)
            return seconds

        return sample

    def _fresh_pages(self) -> None:
        """Untouched memory for the next sample, out of pages that were in use a moment ago.

        In a virtual machine, a page that was free for long may have gone back to the host, and getting
        it again costs more than anything measured here. So every sample begins with the same ones.
        """
        for at in range(0, self.total, 2 * MIB):
            self.memory.view(self.base + at, 1)[0] = 1
        self.memory.unmap()
        self.memory.remap()

    def plain(self, fd: int, num_threads: int) -> None:
        view = self.memory.view(self.base, self.total)
        starts, lock = iter(range(0, self.total, PIECE)), threading.Lock()

        def read() -> None:
            while True:
                with lock:
                    at = next(starts, None)
                if at is None:
                    return
                if os.preadv(fd, [view[at : at + PIECE]], at) != PIECE:
                    raise RuntimeError(f"short read at {at}")

        threads = [threading.Thread(target=read) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def plain_then_hash(self) -> None:
        self.plain(self.fd, CORES)
        view = self.memory.view(self.base, self.total)

        def check(segment: Segment) -> None:
            at = segment.file_offset
            if Digest.of(view[at : at + segment.size]) != segment.sha256:
                raise RuntimeError(f"wrong bytes at {at}")

        with ThreadPoolExecutor(CORES) as pool:
            list(pool.map(check, sorted(self.model, key=lambda segment: -segment.size)))

    def ours(self, name: str, segments: list[Segment], *, proved: bool = True) -> None:
        source = (
            ProvedSource(fd=self.fd, bytes=self.total, evidence="written by this benchmark")
            if proved
            else UnprovedSource(fd=self.fd, bytes=self.total)
        )
        self.reports[name] = hydrate(source, segments, self.memory)


def cases(bench: Bench, cache: str) -> dict[str, Callable[[], float]]:
    """Every way to fill the memory with the page cache in one state."""

    def ours(layout: str, segments: list[Segment], *, proved: bool = True) -> Callable[[], object]:
        return lambda: bench.ours(f"{cache}.ours.{layout}", segments, proved=proved)

    works: dict[str, Callable[[], object]] = {
        "plain.buffered": lambda: bench.plain(bench.fd, CORES),
        "ours.whole": ours("whole", bench.whole),
        "ours.model": ours("model", bench.model),
        "plain.verified": bench.plain_then_hash,
        "ours.verified": ours("verified", bench.model, proved=False),
    }
    if cache == "cold":
        works["plain.direct"] = lambda: bench.plain(bench.direct_fd, 8)
    return {f"{cache}.{name}": bench.case(f"{cache}.{name}", cache, work) for name, work in works.items()}


def measure(bench: Bench, rounds: dict[str, int]) -> dict[str, Any]:
    """All cases of both cache states, and their ratios."""
    samples: dict[str, list[float]] = {}
    for cache in ("warm", "cold"):
        samples |= interleave(cases(bench, cache), rounds=rounds[cache], budget_s=45)
    cold_plain = [min(pair) for pair in zip(samples["cold.plain.buffered"], samples["cold.plain.direct"], strict=True)]
    plain = {"warm": samples["warm.plain.buffered"], "cold": cold_plain}
    model_bytes = sum(segment.size for segment in bench.model)
    sizes = {name: model_bytes if name.endswith(("model", "ours.verified")) else bench.total for name in samples}
    ratios = {
        f"{cache}.{layout}": ratio(
            [seconds / sizes[f"{cache}.ours.{layout}"] for seconds in samples[f"{cache}.ours.{layout}"]],
            [seconds / bench.total for seconds in plain[cache]],
        )
        for cache in ("warm", "cold")
        for layout in ("whole", "model")
    } | {
        f"{cache}.verified": ratio(samples[f"{cache}.ours.verified"], samples[f"{cache}.plain.verified"])
        for cache in ("warm", "cold")
    }
    return {
        "seconds": {name: summary(values) for name, values in samples.items()},
        "cpu_ratios": {
            f"{cache}.{layout}": ratio(bench.cpu_s[f"{cache}.ours.{layout}"], bench.cpu_s[plainly])
            for cache, plainly in (("warm", "warm.plain.buffered"), ("cold", "cold.plain.direct"))
            for layout in ("whole", "model")
        },
        "cpu_s": {name: summary(values) for name, values in bench.cpu_s.items()},
        "gb_per_s": {name: summary([sizes[name] / s / 1e9 for s in values]) for name, values in samples.items()},
        "ratios": ratios,
        "aim": AIM,
        "aim_met": {name: found["median"] >= AIM for name, found in ratios.items()},
        "paths": {
            name: {"path": TransferPath(r.path).value, "reason": r.reason, "num_threads": r.num_threads}
            for name, r in bench.reports.items()
        },
        "cached_fraction": {
            cache: {"min": min(known), "max": max(known)} if (known := [f for f in found if f is not None]) else None
            for cache, found in bench.cached.items()
        },
    }


def main() -> int:
    parser = arguments("file to stable host memory, beside a plain parallel preadv")
    parser.add_argument("--bytes", type=int, default=0, help="size of the file (default: 1 GiB, quick: 128 MiB)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the file goes; a disk, not tmpfs")  # noqa: S108
    options = parser.parse_args()
    total = (options.bytes or (128 * MIB if options.quick else 1024 * MIB)) // (8 * MIB) * (8 * MIB)
    default = {"warm": 3, "cold": 3} if options.quick else {"warm": 11, "cold": 5}  # a warm round is short
    rounds = {cache: options.rounds or count for cache, count in default.items()}
    with tempfile.TemporaryDirectory(prefix="coldsnap-bench-", dir=options.dir) as folder:
        bench = Bench(Path(folder) / "pack", total)
        try:
            result = measure(bench, rounds)
        finally:
            bench.close()
    emit(
        "hydrate-host",
        {"file_bytes": total, "num_segments": len(bench.model), **result},
        options.out,
        code=("src/coldsnap/hydrate", "benchmarks"),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
