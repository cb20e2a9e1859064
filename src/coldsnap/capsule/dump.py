"""Freezing a unit into a folder.

The order is the safety: CRIU leaves the tree stopped, the private files are saved, large runs of memory are moved out
of CRIU's images, ``unit.json`` is written, and only then is the unit ended. Anything that fails before lets the stopped
tree run on and takes the folder away.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coldsnap.capsule.channel import Channel, Closed
from coldsnap.capsule.checks import check_root
from coldsnap.capsule.criu import Criu, dump_command
from coldsnap.capsule.criulog import criu_error, explained, telling_lines
from coldsnap.capsule.deadline import Deadline
from coldsnap.capsule.driver import DumpReport, RunningUnit
from coldsnap.capsule.dumped import DumpedUnit, ImageFile, PrivateEntry, list_images, write_dumped_unit
from coldsnap.capsule.identity import is_running
from coldsnap.capsule.memlog import memory_log
from coldsnap.capsule.pagemove import move_pages
from coldsnap.capsule.programs import start_program
from coldsnap.capsule.tree import read_tree
from coldsnap.core.points import reached
from coldsnap.errors import ColdsnapError, CriuError, HostError, OutOfSpace, PeerError, ResourceBusy
from coldsnap.store.faults import translated

__all__ = ["dump"]

_CLEANUP_S = 60.0  # more than the helper gives CRIU; killing the helper kills CRIU, and may cost a process of the tree


def dump(
    unit: RunningUnit, images_dir: Path, *, criu: Criu, deadline_s: float, leave_running: bool = False
) -> DumpReport:
    """Freeze ``unit`` into ``images_dir``, which must not exist; see ``driver.UnitDriver.dump``."""
    check_root()
    what = f"dump of unit {unit.unit}"
    deadline = Deadline(what, deadline_s)
    phases: dict[str, float] = {}
    record = unit.record()
    with _new_folder(images_dir) as images_fd:
        try:
            reached("dump.begun")
            with _pidfd(record.init_pid, record.init_start_ticks, unit.unit) as init_pidfd:
                argv = dump_command(
                    criu.path, root_pid=record.root_pid, timeout_s=deadline_s, leave_running=leave_running
                )
                private = _run(what, argv, init_pidfd, images_fd, deadline, phases)
            reached("dump.saved")
            with translated("write into", images_dir):
                moved = move_pages(images_dir, pace=lambda: deadline.remaining("memory"))
            phases["memory"] = deadline.elapsed()
            reached("dump.moved")
            dumped = DumpedUnit(
                unit=unit.unit,
                root_pid=record.root_pid,
                log_pipe=record.log_pipe,
                criu_version=criu.version_text,
                files=tuple(ImageFile(name=one.name, bytes=one.bytes) for one in list_images(images_dir)),
                private=private,
                memory=moved.memory,
                stopped=moved.stopped,
            )
            with translated("write into", images_dir):
                write_dumped_unit(images_dir, dumped)
            reached("dump.described")
            files = list_images(images_dir)
            deadline.remaining("end")
            if not leave_running:
                unit.kill(_CLEANUP_S)  # past the point of no return, so with time of its own
                phases["end"] = deadline.elapsed()
        except CriuError as error:
            _let_run(unit)
            raise explained(error, what, read_tree(unit.pids())) from error
        except OutOfSpace as error:  # CRIU's log calls the folder by a descriptor; people need its name
            _let_run(unit)
            facts = {**error.facts, "path": str(images_dir)}
            raise OutOfSpace(f"{error.message} ({images_dir})", cure=error.cure, facts=facts) from error
        except BaseException:
            _let_run(unit)
            raise
    return DumpReport(
        images_dir=images_dir,
        seconds=deadline.elapsed(),
        bytes=sum(file.bytes for file in files),
        files=files,
        phases=phases,
        notes=tuple(
            f"memory of {f'process {pid}' if pid else 'the tree'} comes back by CRIU alone, which is slower: {reason}"
            for pid, reason in moved.left.items()
        ),
    )


def _run(
    what: str, argv: tuple[str, ...], init_pidfd: int, images_fd: int, deadline: Deadline, phases: dict[str, float]
) -> tuple[PrivateEntry, ...]:
    with memory_log() as log:
        channel, process = start_program("enter", (init_pidfd, images_fd, log.fd), label=what, output_fd=log.fd)
        phase = "criu"
        try:
            channel.send({"criu": list(argv)}, timeout_s=deadline.remaining(phase))
            reached("dump.dumping")
            while True:
                message = channel.receive(timeout_s=deadline.remaining(phase))
                match message["event"]:
                    case "dumped":
                        phases[phase] = message["at"] - deadline.started
                        phase = "private files"
                        reached("dump.dumped")
                    case "saved":
                        phases[phase] = message["at"] - deadline.started
                        return tuple(PrivateEntry.model_validate_json(json.dumps(one)) for one in message["files"])
                    case _:
                        raise _failed(what, message, log.text())
        except TimeoutError as error:
            late = deadline.exceeded(phase)
            late.facts["log"] = list(telling_lines(log.text()))
            raise late from error
        except Closed as error:
            raise criu_error(what, "the dumping program was killed", log.text()) from error
        finally:
            _finish(channel, process)


def _failed(what: str, message: dict[str, Any], log: str) -> ColdsnapError:
    if message["phase"] == "criu":
        return criu_error(what, message["message"], log)
    if message.get("errno") in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpace(f"{what} failed: {message['message']}", cure="free some space, or put the images elsewhere")
    cure = "run as root on this machine's own kernel; see the message"
    return HostError(f"{what} failed in its phase {message['phase']!r}: {message['message']}", cure=cure)


def _finish(channel: Channel, process: subprocess.Popen[bytes]) -> None:
    """The helper makes CRIU stop when its channel closes; one that hangs is killed, and CRIU with it."""
    channel.close()
    try:
        process.wait(_CLEANUP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _let_run(unit: RunningUnit) -> None:
    for pid in unit.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _new_folder(images_dir: Path) -> Iterator[int]:
    """Make the private folder, yield a descriptor of it, and take it away again on failure."""
    try:
        images_dir.mkdir(mode=0o700)
    except FileExistsError as error:
        raise ResourceBusy(f"the images folder {images_dir} exists", cure="name one that does not exist") from error
    except OSError as error:
        raise HostError(
            f"the images folder {images_dir} cannot be made: {error.strerror}", cure="name one in a writable folder"
        ) from error
    descriptor = os.open(images_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    except BaseException:
        shutil.rmtree(images_dir, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _pidfd(pid: int, ticks: int, unit: str) -> Iterator[int]:
    gone = PeerError(f"unit {unit} is gone, there is nothing to dump", cure="read its log to see why it ended")
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise gone from error
    try:
        if not is_running(pid, ticks):
            raise gone
        yield descriptor
    finally:
        os.close(descriptor)
