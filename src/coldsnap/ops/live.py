"""Verbs on services that are there: status, sleep, wake, stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coldsnap.core.ladder import COUNTED, Rung, blame
from coldsnap.core.lifecycle import ServiceState, ServiceVerb, next_state
from coldsnap.core.messages import SleepReport, Verb, WakeReport, WorkerState, WorkerStatus
from coldsnap.core.points import reached
from coldsnap.core.request import OperationRequest
from coldsnap.errors import ColdsnapError, IntegrityError, Problem, UsageError, UserError
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.copies import drop_copies, unused_copies
from coldsnap.ops.freezers.tree import TreeFreezer
from coldsnap.ops.operation import Operation, Outlet, operation
from coldsnap.ops.overlay import request_of, served_overlay
from coldsnap.ops.prepare import prepare_artifact
from coldsnap.ops.quarantine import clear_failures, remember_failure
from coldsnap.ops.rungs import bring_up
from coldsnap.ops.services import ServiceRecord
from coldsnap.ops.steps import attach_units, attach_workers, kill_service, recorded_workers, way_back
from coldsnap.ops.tools import Tools
from coldsnap.ops.workers import LiveWorker, ask_all

__all__ = [
    "ServiceStatus",
    "artifact_of",
    "service_status",
    "service_statuses",
    "sleep_service",
    "stop_service",
    "wake_service",
]

_STATUS_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStatus:
    """A service as it is now: its record, whether its processes live, and what its workers say.

    ``state`` is ``lost`` when the record says that it runs, or is coming, and its processes, or those of the operation
    that brings it, are gone. ``problem`` says so then, with the way back.
    """

    record: ServiceRecord
    state: str
    pids: tuple[int, ...]
    workers: Mapping[str, WorkerStatus | str]
    problem: Problem | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        record = self.record
        return {
            "name": record.name,
            "state": self.state,
            "engine": record.engine,
            "host": record.host,
            "port": record.port,
            "source": record.source,
            "rung": record.rung,
            "reasons": list(record.reasons),
            "problem": self.problem.document() if self.problem is not None else None,
            "artifact": record.artifact_path,
            "artifact_digest": str(record.artifact_digest) if record.artifact_digest else None,
            "operation_id": record.operation_id,
            "pids": list(self.pids),
            "workers": {
                worker: one if isinstance(one, str) else one.model_dump(mode="json")
                for worker, one in self.workers.items()
            },
        }


def service_status(tools: Tools, name: str) -> ServiceStatus:
    """Look at one service. Never changes anything. Raises UserError for an unknown name."""
    record = tools.services.must_load(name)
    problem = None
    if not record.units:
        # Whoever starts it is at work, or was killed. In this order, so that one that just ended is not taken for dead.
        working = tools.services.is_locked(name)
        if tools.services.must_load(name) != record:
            return service_status(tools, name)
        if not working:
            message = f"the operation {record.operation_id} (process {record.controller_pid}) ended before it was done"
            problem = Problem(field=name, message=message, value=None, cure=way_back(record))
    units = attach_units(tools, record)
    if missing := [unit.unit for unit in record.units if unit.unit not in units]:
        message = f"its process is gone, of {', '.join(missing)}"
        problem = Problem(field=name, message=message, value=None, cure=way_back(record))
    workers: dict[str, WorkerStatus | str] = {}
    if units and problem is None:
        for live in recorded_workers(tools, record, units):
            try:
                workers[live.worker] = live.client.status(deadline_s=_STATUS_S)
            except ColdsnapError as error:
                workers[live.worker] = f"does not answer: {error.message}"
    return ServiceStatus(
        record=record,
        state=record.state if problem is None else "lost",
        pids=tuple(pid for unit in units.values() for pid in unit.pids()),
        workers=workers,
        problem=problem,
    )


def service_statuses(tools: Tools) -> tuple[tuple[ServiceStatus, ...], Mapping[str, ColdsnapError]]:
    """Every service of this machine, and for those whose record cannot be read the reason, by name."""
    found, unknown = [], {}
    for name in tools.services.names():
        try:
            found.append(service_status(tools, name))
        except ColdsnapError as error:
            unknown[name] = error
    return tuple(found), unknown


def artifact_of(record: ServiceRecord) -> LoadedArtifact:
    """The artifact a service was restored from. Raises UserError, IntegrityError when the file changed since."""
    if record.artifact_path is None:
        raise UserError(
            f"service {record.name!r} was started cold and has no artifact to sleep to or wake from",
            cure="restore its artifact again, and see why the last restore failed",
            facts={"name": record.name, "reasons": list(record.reasons)},
        )
    loaded = load_artifact(Path(record.artifact_path))
    if loaded.digest != record.artifact_digest:
        raise IntegrityError(
            f"{loaded.path} is not the artifact that {record.name!r} was restored from",
            cure="put the committed descriptor back, or restore anew",
            facts={"expected": str(record.artifact_digest), "found": str(loaded.digest)},
        )
    return loaded


def sleep_service(
    tools: Tools, request: OperationRequest, *, outlet: Outlet | None = None
) -> Mapping[str, SleepReport]:
    """Close the listener, finish requests in flight, give the weights' memory back. The process stays."""
    name = request.workload.cluster_id
    with tools.services.lock(name), operation(tools, request, outlet=outlet) as op:
        record = tools.services.must_load(name)
        state = _next_state(tools, record, ServiceVerb.SLEEP)
        artifact_of(record)  # what nobody could wake again is not put to sleep
        workers = attach_workers(tools, record)
        reached("sleep.asked")
        with op.span("sleep"):
            # Those that sleep already were put to sleep by an operation that ended before it could record it.
            awake = [live for live in workers if _state(live) is not WorkerState.ASLEEP]
            reports = ask_all(awake, Verb.SLEEP, None, SleepReport, deadline_s=tools.deadlines.sleep_s)
        reached("sleep.done")
        tools.services.save(record.model_copy(update={"state": state.value}))
        op.stays = f"service {name} was asleep before that, and stays so"
        reached("sleep.recorded")
        op.succeed({"name": name, "workers": {w: r.model_dump(mode="json") for w, r in reports.items()}})
    return reports


