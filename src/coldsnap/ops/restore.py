"""Restore: prepare, then evict, then bring a tree back, fill its memory, check its answers, and only then serve.

What fails before the service is ready is undone, and the ladder of ``core/ladder.py`` says whether another way is
tried. A restore never captures: a failure that made a new artifact would hide its cause, and might go on for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from coldsnap.core.ladder import LadderStep, Outcome, Rung
from coldsnap.core.messages import WakeReport
from coldsnap.core.points import reached
from coldsnap.core.policy import ArtifactScope
from coldsnap.core.request import OperationRequest
from coldsnap.errors import ColdsnapError, InternalError, OperationInterrupted
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.ladder import Climb, Route, plan_route
from coldsnap.ops.leases import lease
from coldsnap.ops.materialize import materialize, materialize_request
from coldsnap.ops.operation import Outlet, operation
from coldsnap.ops.overlaying import OverlayMade
from coldsnap.ops.rungs import Brought, RungAttempts
from coldsnap.ops.tools import Tools

__all__ = ["RestoreResult", "restore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreResult:
    """A service that answers (or, when ``state`` is warm, one that only lacks its memory).

    ``source``: where its weights came from (native, recovery, cold). ``rung``: the way it came up, for ``reason``.
    ``ladder``: every way that was looked at, best first.
    """

    name: str
    state: str
    host: str
    port: int
    source: str
    rung: str
    reason: str
    ladder: tuple[LadderStep, ...]
    evicted: bool
    prepared_from_record: bool
    seconds: Mapping[str, float]
    wake: Mapping[str, WakeReport]
    overlay: OverlayMade | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "state": self.state,
            "host": self.host,
            "port": self.port,
            "source": self.source,
            "rung": self.rung,
            "reason": self.reason,
            "ladder": [step.document() for step in self.ladder],
            "evicted": self.evicted,
            "prepared_from_record": self.prepared_from_record,
            "seconds": dict(self.seconds),
            "workers": {worker: report.model_dump(mode="json") for worker, report in self.wake.items()},
            "overlay": self.overlay.document() if self.overlay is not None else None,
        }


def restore(
    tools: Tools,
    loaded: LoadedArtifact,
    request: OperationRequest,
    *,
    host: str,
    port: int,
    outlet: Outlet | None = None,
    negative_control: bool = False,
    ignore_quarantine: bool = False,
) -> RestoreResult:
    """Restore the artifact as the service ``request.workload.cluster_id`` and return once it serves.

    ``negative_control`` skips hydration on purpose: the memory comes back as zeros, so acceptance must fail. It
    never serves; an acceptance that passes is reported as InternalError.

    Raises Refused, ResourceBusy, AcceptanceFailed, and what the rooms below raise. On any failure everything this
    operation started is gone, and the error's notes say what was undone and which ways were tried before.
    """
    name = request.workload.cluster_id
    with tools.services.lock(name), tools.state.in_use(), operation(tools, request, outlet=outlet) as op:
        lease(tools, loaded.path, loaded.artifact)
        reached("restore.leased")
        with op.span("gates"):
            route = plan_route(
                tools,
                loaded,
                request,
                address=(host, port),
                ignore_quarantine=ignore_quarantine or negative_control,
                first_only=negative_control,
            )
        attempts = RungAttempts(
            tools=tools,
            op=op,
            loaded=loaded,
            request=request,
            route=route,
            host=host,
            port=port,
            negative_control=negative_control,
        )
        climb: Climb[Brought] = Climb(
            rungs=route.rungs, attempts=attempts.table(), phase=lambda: op.phase, failed=attempts.failed
        )
        try:
            brought = climb.run()
        finally:
            op.keep(ladder=[step.document() for step in climb.steps])
        result = RestoreResult(
            name=name,
            state=brought.state.value,
            host=host,
            port=port,
            source=brought.source,
            rung=brought.rung.value,
            reason=brought.reason,
            ladder=tuple(climb.steps),
            evicted=attempts.evicted,
            prepared_from_record=brought.prepared_from_record,
            seconds=op.seconds(),
            wake=brought.wake,
        )
        op.succeed(result.document())
    if request.policy.process.artifact_scope is ArtifactScope.TARGET_LOCAL and _may_make_overlay(result, route):
        result = replace(result, overlay=_make_overlay(tools, loaded, request))
    return result


def _may_make_overlay(result: RestoreResult, route: Route) -> bool:
    """Only behind a restore in which nothing failed: failures that make new captures go on for ever."""
    if result.rung in (Rung.OVERLAY, Rung.COLD) or any(step.outcome is Outcome.FAILED for step in result.ladder):
        return False
    return route.overlay is None or route.overlay.replaceable


def _make_overlay(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> OverlayMade:
    """Make this machine's overlay beside the service, from a tree of its own. The service is there whatever happens."""
    wanted = materialize_request(loaded, operation_id=f"{request.id[:100]}-overlay")
    try:
        made = materialize(tools, loaded, wanted, overlay=True).overlay
    except OperationInterrupted as error:
        error.add_note(f"{request.workload.cluster_id} serves; only its overlay was not made")
        raise
    except ColdsnapError as error:
        reason = f"{type(error).__name__}: {error.message}"
        tools.reporter.warn(f"no overlay was made: {reason}")
        return OverlayMade(outcome="failed", reason=reason)
    if made is None:
        raise InternalError("an overlay was asked for and not made", cure="report this")
    return made
