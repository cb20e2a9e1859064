"""A process tree without an accelerator: put to sleep and dumped as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from coldsnap.capsule.driver import RunningUnit
from coldsnap.core.launch import Launch
from coldsnap.core.messages import PackSource, WakeReport
from coldsnap.core.points import reached
from coldsnap.ops.freezers.acts import dump_all, inspect_all, put_to_sleep
from coldsnap.ops.freezers.base import Running, Still
from coldsnap.ops.operation import Operation
from coldsnap.ops.prepare import PreparedArtifact, wake_bodies
from coldsnap.ops.steps import wake_all
from coldsnap.ops.tools import Tools
from coldsnap.ops.workers import LiveWorker, wait_until_loaded

__all__ = ["TreeFreezer"]


class TreeFreezer:
    """Implements ``Freezer``."""

    template = False

    def __init__(self, tools: Tools, op: Operation) -> None:
        self._tools = tools
        self._op = op

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is held."""

    def start(self, running: Running) -> None:
        """The engines load by themselves."""
        tools, launch = self._tools, running.launch
        with self._op.span("load"), tools.reporter.phase(f"start {launch.engine} and load {launch.model.id}"):
            wait_until_loaded(running.workers, deadline_s=tools.deadlines.load_s)

    def freeze(self, running: Running) -> Still:
        """Sleep, look, dump."""
        tools, op = self._tools, self._op
        put_to_sleep(tools, op, running.workers)
        inspected = inspect_all(tools, op, running.units)
        dumps = dump_all(tools, op, running.units, running.scratch)
        reached("capture.frozen")
        return Still(dumps=dumps, inspected=inspected)

    def thaw(self, prepared: PreparedArtifact, launch: Launch, units: Mapping[str, RunningUnit]) -> None:
        """They answer at once."""

    def fill(
        self,
        prepared: PreparedArtifact,
        launch: Launch,
        workers: Sequence[LiveWorker],
        *,
        source: PackSource | None = None,
    ) -> dict[str, WakeReport]:
        """Remap and fill."""
        with self._op.span("hydrate"):
            return wake_all(self._tools, workers, wake_bodies(self._tools, prepared, source=source))
