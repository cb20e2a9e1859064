"""Two verbs at once on one digest or one name: each is done, or refused and says why."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from coldsnap.testing.faults import verbs
from coldsnap.testing.faults.case import Case, Struck
from coldsnap.testing.faults.invariants import Violation
from coldsnap.testing.faults.lane import Lane, Verb
from coldsnap.testing.faults.operations import Operation
from coldsnap.testing.faults.strikes import SIGKILLS, Act, Strike

__all__ = ["RIVALS", "raced"]

RIVALS: Mapping[str, Verb] = {
    "capture": verbs.do_capture,
    "recapture": verbs.do_capture_again,
    "delete": verbs.do_delete,
    "gc": verbs.do_gc,
    "materialize": verbs.do_materialize,
    "overlay": verbs.do_overlay,
    "prepare": verbs.do_prepare,
    "restore": verbs.do_restore,
    "sleep": verbs.do_sleep,
    "status": verbs.do_status,
    "stop": verbs.do_stop,
    "verify": verbs.do_verify,
    "wake": verbs.do_wake,
    "warm": verbs.do_warm,
}
"""What runs beside the operation, by name."""

_LONG_S = 120.0


def raced(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``rival`` is one of ``RIVALS``; ``point`` and ``act`` (stall or kill) strike the operation meanwhile."""
    act = Act(case.params["act"])
    strike = Strike(
        token=f"t{chance.getrandbits(48):x}", act=act, point=case.params["point"], seconds=chance.uniform(0.1, 0.4)
    )
    first = lane.begin(operation.verb, strike=strike)
    second = lane.begin(RIVALS[case.params["rival"]])
    outcome, other = first.wait(_LONG_S), second.wait(_LONG_S)
    wrong = []
    if other.status in ("broken", "hung"):
        wrong.append(Violation("stuck", f"the rival ended without saying why: {other.reason}"))
    reason = f"{outcome.reason or 'done'} | {case.params['rival']}: {other.reason or 'done'}"
    return Struck(
        outcome=replace(outcome, kind="", text=reason) if outcome.status != "broken" else outcome,
        happened=True,
        restored=operation.restored or "unit.criu" in lane.points(),
        sigkills=int(act in SIGKILLS and lane.struck(strike.token)),
        gone=case.params["rival"] == "delete",
        # The rival deleted it, as it was asked to: what the operation needs is brought here anew.
        repair=None if operation.deletes or lane.artifact.exists() else lambda: operation.world(lane),
        wrong=tuple(wrong),
    )
