"""Which process a PID means: a number is reused, a number with its start time and the machine's boot is not."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

__all__ = ["boot_id", "end_process", "is_running", "start_ticks"]

_START_TICKS_FIELD = 19  # field 22 of proc(5), counted behind the name's closing parenthesis


def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[_START_TICKS_FIELD])


def is_running(pid: int, ticks: int) -> bool:
    """Whether this very process still runs."""
    return start_ticks(pid) == ticks


def end_process(pid: int, ticks: int, *, timeout_s: float, ask_first_s: float = 0.0) -> bool:
    """Kill this very process, never another with its number, and wait until it is gone; False when it is not in time.

    With ``ask_first_s`` it gets SIGTERM and that long to end by itself. For the init of a PID namespace "gone"
    includes every process of that namespace.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # The descriptor pins whatever has the number now; only then the start time says who that is.
        if not is_running(pid, ticks):
            return True
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        steps = [(signal.SIGTERM, min(ask_first_s, timeout_s))] if ask_first_s else []
        for number, patience_s in [*steps, (signal.SIGKILL, timeout_s)]:
            try:
                signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                return True
            if poll.poll(max(0.0, patience_s) * 1000):
                return True
        return False
    finally:
        os.close(pidfd)
