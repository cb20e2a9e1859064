"""Faults of the machine around coldsnap: a full disk, a limit, a mode or an owner that is wrong."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable, Mapping

from coldsnap.testing.faults.case import Case, Struck
from coldsnap.testing.faults.damage import NOBODY
from coldsnap.testing.faults.lane import YARD_BYTES, Lane
from coldsnap.testing.faults.operations import Operation

__all__ = ["ACCESS", "LIMITS", "disk_full", "limited", "no_access"]

LIMITS: Mapping[str, int] = {"file-size": resource.RLIMIT_FSIZE, "open-files": resource.RLIMIT_NOFILE}
"""Resource limits by a name for people."""


def disk_full(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``free``: the bytes that the yard's file system has left when the verb starts."""
    now = os.statvfs(lane.yard)
    used = (now.f_blocks - now.f_bfree) * now.f_frsize
    lane.remount(f"size={used + case.params['free']}")
    outcome = lane.run(operation.verb)
    free = os.statvfs(lane.yard)
    return Struck(
        outcome=outcome,
        happened=outcome.status != "done" or free.f_bfree == 0 or not case.params["free"],
        restored=operation.restored or "unit.criu" in lane.points(),
        repair=lambda: lane.remount(f"size={YARD_BYTES}"),
    )


def limited(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``limit`` is one of ``LIMITS``, ``value`` what it is for the controller and all that it starts."""
    limits = {LIMITS[case.params["limit"]]: case.params["value"]}
    outcome = lane.run(operation.verb, limits=limits)
    return Struck(
        outcome=outcome,
        happened=outcome.status != "done",
        restored=operation.restored or "unit.criu" in lane.points(),
    )


def no_access(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``what`` is one of ``ACCESS``."""
    user = NOBODY if case.params["what"] == "as-nobody" else None
    undo = ACCESS[case.params["what"]](lane)
    outcome = lane.run(operation.verb, user=user)
    return Struck(
        outcome=outcome,
        happened=True,
        restored=operation.restored or "unit.criu" in lane.points(),
        repair=undo,
    )


def _read_only(lane: Lane) -> Callable[[], None]:
    lane.remount("ro")
    return lambda: lane.remount("rw")


def _mode(name: str, mode: int) -> Callable[[Lane], Callable[[], None]]:
    def change(lane: Lane) -> Callable[[], None]:
        path = lane.state / name
        path.chmod(mode)
        return lambda: path.chmod(0o700)

    return change


def _owner(name: str) -> Callable[[Lane], Callable[[], None]]:
    def change(lane: Lane) -> Callable[[], None]:
        path = lane.state / name
        os.chown(path, NOBODY, NOBODY)
        return lambda: os.chown(path, 0, 0)

    return change


def _linked(name: str) -> Callable[[Lane], Callable[[], None]]:
    """The folder is a link to where it was."""

    def change(lane: Lane) -> Callable[[], None]:
        path = lane.state / name
        other = lane.yard / "elsewhere"
        path.rename(other)
        path.symlink_to(other)

        def undo() -> None:
            path.unlink()
            other.rename(path)

        return undo

    return change


def _as_nobody(lane: Lane) -> Callable[[], None]:
    return lambda: None


_FOLDERS = (
    "",
    "artifacts",
    "model-payloads/sha256",
    "capsules",
    "prepared",
    "services",
    "receipts",
    "locks",
    "staging",
)

ACCESS: Mapping[str, Callable[[Lane], Callable[[], None]]] = {
    "read-only": _read_only,
    "as-nobody": _as_nobody,
    **{f"public:{name or 'root'}": _mode(name, 0o777) for name in _FOLDERS},
    **{f"foreign:{name or 'root'}": _owner(name) for name in _FOLDERS},
    **{f"link:{name or 'root'}": _linked(name) for name in _FOLDERS},
}
"""Ways to have no access: each changes something and returns how to change it back."""
