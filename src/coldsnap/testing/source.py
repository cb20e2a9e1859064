"""A source engine in the middle of its capture, to see what a freeze that fails leaves of it.

    with running_source(tools, planned) as source:
        with pytest.raises(CudaError):
            source.freeze()
        assert source.serve_again(prompts) == expected

A capture ends the engine that it started, whatever happens. This one does not, so that the promise of the freezers
can be tried: after a failure every process runs, and its worker comes back from what it exported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coldsnap.capsule.driver import DumpReport, RunningUnit, UnitDriver, UnitRecord, UnitSpec
from coldsnap.core.messages import (
    Answer,
    AnswerBody,
    Answers,
    Exported,
    PackSource,
    Prompt,
    Verb,
    WakeBody,
    WakeReport,
    WorkerState,
)
from coldsnap.ops.devices import device_environment
from coldsnap.ops.freezers import Freezer, Running, Still, freezer_for
from coldsnap.ops.freezing import export_all
from coldsnap.ops.operation import Operation, operation
from coldsnap.ops.planning import PlannedCapture, choose_engine
from coldsnap.ops.scratch import scratch_folder
from coldsnap.ops.starting import cold_specs
from coldsnap.ops.steps import launch_all, live_workers
from coldsnap.ops.tools import Tools
from coldsnap.ops.undo import UndoStack
from coldsnap.ops.workers import LiveWorker, ask_all

__all__ = ["FailingUnits", "Source", "running_source"]

_STATUS_S = 10.0


@dataclass(kw_only=True)
class Source:
    """Engines that have loaded, and what was exported of them."""

    tools: Tools
    op: Operation
    planned: PlannedCapture
    freezer: Freezer
    units: Mapping[str, RunningUnit]
    workers: Sequence[LiveWorker]
    scratch: Path
    exported: dict[str, Exported] = field(default_factory=dict)

    @property
    def running(self) -> Running:
        """It as a freezer takes it."""
        launch = self.planned.request.launch
        return Running(launch=launch, units=self.units, workers=self.workers, scratch=self.scratch)

    def freeze(self) -> Still:
        """Export (the first time) and freeze; the processes are gone when this returns, and there when it raises."""
        if not self.exported:
            self.exported = export_all(self.tools, self.op, self.workers, self.planned.request.id, self.scratch)
        return self.freezer.freeze(self.running)

    def serve_again(self, prompts: Sequence[Prompt]) -> tuple[Answer, ...]:
        """Wake the workers that sleep from what they exported, and ask the first one."""
        asleep = [live for live in self.workers if live.client.status(deadline_s=_STATUS_S).state is WorkerState.ASLEEP]
        bodies = {live.worker: self._wake_body(live.worker) for live in asleep}
        ask_all(asleep, Verb.WAKE, bodies, WakeReport, deadline_s=self.tools.deadlines.wake_s)
        body = AnswerBody(prompts=tuple(prompts))
        return self.workers[0].call(Verb.ANSWER, body, Answers, deadline_s=self.tools.deadlines.answer_s).answers

    def _wake_body(self, worker: str) -> WakeBody:
        exported = self.exported[worker]
        pack, residual = exported.pack, exported.residual
        return WakeBody(
            source=PackSource.NATIVE,
            native_manifest=exported.native_manifest.path,
            recovery_manifest=exported.recovery_manifest.path,
            pack=pack.path if pack is not None else None,
            pack_sha256=pack.sha256 if pack is not None else None,
            pack_bytes=pack.bytes if pack is not None else None,
            residual=residual.path if residual is not None else None,
            residual_sha256=residual.sha256 if residual is not None else None,
            state_root=str(self.tools.state.path),
        )


@contextmanager
def running_source(tools: Tools, planned: PlannedCapture) -> Iterator[Source]:
    """The source of a capture, loaded and idle; whatever runs of it at the end of the block is ended."""
    request = planned.request
    launch = request.launch
    plugin = choose_engine(tools.engines, launch.engine)
    with (
        operation(tools, request) as op,
        scratch_folder(tools.state, request.id) as scratch,
        freezer_for(tools, op, request.snapshot_driver.id) as freezer,
        UndoStack() as undo,
    ):
        logs = tools.services.folder(f"source-{request.id}")
        logs.mkdir(mode=0o700, exist_ok=True)
        devices = {} if freezer.template else {unit.id: device_environment(tools, unit) for unit in launch.units}
        specs = cold_specs(launch, plugin, planned.model, logs, template=freezer.template, devices=devices)
        units = launch_all(tools, specs, undo)
        workers = live_workers(tools, launch, units)
        source = Source(
            tools=tools, op=op, planned=planned, freezer=freezer, units=units, workers=workers, scratch=scratch
        )
        freezer.start(source.running)
        yield source


class FailingUnits:
    """A ``UnitDriver`` whose next dump raises ``dump``; otherwise it is ``units``."""

    def __init__(self, units: UnitDriver, *, dump: BaseException) -> None:
        self.units = units
        self.dump_error: BaseException | None = dump

    def launch(self, spec: UnitSpec, *, deadline_s: float, tied: bool = False) -> RunningUnit:
        """As the other one."""
        return self.units.launch(spec, deadline_s=deadline_s, tied=tied)

    def dump(
        self, unit: RunningUnit, images_dir: Path, *, deadline_s: float, leave_running: bool = False
    ) -> DumpReport:
        """Raises once."""
        error, self.dump_error = self.dump_error, None
        if error is not None:
            raise error
        return self.units.dump(unit, images_dir, deadline_s=deadline_s, leave_running=leave_running)

    def restore(self, spec: UnitSpec, images_dir: Path, *, deadline_s: float, tied: bool = False) -> RunningUnit:
        """As the other one."""
        return self.units.restore(spec, images_dir, deadline_s=deadline_s, tied=tied)

    def attach(self, record: UnitRecord) -> RunningUnit | None:
        """As the other one."""
        return self.units.attach(record)

    def clear(self, record: UnitRecord) -> None:
        """As the other one."""
        self.units.clear(record)