def wake_service(
    tools: Tools, request: OperationRequest, *, outlet: Outlet | None = None
) -> tuple[Mapping[str, WakeReport], Mapping[str, float]]:
    """Fill a sleeping or warm service's memory, compare its answers, serve again.

    A wake that fails leaves the service as it was, without its memory; one whose answers differ is stopped.
    """
    name = request.workload.cluster_id
    with tools.services.lock(name), tools.state.in_use(), operation(tools, request, outlet=outlet) as op:
        record = tools.services.must_load(name)
        state = _next_state(tools, record, ServiceVerb.WAKE)
        loaded, wanted = artifact_of(record), request
        if record.overlay is not None:
            loaded = served_overlay(tools, loaded.digest, record.overlay)
            wanted = request_of(loaded, request)
        workers = attach_workers(tools, record)
        # A wake that ended before it was recorded left memory that nobody has asked anything: begin again without it.
        awake = [live for live in workers if _state(live) in (WorkerState.IDLE, WorkerState.SERVING)]
        ask_all(awake, Verb.SLEEP, None, SleepReport, deadline_s=tools.deadlines.sleep_s)
        assert record.port is not None  # noqa: S101 - a restored service has one
        prepared = prepare_artifact(
            tools, op, loaded, wanted, address=(record.host, record.port), ignore_quarantine=True
        )
        reached("wake.prepared")
        try:
            # Whatever froze it, it is a live process now, and its memory comes back in place.
            fill = partial(TreeFreezer(tools, op).fill, prepared, request.launch, workers)
            reports = bring_up(tools, op, prepared, workers, fill, host=record.host, port=record.port)
        except ColdsnapError as error:
            if _has_memory(workers):
                kill_service(tools, record)
                tools.services.forget(name)
                error.add_note(f"stopped service {name}, which must not serve what it has in memory")
            _count(tools, op, record, loaded, error)
            raise
        reached("wake.done")
        source = prepared.source.value
        changes = {"source": source, "reasons": (prepared.reason,), "rung": record.rung if record.overlay else source}
        tools.services.save(record.model_copy(update={"state": state.value, **changes}))
        clear_failures(tools, loaded.digest)
        op.stays = f"service {name} was ready before that, and stays"
        reached("wake.recorded")
        op.succeed({"name": name, "workers": {w: r.model_dump(mode="json") for w, r in reports.items()}})
    return reports, op.seconds()


def stop_service(tools: Tools, name: str) -> int:
    """End a service and forget it; returns how many units were running. Raises UserError for an unknown name."""
    tools.services.must_load(name)  # a lock would make a folder for it
    with tools.services.lock(name):
        record = tools.services.must_load(name)
        ended = kill_service(tools, record)
        reached("stop.killed")
        tools.services.forget(name)
        reached("stop.forgotten")
    drop_copies(tools, unused_copies(tools))
    return ended


def _next_state(tools: Tools, record: ServiceRecord, verb: ServiceVerb) -> ServiceState:
    """As the table says. Whose processes are gone is not in the state that its record says: EngineError says that."""
    try:
        return next_state(ServiceState(record.state), verb)
    except UsageError:
        attach_workers(tools, record)
        raise


def _count(tools: Tools, op: Operation, record: ServiceRecord, loaded: LoadedArtifact, error: ColdsnapError) -> None:
    """A tree that cannot be filled, or answers wrongly then, counts like one that does not come back."""
    rung = Rung.OVERLAY if record.overlay is not None else Rung(record.rung or Rung.NATIVE)
    if blame(error, rung=rung, phase=op.phase) not in COUNTED:
        return
    try:
        remember_failure(tools, loaded.digest, loaded.path, operation_id=op.request.id, rung=rung, error=error)
    except ColdsnapError as failure:
        error.add_note(f"the failure could not be recorded: {failure.message}")


def _has_memory(workers: list[LiveWorker]) -> bool:
    """Whether any worker came out of sleep (or cannot say), and so might serve."""
    return any(_state(live) is not WorkerState.ASLEEP for live in workers)


def _state(live: LiveWorker) -> WorkerState | None:
    """What a worker says it is; None when it cannot say."""
    try:
        return live.client.status(deadline_s=_STATUS_S).state
    except ColdsnapError:
        return None
