"""A restored tree for a while: it serves nobody, is no service here, and is gone afterwards whatever happens.

Its listener is never opened, so it needs no port and disturbs nothing but memory. It is tied to this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coldsnap.capsule.driver import RunningUnit
from coldsnap.core.messages import WakeReport
from coldsnap.core.points import reached
from coldsnap.core.request import OperationRequest
from coldsnap.core.selection import Provider
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.freezers import Freezer, freezer_for
from coldsnap.ops.operation import Operation
from coldsnap.ops.prepare import PreparedArtifact, make_ready
from coldsnap.ops.roots import unit_roots
from coldsnap.ops.scratch import scratch_folder
from coldsnap.ops.starting import restored_specs
from coldsnap.ops.steps import accept, live_workers, thaw_all
from coldsnap.ops.tools import Tools
from coldsnap.ops.undo import UndoStack
from coldsnap.ops.workers import LiveWorker

__all__ = ["TemporaryTree", "temporary_tree"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporaryTree:
    """The tree: its memory is filled and its answers were right. ``scratch`` is a private folder that goes with it."""

    prepared: PreparedArtifact
    units: Mapping[str, RunningUnit]
    workers: list[LiveWorker]
    freezer: Freezer
    reports: Mapping[str, WakeReport]
    scratch: Path


@contextmanager
def temporary_tree(
    tools: Tools,
    op: Operation,
    loaded: LoadedArtifact,
    request: OperationRequest,
    *,
    provider: Provider,
    reason: str,
) -> Iterator[TemporaryTree]:
    """Restore ``loaded`` behind gates that were passed, and hold it to its answers.

    Raises what the rooms below raise, AcceptanceFailed included; the tree is ended on every way out.
    """
    prompts, expected = loaded.acceptance()
    prepared = make_ready(tools, op, loaded, request, provider=provider, reason=reason)
    with (
        scratch_folder(tools.state, request.id) as scratch,
        freezer_for(tools, op, loaded.artifact.snapshot_driver.id) as freezer,
        UndoStack() as undo,
    ):
        images = {unit: capsule.images_dir for unit, capsule in prepared.capsules.items()}
        with op.span("thaw"):
            roots = unit_roots(tools, loaded.artifact.launch, request.runtime)
            units = thaw_all(tools, restored_specs(loaded.artifact.launch, scratch, roots=roots), images, undo)
        freezer.thaw(prepared, request.launch, units)
        workers = live_workers(tools, loaded.artifact.launch, units)
        reports = freezer.fill(prepared, request.launch, workers)
        with op.span("accept"):
            accept(tools, workers, prompts, expected)
        reached("materialize.restored")
        yield TemporaryTree(
            prepared=prepared, units=units, workers=workers, freezer=freezer, reports=reports, scratch=scratch
        )
