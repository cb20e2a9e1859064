"""The init's part in bringing a tree back: CRIU, and beside it what puts memory back, one after the other's end.

    start -> CRIU and the refill are forked -> CRIU ends, the tree stands still -> the refill is told to go ->
    it ends -> the tree may run

Either one ending badly is an error, and the init's end, which is everybody's. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

from coldsnap.capsule import inside, pagerefill

__all__ = ["NotBack", "Thaw", "parent_of"]


class NotBack(Exception):
    """Memory could not be put back; ``said`` is what is to be told of it."""

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__(said["message"])
        self.said = said


class Thaw:
    """One tree on its way back. ``enter`` tells of a new phase; ``images_fd`` stays the caller's."""

    def __init__(self, config: dict[str, Any], images_fd: int, enter: Callable[[str], None]) -> None:
        self.root_pid: int = config["root_pid"]
        self.done = False
        self._config = config
        self._images_fd = images_fd
        self._enter = enter
        self._criu_pid = self._refill_pid = 0
        self._go = self._report = -1

    def start(self, output_fd: int, log_fd: int) -> None:
        """Fork CRIU, and what waits for it."""
        self._enter("criu")
        os.mkdir(inside.WORK_DIR, 0o700)
        pid = os.fork()
        if pid == 0:
            descriptors = {inside.IMAGES_FD: self._images_fd, inside.OUTPUT_FD: output_fd}
            inside.become_criu(self._config["criu"], descriptors, log_fd)
        self._criu_pid = pid
        if self._config["memory"]:
            self._start_refill()

    def _start_refill(self) -> None:
        go, self._go = os.pipe2(os.O_CLOEXEC)
        self._report, report = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            os.close(self._go)
            memory, proved = self._config["memory"], self._config["proved"]
            pagerefill.become_refill(self._images_fd, memory, go, report, proved=proved)
        os.close(go)
        os.close(report)
        self._refill_pid = pid

    def ended(self, pid: int, status: int) -> bool:
        """Take the end of a child, if it is one of the two; ``done`` afterwards when it was the last.

        Raises ValueError and OSError in whatever phase it is, and NotBack.
        """
        if pid not in (self._criu_pid, self._refill_pid):
            return False
        code = os.waitstatus_to_exitcode(status)
        if pid == self._criu_pid:
            self._criu_ended(code)
        else:
            self._refill_ended(code)
        return True

    def _criu_ended(self, code: int) -> None:
        self._criu_pid = 0
        if code != 0:
            raise ValueError(f"criu restore ended with {code}")
        if parent_of(self.root_pid) != 1:
            raise ValueError(f"criu restored no process {self.root_pid}")
        with contextlib.suppress(OSError):
            for name in os.listdir(inside.WORK_DIR):
                os.unlink(f"{inside.WORK_DIR}/{name}")
            os.rmdir(inside.WORK_DIR)
        self._enter("memory")
        if self._config["memory"]:
            os.write(self._go, b".")
            os.close(self._go)
        else:
            self.done = True

    def _refill_ended(self, code: int) -> None:
        self._refill_pid = 0
        with open(self._report, "rb") as report:
            said = report.read()
        if said:
            raise NotBack(json.loads(said))
        if code != 0 or self._criu_pid:
            raise NotBack({"message": f"what puts it back ended with {code}"})
        if parent_of(self.root_pid) != 1:
            raise NotBack({"message": f"process {self.root_pid} ended before it was let run"})
        self.done = True

    def let_run(self, pids: Iterable[int]) -> None:
        """Continue these processes, but for those that stood still before the dump."""
        for pid in set(pids) - {1, *self._config["stopped"]}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def parent_of(pid: int) -> int:
    """The parent of a living process, 0 when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state in "ZX" else int(parent)
