"""The steps that restore, warm, wake and capture share, each for all units or workers at once."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from coldsnap.capsule.driver import RunningUnit, UnitRecord, UnitSpec
from coldsnap.core.messages import (
    Answer,
    AnswerBody,
    Answers,
    Prompt,
    ServeBody,
    Serving,
    Verb,
    WakeBody,
    WakeReport,
    worker_socket_name,
)
from coldsnap.core.parsing import at, check_document
from coldsnap.core.request import Launch
from coldsnap.errors import EngineError, HostError, InvalidDocument
from coldsnap.hosts import together
from coldsnap.ops.acceptance import check_answers
from coldsnap.ops.services import ServiceRecord, ServiceUnit, ServiceWorker, damaged_record
from coldsnap.ops.tools import Tools
from coldsnap.ops.undo import UndoStack
from coldsnap.ops.workers import LiveWorker, ask_all
from coldsnap.store.staging import remove_leftovers

__all__ = [
    "accept",
    "attach_units",
    "kill_service",
    "launch_all",
    "live_workers",
    "open_listeners",
    "recorded_workers",
    "service_units",
    "service_workers",
    "thaw_all",
    "wake_all",
    "way_back",
]


def launch_all(tools: Tools, specs: Mapping[str, UnitSpec], undo: UndoStack) -> dict[str, RunningUnit]:
    """Start every unit, tied to this process until it is released; all or none."""

    def start(spec: UnitSpec, cancel: threading.Event) -> RunningUnit:
        unit = tools.units.launch(spec, deadline_s=tools.deadlines.thaw_s, tied=True)
        undo.push(f"stopped unit {spec.unit}", partial(unit.kill, tools.deadlines.kill_s))
        return unit

    hosts = tools.place(tuple(specs)).hosts
    return together(
        "launch",
        {name: (hosts[name], partial(start, spec)) for name, spec in specs.items()},
        deadline_s=tools.deadlines.thaw_s,
    )


def thaw_all(
    tools: Tools, specs: Mapping[str, UnitSpec], images: Mapping[str, Path], undo: UndoStack
) -> dict[str, RunningUnit]:
    """Bring every frozen unit back, tied to this process until it is released; a barrier, all or none."""

    def thaw(spec: UnitSpec, cancel: threading.Event) -> RunningUnit:
        unit = tools.units.restore(spec, images[spec.unit], deadline_s=tools.deadlines.thaw_s, tied=True)
        undo.push(f"stopped restored unit {spec.unit}", partial(unit.kill, tools.deadlines.kill_s))
        return unit

    hosts = tools.place(tuple(specs)).hosts
    return together(
        "thaw",
        {name: (hosts[name], partial(thaw, spec)) for name, spec in specs.items()},
        deadline_s=tools.deadlines.thaw_s + 10,
    )


def live_workers(tools: Tools, launch: Launch, units: Mapping[str, RunningUnit]) -> list[LiveWorker]:
    """A client for each worker of the launch, in the launch's order."""
    hosts = tools.place(tuple(units)).hosts
    return [
        LiveWorker(worker=worker.id, unit=units[worker.unit], host=hosts[worker.unit])
        for worker in launch.execution.workers
    ]


def wake_all(tools: Tools, workers: Sequence[LiveWorker], bodies: Mapping[str, WakeBody]) -> dict[str, WakeReport]:
    """Remap and fill the memory of every worker; a barrier."""
    return ask_all(workers, Verb.WAKE, bodies, WakeReport, deadline_s=tools.deadlines.wake_s)


def accept(tools: Tools, workers: Sequence[LiveWorker], prompts: Sequence[Prompt], expected: Sequence[Answer]) -> float:
    """Ask the first worker of the launch every captured prompt and compare; returns seconds to the first token.

    Raises AcceptanceFailed. The first token is seen by this process, which is outside the engine's tree.
    """
    given: list[Answer] = []
    first_token_at = 0.0
    for prompt in prompts:
        reply = workers[0].call(
            Verb.ANSWER, AnswerBody(prompts=(prompt,)), Answers, deadline_s=tools.deadlines.answer_s
        )
        first_token_at = first_token_at or time.monotonic()
        given.extend(reply.answers)
    check_answers(prompts, expected, given)
    return first_token_at


