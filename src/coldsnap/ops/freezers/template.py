"""A template: frozen after its imports and before any device knows of it, placed and filled where it is restored.

start     wait until it is a template | look | dump, it runs on | place it here, where it loads
freeze    the trees end; the images are those of the template
fill      place it on this host's devices, where it builds its model and fills it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from coldsnap.capsule.cuda.holders import driver_libraries, template_problems
from coldsnap.capsule.driver import DumpReport, RunningUnit
from coldsnap.core.bindings import HygieneFinding, Severity
from coldsnap.core.launch import Launch
from coldsnap.core.launchdiff import is_placement_variable
from coldsnap.core.messages import PackSource, PlaceBody, Placed, Verb, WakeBody, WakeReport, WorkerState, WorkerStatus
from coldsnap.core.points import reached
from coldsnap.errors import EngineError, InternalError, Problem, Refused
from coldsnap.ops.devices import device_environment
from coldsnap.ops.freezers.acts import dump_all, end_all, inspect_all
from coldsnap.ops.freezers.base import Running, Still
from coldsnap.ops.inspection import Inspected
from coldsnap.ops.operation import Operation
from coldsnap.ops.prepare import PreparedArtifact, wake_bodies
from coldsnap.ops.tools import Tools
from coldsnap.ops.workers import LiveWorker, ask_all, wait_until_loaded

__all__ = ["TemplateFreezer"]


class TemplateFreezer:
    """Implements ``Freezer``. Between ``start`` and ``freeze`` it keeps what was frozen."""

    template = True

    def __init__(self, tools: Tools, op: Operation) -> None:
        self._tools = tools
        self._op = op
        self._dumps: Mapping[str, DumpReport] | None = None
        self._inspected: Mapping[str, Inspected] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """The images are the operation's own to keep or to throw away."""

    def start(self, running: Running) -> None:
        """Freeze the template first, then let the same processes load here."""
        tools, op, launch, units = self._tools, self._op, running.launch, running.units
        self._wait_for_templates(launch, running.workers)
        _refuse_devices(tools, units)
        inspected = inspect_all(tools, op, units)
        self._inspected = {name: _with_libraries(tools, units[name], one) for name, one in inspected.items()}
        self._dumps = dump_all(tools, op, units, running.scratch, leave_running=True)
        reached("capture.template")
        with op.span("load"), tools.reporter.phase(f"load {launch.model.id}"):
            bodies = _place_bodies(tools, launch)
            ask_all(running.workers, Verb.PLACE, bodies, Placed, deadline_s=tools.deadlines.load_s)

    def _wait_for_templates(self, launch: Launch, workers: Sequence[LiveWorker]) -> None:
        tools = self._tools
        with self._op.span("template"), tools.reporter.phase(f"start {launch.engine} as a template"):
            statuses = wait_until_loaded(workers, deadline_s=tools.deadlines.load_s)
        for status in statuses.values():
            _refuse_unless_template(status)

    def freeze(self, running: Running) -> Still:
        """Nothing that happened since the template was frozen is kept."""
        if self._dumps is None:
            raise InternalError(
                "a template is frozen when its capture starts, and this tree was not", cure="report this"
            )
        with self._op.span("freeze"):
            end_all(self._tools, running.units)
        reached("capture.frozen")
        return Still(dumps=self._dumps, inspected=self._inspected)

    def thaw(self, prepared: PreparedArtifact, launch: Launch, units: Mapping[str, RunningUnit]) -> None:
        """A template answers at once."""

    def fill(
        self,
        prepared: PreparedArtifact,
        launch: Launch,
        workers: Sequence[LiveWorker],
        *,
        source: PackSource | None = None,
    ) -> dict[str, WakeReport]:
        """Place every worker on its unit's devices, where it builds its model and fills it."""
        tools = self._tools
        bodies = _place_bodies(tools, launch, wake_bodies(tools, prepared, source=source))
        with self._op.span("hydrate"):
            placed = ask_all(workers, Verb.PLACE, bodies, Placed, deadline_s=tools.deadlines.wake_s)
        return {worker: _report(worker, one) for worker, one in placed.items()}


def _place_bodies(tools: Tools, launch: Launch, wakes: Mapping[str, WakeBody] | None = None) -> dict[str, PlaceBody]:
    """For each worker: its unit's devices and network variables, and what to fill it with (None: load)."""
    places = {
        unit.id: {name: value for name, value in unit.environment.items() if is_placement_variable(name)}
        | device_environment(tools, unit)
        for unit in launch.units
    }
    return {
        worker.id: PlaceBody(environment=places[worker.unit], wake=wakes[worker.id] if wakes is not None else None)
        for worker in launch.execution.workers
    }


def _report(worker: str, placed: Placed) -> WakeReport:
    if placed.wake is None:
        raise EngineError(
            f"worker {worker} was placed without being filled, although it was told what with",
            cure="report this: the engine's integration ignores the pack",
            facts={"worker": worker},
        )
    return placed.wake.model_copy(update={"seconds": {**placed.seconds, **placed.wake.seconds}})


def _refuse_unless_template(status: WorkerStatus) -> None:
    if status.state is not WorkerState.TEMPLATE:
        raise EngineError(
            f"worker {status.worker} is {status.state.value} and no template, so it cannot be frozen as one",
            cure="use an engine that can start as a template, or another snapshot driver",
            facts={"worker": status.worker, "state": status.state.value},
        )


def _refuse_devices(tools: Tools, units: Mapping[str, RunningUnit]) -> None:
    accelerator = tools.accelerator
    problems: list[Problem] = []
    for name, unit in units.items():
        problems.extend(template_problems(name, accelerator.look(unit.pids()), accelerator.device_paths))
    if problems:
        raise Refused("the template touched a device and cannot be captured", problems)


def _with_libraries(tools: Tools, unit: RunningUnit, inspected: Inspected) -> Inspected:
    """A mapped library of the driver binds the capsule to that very file, as any mapped file does; it is said."""
    findings = [
        HygieneFinding(
            kind="driver-library",
            severity=Severity.WARN,
            subject=f"{len(processes)} processes, mapping {path}",
            message="is a library of the NVIDIA driver, so a restore needs that very driver and not a newer one",
            cure="find what links to it, if the capsule is to travel to hosts with other drivers",
        )
        for path, processes in driver_libraries(tools.accelerator.look(unit.pids())).items()
    ]
    return replace(inspected, findings=(*inspected.findings, *findings))
