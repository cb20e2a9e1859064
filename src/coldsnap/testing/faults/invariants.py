"""What must hold after every fault, as functions that return what does not.

Each violation has a kind, which the campaign counts: ``wrong-answer``, ``damage`` (something committed changed),
``leftover``, ``stuck`` (a rerun does not succeed, or a service neither answers nor ends).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.errors import ColdsnapError, EngineError
from coldsnap.ops.services import ServiceRecord, Services
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.faults.lane import NAME, Lane
from coldsnap.testing.faults.processes import everyone, name_of, parent_of, reap, wait_gone

__all__ = [
    "Violation",
    "check_answers",
    "check_committed",
    "check_nothing_left",
    "check_strays",
    "committed_now",
    "is_serving",
    "record_of",
]

_KILLED_S = 60.0
_RUNNING = ("ready", "warm", "asleep")


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be."""

    kind: str
    text: str


def check_strays(lane: Lane) -> Iterator[Violation]:
    """Every process but those of the recorded service ends by itself, soon. What does not is ended here."""
    ends = time.monotonic() + lane.patience_s
    while strays := _strays(lane):
        if time.monotonic() >= ends:
            for pid in strays:
                yield Violation("leftover", f"process {pid} ({name_of(pid)})")
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
                wait_gone(pid, _KILLED_S)
            break
        wait_gone(strays[0], ends - time.monotonic())
    list(reap())


def check_answers(lane: Lane) -> Iterator[Violation]:
    """Whoever listens on the service's port gives the right answers, or ends."""
    ends = time.monotonic() + lane.patience_s
    while True:
        try:
            found = lane.ask()
        except EngineError as error:
            if time.monotonic() > ends:
                yield Violation("stuck", f"the service listens and does not answer: {error.message}")
                return
            continue  # it may be ending with its controller, while we ask
        if found is not None and found != lane.reference:
            yield Violation("wrong-answer", f"{found} instead of {lane.reference}")
        return


def is_serving(lane: Lane) -> bool:
    """Whether the service is there and right."""
    try:
        return lane.ask() == lane.reference
    except EngineError:
        return False


def committed_now(lane: Lane) -> Mapping[str, Digest]:
    """What of the base is there, and must stay. Raises AssertionError when an earlier case has damaged the base."""
    found = lane.digests()
    damaged = [path for path, digest in lane.committed.items() if found.get(path, digest) != digest]
    if damaged:
        raise AssertionError(f"the base itself is damaged, so nothing can be judged by it: {', '.join(damaged)}")
    return {path: digest for path, digest in lane.committed.items() if path in found}


def check_committed(lane: Lane, committed: Mapping[str, Digest], *, gone: bool = False) -> Iterator[Violation]:
    """What was committed is there (unless ``gone``) and the same; what is new is what its name says."""
    found = lane.digests()
    for path, digest in committed.items():
        if path not in found and not gone:
            yield Violation("damage", f"{path} is gone")
        elif path in found and found[path] != digest:
            yield Violation("damage", f"{path} changed")
    for path, digest in found.items():
        name = Path(path).name.removesuffix(".pack")
        if len(name) == 64 and name != digest.hex:
            yield Violation("damage", f"{path} holds {digest}")


def check_nothing_left(lane: Lane) -> Iterator[Violation]:
    """No service runs and gc is done: no process, mount, held lock, temporary file, or object without a reference."""
    for pid in everyone():
        yield Violation("leftover", f"process {pid} ({name_of(pid)})")
    for line in frozenset(Path("/proc/self/mountinfo").read_text().splitlines()) - lane.mounts:
        yield Violation("leftover", f"mount {line}")
    for path in sorted(lane.yard.rglob("*")):
        if lane.base in path.parents or lane.model in path.parents:
            continue
        if path.name.endswith((".partial", ".layer")) or lane.temporary in path.parents:
            yield Violation("leftover", f"temporary file {path.relative_to(lane.yard)}")
        elif path.is_file() and (path.name == "lock" or path.suffix == ".lock") and _is_held(path):
            yield Violation("leftover", f"held lock {path.relative_to(lane.yard)}")
    with suppress(FileNotFoundError):
        for path in Path("/run/coldsnap").iterdir():
            yield Violation("leftover", f"file {path}")


def record_of(lane: Lane) -> ServiceRecord | None:
    """The service's record; None when there is none that can be read."""
    try:
        return Services(StateRoot(path=lane.state)).load(NAME)
    except ColdsnapError:
        return None


def _strays(lane: Lane) -> list[int]:
    list(reap())
    living = everyone()
    record = record_of(lane)
    units = record.units if record is not None and record.state in _RUNNING else ()
    mine = {int(unit.record["init_pid"]) for unit in units} & set(living)
    return [pid for pid in living if not _below(pid, mine)]


def _below(pid: int, tops: set[int]) -> bool:
    while pid > 1:
        if pid in tops:
            return True
        pid = parent_of(pid)
    return False


def _is_held(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
