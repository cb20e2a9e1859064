"""Faults at named points and at write boundaries, in the controller, the engine process, a unit's init and CRIU."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from coldsnap.testing.faults import verbs
from coldsnap.testing.faults.case import Case, Struck
from coldsnap.testing.faults.lane import IMPATIENT_S, Lane
from coldsnap.testing.faults.operations import Operation
from coldsnap.testing.faults.running import Outcome
from coldsnap.testing.faults.strikes import SIGKILLS, Act, Strike

__all__ = ["at_point", "at_write"]

_INJECTED = ("RuntimeError", "MemoryError", "OSError")


def at_point(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``role``, ``point``, ``act``, ``nth``."""
    act = Act(case.params["act"])
    strike = Strike(
        token=f"t{chance.getrandbits(48):x}",
        act=act,
        point=case.params["point"],
        nth=case.params.get("nth", 1),
        seconds=chance.uniform(0.05, 0.3),
        seed=chance.getrandbits(32),
    )
    return _strike(lane, operation, case.params["role"], strike)


def at_write(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``role``, ``nth``, ``how``: before, after or torn."""
    strike = Strike(
        token=f"t{chance.getrandbits(48):x}",
        act=Act.KILL,
        boundary=True,
        nth=case.params["nth"],
        tear=case.params["how"] == "torn",
        after=case.params["how"] == "after",
        seed=chance.getrandbits(32),
    )
    return _strike(lane, operation, case.params["role"], strike)


def _strike(lane: Lane, operation: Operation, role: str, strike: Strike) -> Struck:
    silent = strike.act in (Act.STOP, Act.STOP_ENGINE)
    deadlines = lane.deadlines
    if silent:
        names = ("load_s", "answer_s", "export_s", "sleep_s", "wake_s", "serve_s")
        changes: dict[str, Any] = dict.fromkeys(names, IMPATIENT_S)
        deadlines = replace(deadlines, **changes)
    outcome = lane.run(
        operation.verb,
        strike=strike if role == "controller" else None,
        worker=strike if role == "worker" else None,
        watched=lane.yard if strike.boundary and role == "controller" else None,
        deadlines=deadlines,
    )
    happened = lane.struck(strike.token)
    if outcome.status == "broken" and happened and _is_injected(outcome):
        outcome = replace(outcome, status="raised")
    live = operation.restored and operation.name != "replace"
    return Struck(
        outcome=outcome,
        happened=happened,
        restored=operation.restored or lane.thawed_before(strike.token),
        sigkills=int(happened and strike.act in SIGKILLS),
        may_hang=silent,
        repair=(lambda: _stop(lane)) if silent and live else None,
    )


def _is_injected(outcome: Outcome) -> bool:
    """Whether it is the exception that was raised on purpose, or its report from inside the engine."""
    words = outcome.text.split(":")[0]
    return outcome.kind in _INJECTED or (outcome.kind == "InternalError" and words in _INJECTED)


def _stop(lane: Lane) -> None:
    """What a person does with a service that hangs."""
    lane.run(verbs.do_stop)
