"""From engines that have answered to capsules and an artifact in memory: what a capture and an overlay capture share.

Export, let the snapshot driver's freezer freeze the trees, look for secrets, write the capsules. Nothing is committed
here: the caller decides what becomes of the artifact. The trees are gone afterwards, and whatever raises leaves them to
the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coldsnap.capsule.driver import DumpReport
from coldsnap.capsule.hygiene import HygieneReport
from coldsnap.capsule.image import CapsuleImage
from coldsnap.core.artifact import SnapshotArtifact
from coldsnap.core.messages import Answer, ExportBody, Exported, Prompt, Verb
from coldsnap.core.points import reached
from coldsnap.core.request import OperationRequest
from coldsnap.ops.assembly import Captured, assemble, commit_capsule
from coldsnap.ops.devices import unit_facts
from coldsnap.ops.freezers import Freezer, Running
from coldsnap.ops.inspection import Inspected, hashing_ahead, refuse_unless_clean, scan_unit
from coldsnap.ops.operation import Operation
from coldsnap.ops.seeds import seed_files
from coldsnap.ops.tools import Tools
from coldsnap.ops.workers import LiveWorker, ask_all

__all__ = ["FrozenTree", "export_all", "freeze_tree"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTree:
    """What was frozen. ``processes`` are (host PID, start time in ticks) of the tree; all of them are gone."""

    captured: Captured
    images: Mapping[str, CapsuleImage]
    artifact: SnapshotArtifact
    processes: tuple[tuple[int, int], ...]


def freeze_tree(
    tools: Tools,
    op: Operation,
    request: OperationRequest,
    running: Running,
    *,
    freezer: Freezer,
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    check_export: Callable[[Mapping[str, Exported]], None] = lambda exported: None,
) -> FrozenTree:
    """Freeze idle engines that gave ``answers`` to ``prompts``, as the capture ``request``.

    ``check_export`` may raise once the packs are known and before anything else is done. Raises Refused (secrets,
    connections to the outside) and what the engine, the freezer and the store raise.
    """
    scratch = running.scratch
    with hashing_ahead(tools, running.units):
        exported = export_all(tools, op, running.workers, request.id, scratch)
    check_export(exported)
    reached("capture.exported")
    still = freezer.freeze(running)
    inspected, dumps = still.inspected, still.dumps
    hygiene = _scan(tools, op, inspected, dumps, request)
    reached("capture.scanned")
    captured = Captured(
        request=request,
        prompts=tuple(prompts),
        answers=tuple(answers),
        exported=exported,
        dumps=dumps,
        hygiene=hygiene,
        host_files={unit: one.host_files for unit, one in inspected.items()},
        facts={unit.id: unit_facts(tools, unit) for unit in request.launch.units},
        cuda=still.cuda,
        seeds={unit: tuple(seed_files(request, unit)) for unit in running.units},
    )
    with op.span("capsule"):
        images = {unit: commit_capsule(tools, captured, unit, scratch) for unit in running.units}
    artifact = assemble(captured, images)
    reached("capture.assembled")
    processes = tuple(process for one in inspected.values() for process in one.processes)
    return FrozenTree(captured=captured, images=images, artifact=artifact, processes=processes)


def export_all(
    tools: Tools, op: Operation, workers: Sequence[LiveWorker], capture_id: str, scratch: Path
) -> dict[str, Exported]:
    """Every worker writes its pack into the store and the rest of its files below ``scratch``."""
    bodies = {}
    for live in workers:
        folder = scratch / f"worker-{live.worker}"
        folder.mkdir(mode=0o700)
        bodies[live.worker] = ExportBody(state_root=str(tools.state.path), out_dir=str(folder), capture_id=capture_id)
    with op.span("export"), tools.reporter.phase("write pack and residual"):
        return ask_all(workers, Verb.EXPORT, bodies, Exported, deadline_s=tools.deadlines.export_s)


def _scan(
    tools: Tools,
    op: Operation,
    inspected: Mapping[str, Inspected],
    dumps: Mapping[str, DumpReport],
    request: OperationRequest,
) -> dict[str, HygieneReport]:
    allow = request.extension.allow_secrets if request.extension is not None else ()
    with op.span("scan"), tools.reporter.phase("look for secrets in the image"):
        reports = {name: scan_unit(inspected[name], dumps[name], allow=allow) for name in dumps}
        refuse_unless_clean(reports)
    for report in reports.values():
        for name in report.allowed_secrets:
            tools.reporter.warn(f"secret {name} is in the image, as the recipe allows; the capsule is not publishable")
    return reports
