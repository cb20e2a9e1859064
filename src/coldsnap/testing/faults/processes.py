"""Who is there: the processes of this PID namespace, and which of them are units."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coldsnap.capsule.identity import start_ticks
from coldsnap.capsule.programs import program_command

__all__ = ["everyone", "kill_criu_soon", "name_of", "newest_engine", "newest_init", "reap", "wait_gone"]

_INIT = "\0".join(program_command("init", "")[:-1]).encode()  # it has this command before it has its name
_CRIU_S = 5.0


def everyone() -> list[int]:
    """Every living process that ``/proc`` shows, but this one; zombies are not living."""
    found = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return sorted(pid for pid in found if pid != os.getpid() and start_ticks(pid) is not None)


def name_of(pid: int) -> str:
    """Its command name; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    """Its parent; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def newest_init() -> int | None:
    """The init that started last."""
    return max((pid for pid in everyone() if _INIT in _command_of(pid)), key=_age, default=None)


def newest_engine() -> int | None:
    """The engine process below it: its child that is not CRIU."""
    init = newest_init()
    children = [pid for pid in everyone() if init is not None and parent_of(pid) == init and name_of(pid) != "criu"]
    return max(children, key=_age, default=None)


def kill_criu_soon() -> None:
    """Kill the CRIU that runs, or the next one, from a thread of this process."""

    def hunt() -> None:
        ends = time.monotonic() + _CRIU_S
        while time.monotonic() < ends:
            for pid in everyone():
                if name_of(pid) == "criu":
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    return
            time.sleep(0.001)  # CRIU lives for tens of milliseconds, and nothing announces it

    threading.Thread(target=hunt, name="criu-hunter", daemon=True).start()


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Whether the process ends within the time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))
    finally:
        os.close(pidfd)


def reap() -> Iterator[int]:
    """Take the exit status of every child that ended; the first process of a namespace gets everybody's orphans."""
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            yield pid


def _age(pid: int) -> tuple[int, int]:
    return start_ticks(pid) or 0, pid
