"""Every place where something reaches the disk, as a place to stop: system calls counted, and writes torn.

``watch`` puts a counter around the calls of ``os`` that change files. At the boundary of a strike the process kills
itself, before the call, after it, or with a tear: a ``write`` that got only a part down, or a file that loses an
unsynced part at its ``fsync``. That is what a power cut does to a file that was not synced; what was synced is never
touched.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coldsnap.testing.faults.strikes import Strike, Striker

__all__ = ["watch"]

_BY_FD = ("write", "pwrite", "fsync", "fdatasync", "fchmod", "posix_fallocate")
_BY_PATH = ("rename", "replace", "link", "unlink", "mkdir", "rmdir")


def watch(striker: Striker, folder: Path) -> None:
    """From now on, in this process, changes to files below ``folder`` are boundaries."""
    beginning = str(folder) + os.sep

    def below_fd(fd: object, *_: object) -> bool:
        try:
            return str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(beginning)
        except OSError:
            return False

    def below_path(path: object, *_: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fsdecode(path).startswith(beginning)

    for names, is_ours in ((_BY_FD, below_fd), (_BY_PATH, below_path)):
        for name in names:
            setattr(os, name, _counted(getattr(os, name), is_ours, striker))


def _counted(real: Callable[..., Any], is_ours: Callable[..., bool], striker: Striker) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not is_ours(*arguments):
            return real(*arguments, **keywords)
        strike = striker.boundary()
        if strike is None:
            return real(*arguments, **keywords)
        try:
            if strike.tear:
                _tear(real, arguments, strike)
            elif strike.after:
                real(*arguments, **keywords)
        finally:
            striker.carry_out(strike)
        return None

    return call


def _tear(real: Callable[..., Any], arguments: tuple[Any, ...], strike: Strike) -> None:
    chance = random.Random(strike.seed)  # noqa: S311 - repeatable, not secret
    if real.__name__ in ("write", "pwrite"):
        fd, data, *rest = arguments
        view = memoryview(data).cast("B")
        real(fd, view[: chance.randrange(len(view) + 1)], *rest)
    elif real.__name__ in ("fsync", "fdatasync"):
        found = os.fstat(arguments[0])
        if stat.S_ISREG(found.st_mode) and found.st_size:
            os.truncate(arguments[0], chance.randrange(found.st_size))
