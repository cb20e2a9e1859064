"""Would this artifact restore here? Every gate, every mismatch, who must act, and by which way it would come up.

The same gates and the same ladder as a restore asks, so the answer is the restore's own. Reads the descriptor, records
and file sizes; opens no extent manifest and no payload, whatever the size of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coldsnap.core.ladder import PlannedRung
from coldsnap.core.request import OperationRequest
from coldsnap.errors import ColdsnapError, Problem
from coldsnap.ops.activating import listen_address
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.gates import Actor, Gate, restore_gates
from coldsnap.ops.ladder import plan_route
from coldsnap.ops.tools import Tools

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """All gates, and the rungs of the ladder, best first; there are none when nothing would come up."""

    gates: tuple[Gate, ...]
    rungs: tuple[PlannedRung, ...]

    @property
    def rung(self) -> PlannedRung | None:
        """The way a restore would take first, or None when it would be refused."""
        return next((one for one in self.rungs if one.open), None)

    def to_do(self) -> dict[Actor, tuple[Problem, ...]]:
        """Every problem of every closed gate, by who must act."""
        actors = dict.fromkeys(gate.actor for gate in self.gates if gate.problems)
        return {
            actor: tuple(problem for gate in self.gates if gate.actor is actor for problem in gate.problems)
            for actor in actors
        }

    def document(self) -> dict[str, Any]:
        """As JSON."""
        rung = self.rung
        return {
            "restorable": rung is not None,
            "by": rung.rung.value if rung is not None else None,
            "gates": [gate.document() for gate in self.gates],
            "ladder": [{"rung": one.rung.value, "open": one.open, "reason": one.reason} for one in self.rungs],
            "to_do": [
                {"who_must_act": actor.value, "problems": [problem.document() for problem in problems]}
                for actor, problems in self.to_do().items()
            ],
        }


def explain(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> Explanation:
    """Ask everything that a restore of this request would ask. Raises nothing for a gate that says no."""
    address = _address(tools, request)
    gates = restore_gates(tools, loaded, request, address=address)
    try:
        rungs = plan_route(tools, loaded, request, address=address, gates=gates).rungs
    except ColdsnapError:  # its reasons are those of the gates
        rungs = ()
    return Explanation(gates=gates, rungs=rungs)


def _address(tools: Tools, request: OperationRequest) -> tuple[str, int] | None:
    """Where it would serve; only its engine can say, and a missing engine is a closed gate of its own."""
    try:
        return listen_address(tools.engines, request)
    except ColdsnapError:
        return None
