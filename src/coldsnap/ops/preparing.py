"""The verb ``prepare``: make an artifact ready to restore here, and touch nothing that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coldsnap.core.messages import PackSource
from coldsnap.core.request import OperationRequest
from coldsnap.core.selection import Provider
from coldsnap.errors import ColdsnapError
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.fetching import Fetched
from coldsnap.ops.leases import lease
from coldsnap.ops.operation import Operation, Outlet, operation
from coldsnap.ops.overlay import find_overlay
from coldsnap.ops.prepare import PreparedArtifact, make_ready, prepare_artifact
from coldsnap.ops.staging import Copied, staging, wants_staging
from coldsnap.ops.tools import Tools

__all__ = ["PrepareResult", "prepare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareResult:
    """What a restore would use. ``from_record``: every proof was an earlier one and nothing was read.

    ``overlay``: why this machine's overlay would be used, or would not; None when there is none. ``staging``: what
    became of each pack that was to be copied into memory. ``fetched``: what was not on this machine.
    """

    source: str
    reason: str
    from_record: bool
    overlay: str | None
    staging: tuple[Copied, ...]
    seconds: Mapping[str, float]
    fetched: tuple[Fetched, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "source": self.source,
            "reason": self.reason,
            "from_record": self.from_record,
            "fetched": [one.document() for one in self.fetched],
            "overlay": self.overlay,
            "staging": [one.document() for one in self.staging],
            "seconds": dict(self.seconds),
        }


def prepare(
    tools: Tools, loaded: LoadedArtifact, request: OperationRequest, *, outlet: Outlet | None = None
) -> PrepareResult:
    """Pass the gates (the port is not looked at), unpack, prove, and keep ``gc`` from taking it away again."""
    with tools.state.in_use(), operation(tools, request, outlet=outlet, verb="prepare") as op:
        lease(tools, loaded.path, loaded.artifact)
        prepared = prepare_artifact(tools, op, loaded, request)
        with staging(tools, prepared, wanted=wants_staging(request), ahead=True) as stage:
            prepared = stage.finish(prepared, op)
        from_record, overlay = _prepare_overlay(tools, op, loaded, request, prepared)
        result = PrepareResult(
            source=prepared.source.value,
            reason=prepared.reason,
            from_record=prepared.from_record and from_record,
            overlay=overlay,
            staging=tuple(stage.done),
            seconds=op.seconds(),
            fetched=prepared.fetched,
        )
        op.succeed(result.document())
    return result


def _prepare_overlay(
    tools: Tools, op: Operation, loaded: LoadedArtifact, request: OperationRequest, prepared: PreparedArtifact
) -> tuple[bool, str | None]:
    """The overlay too, when a restore would try it first; whether its proofs were earlier ones, and why (not).

    One that cannot be prepared is no reason to fail: the restore will step down from it, and says so.
    """
    found = find_overlay(tools, loaded, request)
    if found is None or found.loaded is None or prepared.source is not PackSource.NATIVE:
        return True, found.reason if found is not None else None
    try:
        ready = make_ready(tools, op, found.loaded, request, provider=Provider.NATIVE, reason=found.reason)
    except ColdsnapError as error:
        return True, f"it cannot be prepared: {error.message}"
    return ready.from_record, found.reason
