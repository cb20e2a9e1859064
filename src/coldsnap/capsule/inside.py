"""What the programs inside a unit share: how a child is started there, and where things are.

Standard library only. Descriptor numbers of a CRIU child are fixed, so that its command line can be
built, and tested, before any descriptor exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from typing import Final, NoReturn

__all__ = [
    "FAILURE_FD",
    "IMAGES_FD",
    "OUTPUT_FD",
    "PRIVATE_ROOTS",
    "RUN_ROOT",
    "WORK_DIR",
    "become_child",
    "become_criu",
    "make_target",
]

RUN_ROOT: Final = "/run/coldsnap"
PRIVATE_ROOTS: Final = {"run": RUN_ROOT, "shm": "/dev/shm"}  # noqa: S108  (a tmpfs of the unit's own)
WORK_DIR: Final = f"{RUN_ROOT}/.criu"
IMAGES_FD: Final = 10
OUTPUT_FD: Final = 11
FAILURE_FD: Final = 12
_CRIU_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_SCRATCH_FD = 32
_TOP_FD = 1 << 20


def become_child(descriptors: dict[int, int]) -> None:
    """In a forked child: keep exactly ``{number wanted: descriptor held}``, and default signals.

    0 to 2 should be among the wanted. Nothing else stays open, whatever was inherited.
    """
    # First out of the way, so that no wanted number is overwritten while it is still needed.
    high = [(wanted, _above(held)) for wanted, held in descriptors.items()]
    for wanted, held in high:
        os.dup2(held, wanted, inheritable=True)
    keep = sorted(descriptors)
    for low, top in zip([-1, *keep], [*keep, _TOP_FD], strict=True):
        if low + 1 < top:  # closerange(0, 0) closes everything
            os.closerange(low + 1, top)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Numbers that libc keeps for itself are refused.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def become_criu(argv: list[str], descriptors: dict[int, int], log_fd: int) -> NoReturn:
    """In a forked child: run CRIU with exactly these descriptors, its log on ``log_fd``."""
    try:
        null = os.open("/dev/null", os.O_RDONLY)
        become_child({0: null, 1: log_fd, 2: log_fd, **descriptors})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a refused write is then an error that CRIU handles
        os.execve(argv[0], argv, _CRIU_ENVIRONMENT)
    except OSError as error:
        os.write(2, f"Error: cannot run {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _above(held: int) -> int:
    return fcntl.fcntl(held, fcntl.F_DUPFD_CLOEXEC, _SCRATCH_FD)


def make_target(tree: int, target: str) -> None:
    """An empty folder or file for a detached copy to be attached to; the source's path may be hidden by now."""
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
