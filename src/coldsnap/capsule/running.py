"""A running unit: how it is started under its init, found again and ended.

Starting is the same for a launch and a restore; only what the init is told differs. Whatever goes wrong before
``confirm``, closing our end of the channel is enough to make the init end itself, and we do not return before it
is gone.
"""

from __future__ import annotations

import contextlib
import os
from binascii import b2a_base64
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coldsnap.capsule.channel import Channel, Closed
from coldsnap.capsule.checks import check_spec
from coldsnap.capsule.deadline import Deadline
from coldsnap.capsule.driver import RUN_DIR, UnitRecord, UnitSpec
from coldsnap.capsule.identity import boot_id, end_process, is_running
from coldsnap.capsule.makers import Begun, InitFiles, UnitMaker
from coldsnap.capsule.native import NativeMaker
from coldsnap.capsule.starting import ended_early, init_error
from coldsnap.core.points import reached
from coldsnap.errors import DeadlineExceeded, HostError, PeerError, UnsafePath

__all__ = ["NATIVE", "Unit", "attach", "bring_up", "launch"]

NATIVE: UnitMaker = NativeMaker()
_CLEANUP_S = 60.0
_ASK_S = 2.0
_TAIL_BYTES_A_LINE = 400


class Unit:
    """A handle on one unit of this machine (``driver.RunningUnit``)."""

    def __init__(
        self,
        record: UnitRecord,
        phases: Mapping[str, float],
        channel: Channel | None = None,
        maker: UnitMaker = NATIVE,
    ) -> None:
        self._maker = maker
        self._record = record
        self._phases = phases
        self._channel = channel

    @property
    def unit(self) -> str:
        """The unit's id."""
        return self._record.unit

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds from the start to the end of each phase; empty when attached."""
        return self._phases

    def record(self) -> UnitRecord:
        """What ``attach`` needs."""
        return self._record

    def alive(self) -> bool:
        """Whether the unit's processes exist. The init ends with the tree's root, so it answers for all."""
        return is_running(self._record.init_pid, self._record.init_start_ticks)

    def pids(self) -> tuple[int, ...]:
        """Host PIDs of the tree, ascending, without the init; empty when the unit is gone."""
        if not self.alive():
            return ()
        mine = _pid_namespace(self._record.init_pid)
        everyone = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        found = sorted(pid for pid in everyone if pid != self._record.init_pid and _pid_namespace(pid) == mine)
        return tuple(found) if mine is not None and self.alive() else ()

    def socket_path(self, name: str) -> Path:
        """Host path of ``RUN_DIR / name``; usable while the unit lives."""
        return Path(f"/proc/{self._record.init_pid}/root{RUN_DIR}/{name}")

    def release(self) -> None:
        """Let a tied unit outlive this process. Nothing to do for one that is on its own already."""
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        try:
            reached("unit.releasing")
            channel.send({"verb": "confirm"}, timeout_s=_CLEANUP_S)
            while channel.receive(timeout_s=_CLEANUP_S)["event"] != "confirmed":
                pass
        except (Closed, TimeoutError) as error:
            raise PeerError(
                f"unit {self.unit} ended before it was ready", cure=f"read its log, {self._record.log_path}"
            ) from error
        finally:
            channel.close()
        reached("unit.released")

    def kill(self, deadline_s: float = _CLEANUP_S) -> None:
        """End every process of the unit and wait until they are gone. Raises DeadlineExceeded."""
        pid, ticks = self._record.init_pid, self._record.init_start_ticks
        gone = end_process(pid, ticks, timeout_s=deadline_s, ask_first_s=_ASK_S)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if not gone:
            raise DeadlineExceeded(
                f"unit {self.unit} did not end within {deadline_s:g} s",
                cure="a process of it hangs in the kernel (a dead disk or device); see /proc/PID/stack",
                facts={"phase": "kill", "deadline_s": deadline_s, "pids": list(self.pids())},
            )
        with contextlib.suppress(HostError):  # every process is gone; what is left of it `gc` finds by its labels
            self._maker.clear(self._record.container)

    def log_tail(self, num_lines: int) -> tuple[str, ...]:
        """The last lines of the log file, oldest first; empty when there is none."""
        try:
            with open(self._record.log_path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - num_lines * _TAIL_BYTES_A_LINE))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ()
        return tuple(deque(text.splitlines(), maxlen=num_lines))


def launch(spec: UnitSpec, *, deadline_s: float, tied: bool = False, maker: UnitMaker = NATIVE) -> Unit:
    """Start a unit; see ``driver.UnitDriver.launch``."""
    check_spec(spec, needs_command=True)
    config = {"command": list(spec.command), "environment": dict(spec.environment), "cwd": str(spec.cwd), "criu": None}
    deadline = Deadline(f"launch of unit {spec.unit}", deadline_s)
    return bring_up(spec, {**config, "private": []}, deadline, tied=tied, maker=maker)


def attach(record: UnitRecord, maker: UnitMaker = NATIVE) -> Unit | None:
    """The unit of a record, or None when it is gone, or its PID is another process's now."""
    if record.boot_id != boot_id():
        return None
    unit = Unit(record, {}, maker=maker)
    return unit if unit.alive() else None


