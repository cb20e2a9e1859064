"""Step of the proof of shipping: one large object there and back, beside a plain client of the same servers.

Every transfer is a process of its own, whose clock begins when its program is loaded and ends when the object is
there: for a download after fsync. Both clients take turns in who begins. Before each the disk has nothing left to do.
Whatever was measured is deleted, and what came back takes the place of what was sent, so the disk holds the object at
most twice.
"""

from __future__ import annotations

import importlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path

from benchmarks._proof import Found
from benchmarks._ship_homes import MIB, Homes, made
from benchmarks._ship_plain import SPAWN, copy_and_hash, plain_get, plain_put, socket_copy_and_hash, write_random
from benchmarks.harness import ratio, summary

from coldsnap.core.digest import Digest
from coldsnap.ship.access import HubAccess
from coldsnap.ship.base import Item, Kind, Outgoing, Sink, Source
from coldsnap.ship.http import Http
from coldsnap.ship.hub import Hub
from coldsnap.ship.limits import Limits
from coldsnap.ship.names import HubName, RegistryName
from coldsnap.ship.pull import pulled
from coldsnap.ship.registry import Registry
from coldsnap.testing.hub import HubServer
from coldsnap.testing.registry import real_registry

__all__ = ["move_large"]

GIB = 1 << 30
MEMORY_BYTES = 512 * MIB
_SHARE = 0.9
_Said = tuple[float, float, int]
"""What the process of a trip says of it: seconds, seconds of its processor, and most bytes of memory."""


@dataclass(frozen=True, kw_only=True)
class _Server:
    """A running server: ``hub`` or ``registry``."""

    kind: str
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class _Trip:
    """One way of the object. ``client`` is ``plain`` or ``coldsnap``; ``path`` is read, or written below a folder."""

    server: _Server
    way: str
    client: str
    path: Path
    digest: Digest
    size: int

    @property
    def name(self) -> str:
        """What it is called in the result."""
        return f"{self.server.kind} {self.way}" + (" by a plain client" if self.client == "plain" else "")


