"""The page of a freezer: the four moments where snapshot drivers differ. The rest of ``ops`` is the same for all.

capture   start   launched units become loaded, idle workers
          freeze  idle workers, exported, become images; the trees are gone
restore   thaw    thawed trees become workers that can be talked to
          fill    those workers get their memory and become idle
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from coldsnap.capsule.driver import DumpReport, RunningUnit
from coldsnap.core.bindings import CudaStateBinding
from coldsnap.core.launch import Launch
from coldsnap.core.messages import PackSource, WakeReport
from coldsnap.ops.inspection import Inspected
from coldsnap.ops.prepare import PreparedArtifact
from coldsnap.ops.workers import LiveWorker

__all__ = ["Freezer", "Running", "Still"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """What a capture is of: a launch, its units and workers by its order, and a private folder of the operation."""

    launch: Launch
    units: Mapping[str, RunningUnit]
    workers: Sequence[LiveWorker]
    scratch: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Still:
    """What a freeze made, by unit: the images, what the tree held just before, and who had CUDA state, if any did."""

    dumps: Mapping[str, DumpReport]
    inspected: Mapping[str, Inspected]
    cuda: Mapping[str, CudaStateBinding] = field(default_factory=dict)


class Freezer(Protocol):
    """One snapshot driver at work in one operation, from ``__enter__`` to ``__exit__``, where it lets everything go.

    Entering it takes no time: what it needs is got ready beside the operation's other work.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...

    @property
    def template(self) -> bool:
        """Whether engine processes are started as templates."""
        ...

    def start(self, running: Running) -> None:
        """Wait until every worker has its model and is idle. Raises what the engine raises."""
        ...

    def freeze(self, running: Running) -> Still:
        """Freeze the trees of exported, idle workers and end them.

        Raises Refused with every reason why a tree cannot be captured, CudaError, HelperLost, CriuError,
        DeadlineExceeded. Then every process is there and runs, its worker asleep (or idle): a ``wake`` from what was
        exported brings it back. Raises EngineError when a process ended by itself.
        """
        ...

    def thaw(self, prepared: PreparedArtifact, launch: Launch, units: Mapping[str, RunningUnit]) -> None:
        """Bring restored trees to the point where their workers answer. The caller ends them when this raises.

        Raises EngineError when a process ended by itself.

        ``launch``: where they run now.
        """
        ...

    def fill(
        self,
        prepared: PreparedArtifact,
        launch: Launch,
        workers: Sequence[LiveWorker],
        *,
        source: PackSource | None = None,
    ) -> dict[str, WakeReport]:
        """Give the workers their memory. ``source`` overrides the decided one."""
        ...
