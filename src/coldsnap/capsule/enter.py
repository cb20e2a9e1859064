"""The program that runs CRIU's dump inside a living unit, started by the controller and never left behind.

It enters the unit's mount and IPC namespaces itself and forks CRIU into its PID namespace, so the processes are
dumped from where they are restored later. Standard library only, like the init.

Whatever goes wrong, also that the controller is gone (its end of the channel is closed), the tree runs on. Killing
CRIU is no way to get there: for some milliseconds of a dump the tree's threads execute CRIU's code, and a CRIU killed
in that window (seen about once in forty tries) takes a process of the tree with it. So CRIU is first made to fail:
its limit for file sizes is set to nothing, its next write is refused, and it takes its own way out, which puts every
thread back. Only a CRIU that does not write for `_GRACE_S` is killed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from typing import NoReturn

from coldsnap.capsule import inside, linux, privatefiles
from coldsnap.capsule.channel import Channel, Closed

__all__ = ["main"]

_GRACE_S = 10.0  # on a busy machine a CRIU that would write may get no processor for seconds


def main(channel_fd: int, init_pidfd: int, images_fd: int, criu_log_fd: int) -> NoReturn:
    """Dump as the controller says, save the private files, report, end."""
    for descriptor in (channel_fd, init_pidfd, images_fd, criu_log_fd):
        os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=channel_fd))
    phase = "enter"
    try:
        argv = channel.receive()["criu"]
        linux.setns(init_pidfd, linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
        os.chdir("/")
        os.umask(0o077)
        phase = "criu"
        os.makedirs(inside.WORK_DIR, mode=0o700, exist_ok=True)
        code = _run_criu(channel, argv, images_fd, criu_log_fd)
        with contextlib.suppress(OSError):
            for name in os.listdir(inside.WORK_DIR):
                os.unlink(f"{inside.WORK_DIR}/{name}")
            os.rmdir(inside.WORK_DIR)
        if code:
            raise ValueError(f"criu dump ended with {code}")
        channel.send({"event": "dumped", "at": time.monotonic()})
        phase = "private"
        channel.send({"event": "saved", "files": privatefiles.save_private(images_fd), "at": time.monotonic()})
    except Closed:
        _let_run(init_pidfd)
        os._exit(1)
    except (OSError, ValueError) as error:
        _let_run(init_pidfd)
        number = error.errno if isinstance(error, OSError) else None
        with contextlib.suppress(Closed):
            channel.send({"event": "error", "phase": phase, "errno": number, "message": str(error)})
        os._exit(1)
    os._exit(0)


def _let_run(init_pidfd: int) -> None:
    """Continue every process of the unit that a finished CRIU left stopped."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            # Entering twice is harmless, and the first time may have been what failed.
            linux.setns(init_pidfd, linux.CLONE_NEWPID)
            if os.fork() == 0:
                os.kill(-1, signal.SIGCONT)
                os._exit(0)
            os.wait()
        os._exit(0)
    os.waitpid(pid, 0)


def _run_criu(channel: Channel, argv: list[str], images_fd: int, criu_log_fd: int) -> int:
    pid = os.fork()
    if pid == 0:
        linux.die_with_parent()
        inside.become_criu(argv, {inside.IMAGES_FD: images_fd}, criu_log_fd)
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(channel, select.POLLIN)
    if not _ends(pidfd, poll.poll()):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        poll.unregister(channel)
        if not _ends(pidfd, poll.poll(_GRACE_S * 1000)):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise Closed
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _ends(pidfd: int, ready: list[tuple[int, int]]) -> bool:
    return pidfd in {descriptor for descriptor, _ in ready}
