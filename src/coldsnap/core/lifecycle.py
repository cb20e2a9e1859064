"""The life of a named service, as one table.

    absent --capture--> capturing --done--> absent
    absent --prepare--> preparing --done--> absent        (prepare never disturbs a service that is there)
    absent --restore--> restoring --done--> ready <--wake-- asleep, warm
                                  --done-warm--> warm      ready --sleep--> asleep
    any that runs --stop--> stopping --done--> absent
    any that works or runs --fail--> failed --restore, delete--> ...

``done``, ``done-warm`` and ``fail`` are how an operation ends. ``sleep`` and ``wake`` are short: their row
says whether they may begin, and the state changes when they succeed; a failed one leaves the old state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from coldsnap.errors import UsageError

__all__ = ["SERVICE_TRANSITIONS", "ServiceState", "ServiceVerb", "next_state"]


class ServiceState(StrEnum):
    """Where a named service is in its life."""

    ABSENT = "absent"
    CAPTURING = "capturing"
    PREPARING = "preparing"
    RESTORING = "restoring"
    WARM = "warm"
    READY = "ready"
    ASLEEP = "asleep"
    STOPPING = "stopping"
    FAILED = "failed"


class ServiceVerb(StrEnum):
    """What is asked of a service, and how what was asked ends."""

    CAPTURE = "capture"
    PREPARE = "prepare"
    RESTORE = "restore"
    SLEEP = "sleep"
    WAKE = "wake"
    STOP = "stop"
    DELETE = "delete"
    STATUS = "status"
    DONE = "done"
    DONE_WARM = "done-warm"
    FAIL = "fail"


def _table() -> Mapping[ServiceState, Mapping[ServiceVerb, ServiceState]]:
    s, v = ServiceState, ServiceVerb
    ending = {v.STOP: s.STOPPING, v.FAIL: s.FAILED}
    live = {v.RESTORE: s.RESTORING, **ending}
    rows: dict[ServiceState, dict[ServiceVerb, ServiceState]] = {
        s.ABSENT: {v.CAPTURE: s.CAPTURING, v.PREPARE: s.PREPARING, v.RESTORE: s.RESTORING, v.DELETE: s.ABSENT},
        s.CAPTURING: {v.DONE: s.ABSENT, **ending},
        s.PREPARING: {v.DONE: s.ABSENT, **ending},
        s.RESTORING: {v.DONE: s.READY, v.DONE_WARM: s.WARM, **ending},
        s.WARM: {v.WAKE: s.READY, v.PREPARE: s.WARM, **live},
        s.READY: {v.SLEEP: s.ASLEEP, v.PREPARE: s.READY, **live},
        s.ASLEEP: {v.WAKE: s.READY, v.PREPARE: s.ASLEEP, **live},
        s.STOPPING: {v.DONE: s.ABSENT, **ending},
        s.FAILED: {
            v.CAPTURE: s.CAPTURING,
            v.PREPARE: s.FAILED,
            v.RESTORE: s.RESTORING,
            v.STOP: s.STOPPING,
            v.DELETE: s.ABSENT,
        },
    }
    return MappingProxyType({state: MappingProxyType({**row, v.STATUS: state}) for state, row in rows.items()})


SERVICE_TRANSITIONS: Mapping[ServiceState, Mapping[ServiceVerb, ServiceState]] = _table()


def next_state(state: ServiceState, verb: ServiceVerb) -> ServiceState:
    """The state after ``verb`` succeeded. Raises UsageError naming both when the table has no such row."""
    row = SERVICE_TRANSITIONS[state]
    if verb not in row:
        asked = [v.value for v in row if v not in (ServiceVerb.DONE, ServiceVerb.DONE_WARM, ServiceVerb.FAIL)]
        raise UsageError(
            f"a service that is {state.value} cannot {verb.value}",
            cure=f"it can {', '.join(asked)}",
            facts={"state": state.value, "verb": verb.value},
        )
    return row[verb]