def open_listeners(tools: Tools, workers: Sequence[LiveWorker], *, host: str, port: int) -> Serving:
    """Let the first worker of the launch serve HTTP."""
    return workers[0].call(Verb.SERVE, ServeBody(host=host, port=port), Serving, deadline_s=tools.deadlines.serve_s)


def service_units(units: Mapping[str, RunningUnit]) -> tuple[ServiceUnit, ...]:
    """The units as a service record keeps them."""
    return tuple(ServiceUnit(unit=name, record=unit.record().model_dump(mode="json")) for name, unit in units.items())


def service_workers(launch: Launch) -> tuple[ServiceWorker, ...]:
    """The workers as a service record keeps them."""
    return tuple(
        ServiceWorker(worker=worker.id, unit=worker.unit, socket=worker_socket_name(worker.id))
        for worker in launch.execution.workers
    )


def attach_units(tools: Tools, record: ServiceRecord) -> dict[str, RunningUnit]:
    """The units of a service that still run. Raises InvalidDocument when its record does not say which they are."""
    found = {}
    for name, unit_record in _unit_records(tools, record):
        running = tools.units.attach(unit_record)
        if running is not None and running.alive():
            found[name] = running
    return found


def _unit_records(tools: Tools, record: ServiceRecord) -> Iterator[tuple[str, UnitRecord]]:
    for index, unit in enumerate(record.units):
        try:
            yield unit.unit, check_document(UnitRecord, unit.record, subject=unit.unit)
        except InvalidDocument as error:
            problems = [at(f"units[{index}].record", one) for one in error.problems]
            raise damaged_record(tools.services.folder(record.name) / "service.json", problems) from error


def attach_workers(tools: Tools, record: ServiceRecord) -> list[LiveWorker]:
    """Clients for the workers of a running service. Raises EngineError when a unit of it is gone."""
    units = attach_units(tools, record)
    missing = [unit.unit for unit in record.units if unit.unit not in units]
    if missing or not units:
        raise EngineError(
            f"service {record.name!r} has no running process for {', '.join(missing) or 'any unit'} any more",
            cure=way_back(record),
            facts={"name": record.name, "missing": missing},
        )
    return recorded_workers(tools, record, units)


def recorded_workers(tools: Tools, record: ServiceRecord, units: Mapping[str, RunningUnit]) -> list[LiveWorker]:
    """Clients for the workers of a service, all of whose ``units`` were found running."""
    hosts = tools.place(tuple(units)).hosts
    return [
        LiveWorker(worker=worker.worker, unit=units[worker.unit], host=hosts[worker.unit]) for worker in record.workers
    ]


def way_back(record: ServiceRecord) -> str:
    """How to bring back a service of which only the record is left."""
    again = "restore its artifact again"
    if record.artifact_path is not None:
        port = f" --port {record.port}" if record.port is not None else ""
        again = f"`coldsnap restore {shlex.quote(record.artifact_path)} --name {record.name}{port}` brings it back"
    return f"{again}; `coldsnap stop {record.name}` only forgets it"


def kill_service(tools: Tools, record: ServiceRecord) -> int:
    """End every unit of a service that still runs; returns how many were ended. Idempotent."""
    units = attach_units(tools, record)
    for unit in units.values():
        unit.kill(tools.deadlines.kill_s)
    for name, unit_record in _unit_records(tools, record):
        if name not in units:
            try:
                tools.units.clear(unit_record)
            except HostError as error:  # its runtime may be gone for good, and the service must end all the same
                tools.reporter.warn(f"what unit {name} left was not removed: {error.message}")
    remove_leftovers(tools.state.staging)  # a worker may have been writing its pack; what others write is locked
    return len(units)
