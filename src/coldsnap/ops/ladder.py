"""Walk down the fall-back ladder of ``core/ladder.py``: plan the rungs of one restore, then try them until one serves.

Every rung that was looked at leaves a step with its reason. The steps go into the receipt, whether the restore ends
well or not, and are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from coldsnap.core.ladder import (
    Blame,
    LadderStep,
    Outcome,
    PlannedRung,
    Rung,
    after_failure,
    blame,
    plan_rungs,
    unavoidable,
)
from coldsnap.core.policy import WeightsMode
from coldsnap.core.request import ActivationState, OperationRequest
from coldsnap.core.selection import Provider
from coldsnap.errors import ColdsnapError, InternalError, reason_of
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.gates import Gate, refuse_unless_open, restore_gates
from coldsnap.ops.overlay import FoundOverlay, find_overlay
from coldsnap.ops.providers import decide_provider
from coldsnap.ops.publishing import secrets_of
from coldsnap.ops.tools import Tools

__all__ = ["Climb", "Route", "plan_route"]

T = TypeVar("T")

_RUNGS = {Provider.NATIVE: Rung.NATIVE, Provider.RECOVERY: Rung.RECOVERY}
_TREE_GATES = frozenset({"machine", "host files", "capsule", "quarantine"})
"""Gates that stand before the artifact's own process tree, and before nothing that a cold start needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The rungs of one restore and what they work with."""

    rungs: tuple[PlannedRung, ...]
    overlay: FoundOverlay | None


def plan_route(
    tools: Tools,
    loaded: LoadedArtifact,
    request: OperationRequest,
    *,
    address: tuple[str, int] | None,
    ignore_quarantine: bool = False,
    first_only: bool = False,
    gates: tuple[Gate, ...] | None = None,
) -> Route:
    """Ask every gate (or take ``gates``, their answers just now) and lay out the rungs.

    ``first_only`` leaves no way down (the negative control).

    Raises Refused with every problem of every gate when no rung is open, or when what is closed is needed by all.
    """
    if gates is None:
        gates = restore_gates(tools, loaded, request, address=address, ignore_quarantine=ignore_quarantine)
    subject = f"{loaded.path} would not restore here"
    refuse_unless_open(subject, gates if any(_everybody_needs(gate) for gate in gates) else ())
    decision = decide_provider(tools, loaded, request)
    overlay = None if first_only else find_overlay(tools, loaded, request, ignore_quarantine=ignore_quarantine)
    rungs = plan_rungs(
        provider=_RUNGS[decision.provider],
        provider_reason=decision.reason,
        overlay=(overlay.loaded is not None, overlay.reason) if overlay is not None else None,
        closed=_closed(gates),
        may_recover=(False, "this is a negative control") if first_only else _may_recover(request),
        may_start_cold=(False, "this is a negative control") if first_only else _may_start_cold(loaded, request),
    )
    if not any(one.open for one in rungs):
        refuse_unless_open(subject, gates)
    return Route(rungs=rungs, overlay=overlay)


@dataclass(kw_only=True)
class Climb(Generic[T]):
    """One walk. ``attempts``: how to try each rung, given why it is tried; it leaves nothing behind when it raises.

    ``phase`` names what the operation is doing, or was when it raised. ``failed`` hears of every failure.
    """

    rungs: tuple[PlannedRung, ...]
    attempts: Mapping[Rung, Callable[[str], T]]
    phase: Callable[[], str]
    failed: Callable[[Rung, Blame, ColdsnapError], None]
    steps: list[LadderStep] = field(default_factory=list)

    def run(self) -> T:
        """Try rungs until one succeeds. Raises the last rung's error, with the earlier ones' reasons as notes."""
        self.steps.clear()
        rung, reason = self._first()
        while True:
            try:
                result = self.attempts[rung](reason)
            except ColdsnapError as error:
                about = blame(error, rung=rung, phase=self.phase())
                following = after_failure(self.rungs, rung, about)
                earlier = [str(step) for step in self.steps if step.outcome is Outcome.FAILED]
                why = reason_of(error)
                self.steps.append(LadderStep(rung=rung, outcome=Outcome.FAILED, reason=why, error=type(error).__name__))
                self.steps.extend(unavoidable(self.rungs, rung, about, until=following))
                self.failed(rung, about, error)
                if following is None:
                    for line in earlier:
                        error.add_note(line)
                    error.facts["ladder"] = [step.document() for step in self.steps]
                    raise
                rung, reason = following, f"{rung.value} failed: {why}"
                continue
            self.steps.append(LadderStep(rung=rung, outcome=Outcome.USED, reason=reason))
            return result

    def _first(self) -> tuple[Rung, str]:
        """The best open rung. Why the artifact itself is left out is the reason for a cold start."""
        above = ""
        for one in self.rungs:
            if one.open:
                return one.rung, above if one.rung is Rung.COLD else one.reason
            above = one.reason
            self.steps.append(LadderStep(rung=one.rung, outcome=Outcome.SKIPPED, reason=one.reason))
        raise InternalError("a restore without an open rung was not refused", cure="report this")


def _everybody_needs(gate: Gate) -> bool:
    return bool(gate.problems) and gate.name not in _TREE_GATES


def _closed(gates: tuple[Gate, ...]) -> str | None:
    problems = [str(problem) for gate in gates if gate.name in _TREE_GATES for problem in gate.problems]
    return "; ".join(problems) or None


def _may_recover(request: OperationRequest) -> tuple[bool, str]:
    weights = request.policy.weights
    if weights.mode is WeightsMode.NATIVE:
        return False, "policy.weights.mode is native"
    if not weights.recovery.enabled:
        return False, "policy.weights.recovery.enabled is off"
    return True, f"policy.weights.mode is {weights.mode.value}"


def _may_start_cold(loaded: LoadedArtifact, request: OperationRequest) -> tuple[bool, str]:
    if request.lifecycle.activation_state is ActivationState.WARM:
        return False, "a service that starts cold has its weights already, and warm asks for one without"
    if request.extension is None or not request.extension.cold_start:
        return False, "the recipe does not allow a cold start"
    if secrets := secrets_of(loaded.artifact):  # such as the key that a service asks its callers for
        return False, f"{', '.join(secrets)} is in the process image alone, and a process that starts cold is without"
    return True, "the recipe allows a cold start"
