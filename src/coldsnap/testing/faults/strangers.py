"""Things that are not what a record says: reused PIDs, dead services, stale sockets, taken ports, held locks.

Each scenario changes a running service's surroundings before the verb, and may have a bystander: a process that
coldsnap did not start, and must not touch.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coldsnap.testing.faults.case import Case, Struck
from coldsnap.testing.faults.invariants import Violation
from coldsnap.testing.faults.lane import HOST, IMPATIENT_S, NAME, PORT, Lane
from coldsnap.testing.faults.operations import Operation
from coldsnap.testing.faults.processes import newest_engine, newest_init, wait_gone

__all__ = ["SCENES", "estranged"]

_GONE_S = 60.0


def estranged(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``scene`` is one of ``SCENES``."""
    scene = Scene(lane)
    SCENES[case.params["scene"]](scene)
    names = ("answer_s", "sleep_s", "wake_s", "serve_s")
    changes: dict[str, Any] = dict.fromkeys(names, IMPATIENT_S)
    deadlines = replace(lane.deadlines, **changes)
    outcome = lane.run(operation.verb, deadlines=deadlines)
    wrong = [
        Violation("damage", f"the bystander {pid} was ended")
        for pid in scene.bystanders
        if os.waitpid(pid, os.WNOHANG) != (0, 0)
    ]
    return Struck(
        outcome=outcome,
        happened=True,
        restored=operation.restored or "unit.criu" in lane.points(),
        sigkills=scene.sigkills,
        repair=scene.end,
        may_hang=scene.may_hang,
        wrong=tuple(wrong),
    )


@dataclass
class Scene:
    """What a scenario did, and how it ends."""

    lane: Lane
    bystanders: list[int] = field(default_factory=list)
    sigkills: int = 0
    may_hang: bool = False
    endings: list[Callable[[], object]] = field(default_factory=list)

    @property
    def record(self) -> Path:
        """The service's record."""
        return self.lane.state / "services" / NAME / "service.json"

    def change_unit(self, **values: Any) -> None:
        """Other values in the unit that the service's record names."""
        document = json.loads(self.record.read_text())
        document["units"][0]["record"].update(values)
        self.record.write_text(json.dumps(document))

    def run_folder(self) -> Path:
        """The unit's private folder, where its sockets are."""
        return Path(f"/proc/{newest_init()}/root/run/coldsnap")

    def socket(self) -> Path:
        """The worker's control socket."""
        return next(self.run_folder().glob("*.sock"))

    def kill(self, pid: int | None) -> None:
        """SIGKILL, and wait for the unit to be gone."""
        assert pid is not None
        init = newest_init()
        os.kill(pid, signal.SIGKILL)
        self.sigkills += 1
        if init is not None:
            wait_gone(init, _GONE_S)

    def bystander(self, act: Callable[[], object]) -> int:
        """A process of somebody else's, which is ready when this returns."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                os.close(read_end)
                keep = act()
                os.write(write_end, b"+")
                signal.pause()
                del keep
            os._exit(0)
        os.close(write_end)
        os.read(read_end, 1)
        os.close(read_end)
        self.bystanders.append(pid)
        return pid

    def end(self) -> None:
        """Take everything back."""
        for ending in reversed(self.endings):
            ending()
        for pid in self.bystanders:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _pid_reused(scene: Scene) -> None:
    scene.kill(newest_init())
    scene.change_unit(init_pid=scene.bystander(lambda: None))


def _other_boot(scene: Scene) -> None:
    scene.kill(newest_init())
    scene.change_unit(init_pid=scene.bystander(lambda: None), boot_id="00000000-0000-4000-8000-000000000000")


def _init_killed(scene: Scene) -> None:
    scene.kill(newest_init())


def _engine_killed(scene: Scene) -> None:
    scene.kill(newest_engine())


def _engine_stopped(scene: Scene) -> None:
    pid = newest_engine()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    scene.may_hang = True

    def go_on() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    scene.endings.append(go_on)


def _socket_gone(scene: Scene) -> None:
    path = scene.socket()
    aside = path.with_suffix(".aside")
    path.rename(aside)

    def back() -> None:
        with suppress(OSError):  # its unit is gone, and the folder with it
            if path.is_dir():
                shutil.rmtree(path)
            aside.rename(path)

    scene.endings.append(back)


def _socket_stale(scene: Scene) -> None:
    path = scene.socket()
    _socket_gone(scene)
    _bind(path).close()


def _socket_folder(scene: Scene) -> None:
    path = scene.socket()
    _socket_gone(scene)
    path.mkdir()


def _socket_silent(scene: Scene) -> None:
    path = scene.socket()
    _socket_gone(scene)

    def listen() -> socket.socket:
        silent = _bind(path)
        silent.listen(8)
        return silent

    scene.bystander(listen)


def _port_taken(scene: Scene) -> None:
    """The service died, and somebody else listens on its port."""
    scene.kill(newest_init())
    scene.bystander(_listen)
    scene.may_hang = True


def _port_taken_unrecorded(scene: Scene) -> None:
    scene.kill(newest_init())
    scene.record.unlink()
    scene.bystander(_listen)
    scene.may_hang = True


def _name_locked(scene: Scene) -> None:
    scene.bystander(lambda: _lock(scene.lane.state / "services" / NAME / "lock"))


def _root_locked(scene: Scene) -> None:
    """As while gc runs."""
    scene.bystander(lambda: _lock(scene.lane.state / "locks" / "in-use.lock", shared=True))


def _half_restored(scene: Scene) -> None:
    """What a controller leaves that was killed between its record and its units."""
    scene.kill(newest_init())
    document = json.loads(scene.record.read_text())
    scene.record.write_text(json.dumps({**document, "state": "restoring", "units": []}))


def _clock_back(scene: Scene) -> None:
    """Files from the future: the machine's clock was set back."""
    for path in scene.lane.state.rglob("*.json"):
        with suppress(OSError):
            os.utime(path, (4_000_000_000, 4_000_000_000))


SCENES: Mapping[str, Callable[[Scene], None]] = {
    "pid-reused": _pid_reused,
    "other-boot": _other_boot,
    "init-killed": _init_killed,
    "engine-killed": _engine_killed,
    "engine-stopped": _engine_stopped,
    "socket-gone": _socket_gone,
    "socket-stale": _socket_stale,
    "socket-folder": _socket_folder,
    "socket-silent": _socket_silent,
    "port-taken": _port_taken,
    "port-taken-unrecorded": _port_taken_unrecorded,
    "name-locked": _name_locked,
    "root-locked": _root_locked,
    "half-restored": _half_restored,
    "clock-back": _clock_back,
}
"""Scenarios by name."""


def _listen() -> socket.socket:
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind((HOST, PORT))
    taken.listen(8)
    return taken


def _lock(path: Path, *, shared: bool = False) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    return fd


def _bind(path: Path) -> socket.socket:
    """A socket bound at a path that may be longer than an address has room for."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.bind(f"/proc/self/fd/{folder}/{path.name}")
        return bound
    finally:
        os.close(folder)
