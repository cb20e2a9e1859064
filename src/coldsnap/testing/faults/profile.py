"""What an operation reaches when nothing strikes it: its points, and the number of its write boundaries."""

from __future__ import annotations

from typing import Any

from coldsnap.testing.faults import verbs
from coldsnap.testing.faults.invariants import check_strays
from coldsnap.testing.faults.lane import Lane
from coldsnap.testing.faults.operations import OPERATIONS
from coldsnap.testing.faults.strikes import Act, Strike

__all__ = ["profile"]


def profile(lane: Lane) -> dict[str, Any]:
    """By operation: ``points`` as [role, name, times] in the order they are first reached, and ``writes`` by role."""
    found: dict[str, Any] = {}
    for name, operation in OPERATIONS.items():
        operation.world(lane)
        lane.notes.clear()
        counting = Strike(token="count", act=Act.KILL, boundary=True, nth=0)  # noqa: S106 - a name
        outcome = lane.run(operation.verb, strike=counting, worker=counting, watched=lane.yard)
        if outcome.status != "done":
            raise AssertionError(f"{name}, without a fault: {outcome.status}: {outcome.reason}")
        times: dict[tuple[str, str], int] = {}
        writes: dict[str, int] = {}
        for line in lane.notes.lines():
            if line[0] == "point":
                times[line[1], line[2]] = times.get((line[1], line[2]), 0) + 1
            elif line[0] == "write":
                writes[line[1]] = writes.get(line[1], 0) + 1
        found[name] = {"points": [[role, point, count] for (role, point), count in times.items()], "writes": writes}
        lane.run(verbs.do_stop)
        list(check_strays(lane))
    return found
