"""A case: one operation and one fault. Running it, and judging what it left.

Cases are data, so that the campaign can list them before anything runs, and hand them to whichever pen is free. What a
family of cases does is in ``families``.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coldsnap.testing.faults import verbs
from coldsnap.testing.faults.invariants import (
    Violation,
    check_answers,
    check_committed,
    check_nothing_left,
    check_strays,
    committed_now,
    record_of,
)
from coldsnap.testing.faults.lane import Lane
from coldsnap.testing.faults.operations import OPERATIONS, Operation
from coldsnap.testing.faults.running import Outcome

__all__ = ["Case", "Inflict", "Row", "Struck", "run_case"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``params`` are the family's own. ``seed`` is all the chance there is in it."""

    family: str
    operation: str
    params: Mapping[str, Any]
    seed: int
    engine: str = "fake"

    @property
    def name(self) -> str:
        """For people, and for ``--only``."""
        words = [f"{key}={value}" if not isinstance(value, str) else value for key, value in self.params.items()]
        real = () if self.engine == "fake" else (self.engine,)
        return " ".join((*real, self.family, self.operation, *words))


@dataclass(frozen=True, kw_only=True)
class Struck:
    """What a family reports: the verb's outcome, whether the fault really happened, and what follows from it.

    ``restored``: a process that CRIU had restored, or was restoring, was part of it. ``gone``: committed files may be
    missing afterwards. ``repair`` is what a person would do before the operation is run again (put a lost file back,
    free the disk); None when nothing has to be done. ``may_hang``: the fault left a service that cannot answer, so it
    is not asked. ``wrong`` is what the family itself saw.
    """

    outcome: Outcome
    happened: bool
    restored: bool = False
    sigkills: int = 0
    gone: bool = False
    repair: Callable[[], None] | None = None
    may_hang: bool = False
    wrong: tuple[Violation, ...] = ()


_ROOT = str(Path(__file__).resolve().parents[4])

Inflict = Callable[[Lane, Operation, Case, random.Random], Struck]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A case's line in the table. ``outcome`` is the verb's; ``violations`` are (kind, text)."""

    name: str
    happened: bool
    restored: bool
    sigkills: int
    outcome: str
    reason: str
    violations: tuple[tuple[str, str], ...]
    seconds: float
    points: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Row:
        """From JSON."""
        violations = tuple((str(kind), str(text)) for kind, text in document["violations"])
        return cls(**{**document, "violations": violations, "points": tuple(document["points"])})


def _anywhere(reason: str) -> str:
    """A reason without the place of the checkout and of its Python, so that results of two machines compare."""
    return reason.replace(sys.prefix, "PREFIX").replace(_ROOT, "CHECKOUT")


def run_case(lane: Lane, case: Case, inflict: Inflict) -> Row:
    """World, fault, invariants, repair, rerun, tidying, invariants."""
    began = time.monotonic()
    operation = OPERATIONS[case.operation]
    chance = random.Random(f"{case.seed} {case.name}")  # noqa: S311 - repeatable, not secret
    operation.world(lane)
    committed = committed_now(lane)
    points = lane.points()
    lane.notes.clear()
    struck = inflict(lane, operation, case, chance)
    points |= lane.points()
    found = list(struck.wrong)
    if struck.outcome.status in ("broken", "hung"):
        found.append(Violation("stuck", f"the verb ended without saying why: {struck.outcome.reason}"))
    gone = operation.deletes or struck.gone
    if not struck.may_hang:
        found += check_answers(lane)
    if struck.repair is not None:
        struck.repair()
    found += check_strays(lane)
    found += check_committed(lane, committed, gone=gone)
    found += operation.again(lane)
    if record_of(lane) is not None:
        outcome = lane.run(verbs.do_stop)
        if outcome.status != "done":
            found.append(Violation("stuck", f"stop at the end: {outcome.reason}"))
    found += check_strays(lane)
    outcome = lane.run(verbs.do_gc)
    if outcome.status != "done":
        found.append(Violation("stuck", f"gc at the end: {outcome.reason}"))
    found += check_nothing_left(lane)
    found += check_committed(lane, committed, gone=gone)
    return Row(
        name=case.name,
        happened=struck.happened,
        restored=struck.restored,
        sigkills=struck.sigkills,
        outcome=struck.outcome.status,
        reason=_anywhere(struck.outcome.reason),
        violations=tuple((one.kind, one.text) for one in found),
        seconds=round(time.monotonic() - began, 3),
        points=tuple(sorted(points | lane.points())),
    )
