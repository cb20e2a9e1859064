"""A worker's life as a table: its states, the verbs a controller has for it, and which state takes which verb.

A verb that is not in the row of the current state is answered with an error naming both, and changes nothing.

    loading --(engine loaded)--> idle <--serve/stop_serving--> serving
    idle --sleep--> asleep --wake--> idle          a failed wake leaves `asleep`, and may be tried again
    any --(bug, lost memory)--> failed
    loading --(all imported, settings say template)--> template --place--> idle      a failed place leaves `failed`

`asleep` means: HTTP closed, no request in flight, KV discarded, stable allocations unmapped. `template` means: all
code is imported, nothing of the model is there, and no device was touched. These are the two states in which a
snapshot driver may freeze the process tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

__all__ = ["TRANSITIONS", "Verb", "WorkerState"]


class WorkerState(StrEnum):
    """Where a worker is in its life; see the module's drawing."""

    LOADING = "loading"
    IDLE = "idle"
    SERVING = "serving"
    ASLEEP = "asleep"
    TEMPLATE = "template"
    FAILED = "failed"


class Verb(StrEnum):
    """What the controller may ask of a worker."""

    STATUS = "status"
    ANSWER = "answer"
    EXPORT = "export"
    SERVE = "serve"
    STOP_SERVING = "stop_serving"
    SLEEP = "sleep"
    WAKE = "wake"
    MATERIALIZE = "materialize"
    PLACE = "place"


# state -> verb -> the state after success. A missing verb is refused.
TRANSITIONS: Mapping[WorkerState, Mapping[Verb, WorkerState]] = MappingProxyType(
    {
        WorkerState.LOADING: MappingProxyType({Verb.STATUS: WorkerState.LOADING}),
        WorkerState.IDLE: MappingProxyType(
            {
                Verb.STATUS: WorkerState.IDLE,
                Verb.ANSWER: WorkerState.IDLE,
                Verb.EXPORT: WorkerState.IDLE,
                Verb.SERVE: WorkerState.SERVING,
                Verb.STOP_SERVING: WorkerState.IDLE,
                Verb.SLEEP: WorkerState.ASLEEP,
                Verb.MATERIALIZE: WorkerState.IDLE,
            }
        ),
        WorkerState.SERVING: MappingProxyType(
            {
                Verb.STATUS: WorkerState.SERVING,
                Verb.ANSWER: WorkerState.SERVING,
                Verb.STOP_SERVING: WorkerState.IDLE,
                Verb.SLEEP: WorkerState.ASLEEP,
                Verb.MATERIALIZE: WorkerState.SERVING,
            }
        ),
        WorkerState.ASLEEP: MappingProxyType({Verb.STATUS: WorkerState.ASLEEP, Verb.WAKE: WorkerState.IDLE}),
        WorkerState.TEMPLATE: MappingProxyType({Verb.STATUS: WorkerState.TEMPLATE, Verb.PLACE: WorkerState.IDLE}),
        WorkerState.FAILED: MappingProxyType({Verb.STATUS: WorkerState.FAILED}),
    }
)