@dataclass
class _Samples:
    """Of every trip by name: seconds, processor seconds of both sides, and the most memory its process had."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    client_cpu: dict[str, list[float]] = field(default_factory=dict)
    server_cpu: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    def add(self, trip: _Trip, said: _Said, server_cpu_s: float) -> None:
        """One more."""
        seconds, cpu_s, peak_bytes = said
        self.seconds.setdefault(trip.name, []).append(seconds)
        self.client_cpu.setdefault(trip.name, []).append(cpu_s)
        self.server_cpu.setdefault(trip.name, []).append(server_cpu_s)
        self.peaks[trip.name] = max(self.peaks.get(trip.name, 0), peak_bytes)


def move_large(homes: Homes) -> Found:
    """One large object there and back, beside what is the least here."""
    num_bytes = max(1, int(homes.options.gib * GIB))
    folder = made(homes.folder / "large")
    free = shutil.disk_usage(folder).free
    if free < 2 * num_bytes + GIB // 2:
        raise AssertionError(
            f"{folder} has {free / GIB:.1f} GiB free, and twice {homes.options.gib} and a half are needed"
        )
    source = folder / "source"
    digest = write_random(source, num_bytes)
    limits: dict[str, list[float]] = {"copy and hash": [], "copy and hash over loopback": []}
    samples = _Samples()
    for number in range(homes.options.rounds):
        for name, work in zip(limits, (copy_and_hash, socket_copy_and_hash), strict=True):
            os.sync()
            limits[name].append(work(source, folder / "copy"))
        clients = ("plain", "coldsnap") if number % 2 == 0 else ("coldsnap", "plain")
        for kind in ("hub", "registry"):
            _round(kind, clients, source, digest, folder, samples)
    shutil.rmtree(folder)
    return _found(num_bytes, limits, samples)


def _round(kind: str, clients: tuple[str, ...], source: Path, digest: Digest, folder: Path, samples: _Samples) -> None:
    """Up by each client to a fresh server; then down from the last by each, while the source is away."""
    size = source.stat().st_size
    for number, client in enumerate(clients):
        last = number == len(clients) - 1
        with _running(kind, folder / "server") as server:
            _measure(_Trip(server=server, way="upload", client=client, path=source, digest=digest, size=size), samples)
            if last:
                again = _Trip(server=server, way="upload", client="coldsnap", path=source, digest=digest, size=size)
                _coldsnap(again)  # moves nothing; a hub that a plain client wrote to has no commit yet
                source.unlink()
                for back in clients:
                    source.unlink(missing_ok=True)
                    trip = _Trip(server=server, way="download", client=back, path=source, digest=digest, size=size)
                    _measure(trip, samples)
        shutil.rmtree(folder / "server")


def _measure(trip: _Trip, samples: _Samples) -> None:
    os.sync()
    said: Queue[_Said] = SPAWN.Queue()
    before = _cpu_s(trip.server.pid)
    process = SPAWN.Process(target=_travel, args=(trip, said))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise AssertionError(f"the process of {trip.name} ended with {process.exitcode}")
    samples.add(trip, said.get(timeout=60), _cpu_s(trip.server.pid) - before)


def _found(num_bytes: int, limits: dict[str, list[float]], samples: _Samples) -> Found:
    floor = limits["copy and hash over loopback"]
    ours = [name for name in samples.seconds if "plain" not in name]
    beside_plain = {name: ratio(samples.seconds[name], samples.seconds[f"{name} by a plain client"]) for name in ours}
    beside_floor = {name: ratio(samples.seconds[name], floor) for name in ours}
    everything = {**limits, **samples.seconds}
    rows = [(name, f"{num_bytes / MIB / min(found):.0f} MiB/s") for name, found in everything.items()]
    for name in ours:
        shares = (
            f"{beside_plain[name]['median']:.0%} of a plain client, {beside_floor[name]['median']:.0%} of copy and hash"
        )
        rows.append((f"share: {name}", f"{shares} over loopback, {samples.peaks[name] >> 20} MiB"))
    aims = {"memory stays below 512 MiB": all(samples.peaks[name] < MEMORY_BYTES for name in ours)}
    if num_bytes >= GIB:
        for way in ("download", "upload"):
            found = [beside_plain[name]["median"] for name in ours if name.endswith(way)]
            aims[f"{way}s reach 90 % of a plain client of the same server"] = all(one >= _SHARE for one in found)
        found = [beside_floor[name]["median"] for name in ours if name.endswith("download")]
        aims["downloads reach 90 % of copy and hash over loopback"] = all(one >= _SHARE for one in found)
    return Found(
        document={
            "bytes": num_bytes,
            "moved_seconds": {name: summary(found) for name, found in everything.items()},
            "share_of_plain_client": beside_plain,
            "share_of_copy_and_hash_over_loopback": beside_floor,
            "client_cpu_seconds": {name: summary(found) for name, found in samples.client_cpu.items()},
            "server_cpu_seconds": {name: summary(found) for name, found in samples.server_cpu.items()},
            "peak_bytes": samples.peaks,
        },
        rows=rows,
        aims=aims,
    )


# -- servers ------------------------------------------------------------------------------------------------------


@contextmanager
def _running(kind: str, folder: Path) -> Iterator[_Server]:
    """A server in a process of its own."""
    if kind == "registry":
        with real_registry(folder) as registry:
            yield _Server(kind=kind, host=registry.host, pid=registry.process.pid)
        return
    said: Queue[str] = SPAWN.Queue()
    process = SPAWN.Process(target=_serve_hub, args=(str(folder), said), daemon=True)
    process.start()
    try:
        try:
            host = said.get(timeout=60)
        except queue.Empty as error:
            raise AssertionError("the hub does not start") from error
        yield _Server(kind=kind, host=host, pid=process.pid or 0)
    finally:
        process.kill()
        process.join()


def _serve_hub(folder: str, said: Queue[str]) -> None:
    with HubServer(Path(folder), part_bytes=256 * MIB) as server:
        said.put(server.host)
        threading.Event().wait()


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


# -- in the process of a trip -------------------------------------------------------------------------------------


def _travel(trip: _Trip, said: Queue[_Said]) -> None:
    for module in ("huggingface_hub.hf_api", "coldsnap.ship.hub_client", "coldsnap.ship.hub_write"):
        importlib.import_module(module)  # loading a program is not its speed

    begun, cpu_begun = time.perf_counter(), time.process_time()
    (_plain if trip.client == "plain" else _coldsnap)(trip)
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    # Not getrusage, which also counts what the process was before its program was loaded.
    peak_bytes = 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    said.put((seconds, cpu_s, peak_bytes))


def _plain(trip: _Trip) -> None:
    base = f"http://{trip.server.host}"
    if trip.way == "download":
        at = f"cdn/{trip.digest.hex}" if trip.server.kind == "hub" else f"v2/large/blobs/{trip.digest}"
        plain_get(f"{base}/{at}", trip.path, trip.digest)
    elif trip.server.kind == "hub":
        plain_put(f"{base}/lfs/put/{trip.digest.hex}", trip.path, trip.digest, session=False)
    else:
        plain_put(f"{base}/v2/large/blobs/uploads/", trip.path, trip.digest, session=True)


def _coldsnap(trip: _Trip) -> None:
    limits = Limits()
    with Http(limits) as http:
        store: Sink
        if trip.server.kind == "hub":
            item = Item(Kind.PACK, trip.digest)
            store = Hub(HubName(repository="org/large"), http, HubAccess(endpoint=f"http://{trip.server.host}"))
        else:
            item = Item(Kind.BLOB, trip.digest)
            store = Registry(RegistryName(host=trip.server.host, path="large"), http)
        if trip.way == "upload":
            store.write([Outgoing(item=item, bytes=trip.size, path=trip.path)])
            return
        source: Source = store
        with pulled(source, item, trip.size, trip.path.parent, limits=limits) as staged:
            os.fsync(staged.fd)
            staged.path.rename(trip.path)
