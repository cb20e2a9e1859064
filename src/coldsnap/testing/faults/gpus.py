"""Faults of engines with GPUs: what is struck of the two drivers for them, and calls of the driver that go wrong.

The GPUs are ``coldsnap.testing.gpu``'s, which forget what is not taken off and put back in order; CRIU, the processes
and the helper that calls the driver are real. What these engines share with the fake one without a GPU is not struck
again here.
"""

from __future__ import annotations

import random
from dataclasses import replace

from coldsnap.capsule.cuda.suspend import Patience
from coldsnap.core.drivers import DriverId
from coldsnap.testing.faults.case import Case, Struck
from coldsnap.testing.faults.lane import IMPATIENT_S, Lane
from coldsnap.testing.faults.operations import OPERATIONS, Operation
from coldsnap.testing.faults.strikes import Act
from coldsnap.testing.gpu_device import FAULTS_NAME

__all__ = ["DRIVERS", "failed_call", "list_gpu_cases"]

DRIVERS = {"initialised": DriverId.N610, "template": DriverId.N580}
"""By kind of engine: the driver that freezes it."""

_IMPATIENT = Patience(
    lock_s=IMPATIENT_S,
    checkpoint_s=IMPATIENT_S,
    restore_s=IMPATIENT_S,
    unlock_s=IMPATIENT_S,
    bring_back_s=2 * IMPATIENT_S,
)
_HOWS = ("fail", "busy", "hang", "die", "die-after")
_CALLS = {"capture": ("lock", "checkpoint", "state"), "restore": ("restore", "unlock", "state")}
_ACTS = (Act.KILL, Act.INTERRUPT, Act.BUG, Act.FULL, Act.STALL)
_POINTS = {
    (
        "initialised",
        "capture",
    ): "capture.held capture.suspended capture.inspected dump.begun dump.dumped capture.frozen",
    ("initialised", "restore"): "restore.thawed restore.resumed restore.named restore.hydrated restore.done",
    ("initialised", "overlay"): "materialize.restored capture.held capture.suspended",
    ("initialised", "replace"): "restore.evicted restore.resumed",
    ("initialised", "wake"): "wake.prepared restore.hydrated",
    ("template", "capture"): "capture.launched dump.dumped capture.template capture.loaded capture.frozen",
    ("template", "restore"): "restore.thawed restore.named restore.hydrated restore.done",
    ("template", "recover"): "restore.thawed restore.hydrated",
    ("template", "wake"): "restore.hydrated",
}
_AROUND = (
    ("initialised", "capture", "dump.dumping", (Act.KILL_CRIU, Act.KILL_INIT, Act.KILL_ENGINE)),
    ("initialised", "capture", "capture.held", (Act.KILL_ENGINE, Act.KILL_INIT)),
    ("initialised", "capture", "capture.suspended", (Act.KILL_ENGINE, Act.KILL_INIT)),
    ("initialised", "restore", "unit.criu", (Act.KILL_CRIU, Act.KILL_INIT)),
    ("initialised", "restore", "restore.thawed", (Act.KILL_ENGINE, Act.KILL_INIT)),
    ("initialised", "restore", "restore.resumed", (Act.KILL_ENGINE, Act.STOP_ENGINE)),
    ("template", "capture", "capture.template", (Act.KILL_ENGINE, Act.KILL_INIT, Act.STOP_ENGINE)),
    ("template", "restore", "restore.thawed", (Act.KILL_ENGINE, Act.STOP_ENGINE)),
)


def list_gpu_cases(kind: str, *, seed: int) -> list[Case]:
    """Cases of one kind of engine, mixed."""
    specs = [
        ("point", operation, {"role": "controller", "point": point, "act": act.value})
        for (one, operation), points in _POINTS.items()
        for point in points.split()
        for act in (_ACTS if operation in ("capture", "restore") else (Act.KILL, Act.INTERRUPT))
        if one == kind
    ]
    specs += [
        ("point", operation, {"role": "controller", "point": point, "act": act.value})
        for one, operation, point, acts in _AROUND
        for act in acts
        if one == kind
    ]
    if kind == "initialised":
        specs += [
            ("call", operation, {"call": call, "how": how})
            for operation, calls in _CALLS.items()
            for call in calls
            for how in _HOWS
        ]
    cases = [
        Case(family=family, operation=operation, params=params, seed=seed, engine=kind)
        for family, operation, params in specs
    ]
    random.Random(f"{seed} {kind}").shuffle(cases)  # noqa: S311 - repeatable, not secret
    return cases


def failed_call(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``call`` of the driver goes wrong once, as ``how`` says: see ``GpuRack.fail_next``."""
    assert lane.gpus is not None
    due = lane.gpus.folder / FAULTS_NAME
    lane.gpus.fail_next(case.params["call"], case.params["how"])
    outcome = lane.run(OPERATIONS[operation.name].verb, deadlines=replace(lane.deadlines, cuda=_IMPATIENT))
    happened = not due.exists()
    due.unlink(missing_ok=True)
    return Struck(
        outcome=outcome,
        happened=happened,
        restored=operation.restored or "unit.criu" in lane.points(),
    )