def bring_up(
    spec: UnitSpec,
    config: Mapping[str, Any],
    deadline: Deadline,
    *,
    tied: bool,
    images_fd: int = -1,
    criu_log_fd: int = -1,
    maker: UnitMaker = NATIVE,
) -> Unit:
    """Start an init, tell it ``config`` and wait until the tree runs. On any failure nothing is left."""
    phases: dict[str, float] = {}
    with _open_log(spec.log_path) as log_fd:
        begun = maker.begin(spec, InitFiles(log=log_fd, images=images_fd, criu_log=criu_log_fd), deadline)
    try:
        unit = _settle(spec, config, begun, maker, deadline, phases)
        if not tied:
            unit.release()
            phases["confirmed"] = deadline.elapsed()
    except BaseException:
        begun.channel.close()
        end_process(begun.pid, begun.ticks, timeout_s=_CLEANUP_S)
        with contextlib.suppress(HostError):  # what went wrong first is what is told
            maker.clear(begun.container)
        raise
    return unit


def _settle(
    spec: UnitSpec,
    config: Mapping[str, Any],
    begun: Begun,
    maker: UnitMaker,
    deadline: Deadline,
    phases: dict[str, float],
) -> Unit:
    full = {
        **config,
        **begun.world,
        "run_dir_bytes": spec.run_dir_bytes,
        "shm_bytes": spec.shm_bytes,
        "files": {name: b2a_base64(data, newline=False).decode() for name, data in spec.files.items()},
    }
    phase = "start"
    try:
        begun.channel.send(full, timeout_s=deadline.remaining(phase))
        while True:
            message = begun.channel.receive(timeout_s=deadline.remaining(phase))
            event = message["event"]
            if event == "phase":
                phases[phase] = message["at"] - deadline.started
                phase = message["phase"]
                reached(f"unit.{phase}")
            elif event == "started":
                phases[phase] = message["at"] - deadline.started
                reached("unit.started")
                break
            else:
                raise init_error(spec.unit, phase, message)
    except TimeoutError as error:
        raise deadline.exceeded(phase) from error
    except Closed as error:
        raise ended_early(spec, phase) from error
    record = UnitRecord(
        unit=spec.unit,
        init_pid=begun.pid,
        init_start_ticks=begun.ticks,
        boot_id=boot_id(),
        root_pid=message["root_pid"],
        log_pipe=message["log_pipe"],
        log_path=str(spec.log_path),
        container=begun.container,
    )
    return Unit(record, phases, begun.channel, maker)


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise UnsafePath(
            f"the log file {path} cannot be opened: {error.strerror}", cure="name a file in a folder that exists"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _pid_namespace(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:
        return None
