"""Capture: start an engine, write its weights once, freeze the rest, commit the artifact last.

Nothing of it counts until the artifact descriptor exists: a capture that is killed before leaves at most
a scratch folder (which ``gc`` collects) and perhaps a pack (which is whole, and shared with the next try).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.capsule.hygiene import HygieneReport
from coldsnap.core.artifact import SnapshotArtifact, artifact_bytes, artifact_digest
from coldsnap.core.digest import Digest
from coldsnap.core.messages import Answer, AnswerBody, Answers, Verb
from coldsnap.core.points import reached
from coldsnap.core.request import OperationRequest
from coldsnap.engines.protocol import ResolvedModel
from coldsnap.ops.devices import device_environment
from coldsnap.ops.freezers import Freezer, Running, freezer_for
from coldsnap.ops.freezing import FrozenTree, freeze_tree
from coldsnap.ops.gates import check_capture
from coldsnap.ops.leases import forget, lease
from coldsnap.ops.operation import Operation, Outlet, operation
from coldsnap.ops.planning import choose_engine
from coldsnap.ops.roots import bring_roots, unit_roots
from coldsnap.ops.scratch import scratch_folder
from coldsnap.ops.starting import cold_specs, request_prompts
from coldsnap.ops.steps import launch_all, live_workers
from coldsnap.ops.tools import Tools
from coldsnap.ops.undo import UndoStack
from coldsnap.store.documents import write_new

__all__ = ["CaptureResult", "capture"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureResult:
    """What a capture made. Sizes in bytes; ``seconds`` by phase, with the ``total``.

    ``processes`` are (host PID, start time in ticks) of the tree that was frozen; all of them are gone.
    """

    artifact_path: Path
    artifact: SnapshotArtifact
    artifact_digest: Digest
    answers: tuple[Answer, ...]
    image_bytes: int
    capsule_bytes: int
    pack_bytes: int
    pack_digests: tuple[Digest, ...]
    pack_shared: bool
    residual_bytes: int
    residual_reasons: Mapping[str, int]
    hygiene: Mapping[str, HygieneReport]
    processes: tuple[tuple[int, int], ...]
    seconds: Mapping[str, float]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "artifact": str(self.artifact_path),
            "artifact_digest": str(self.artifact_digest),
            "answers": [answer.model_dump(mode="json") for answer in self.answers],
            "image_bytes": self.image_bytes,
            "capsule_bytes": self.capsule_bytes,
            "pack_bytes": self.pack_bytes,
            "pack_digests": [str(digest) for digest in self.pack_digests],
            "pack_shared": self.pack_shared,
            "residual_bytes": self.residual_bytes,
            "residual_reasons": dict(self.residual_reasons),
            "publishable": all(report.publishable for report in self.hygiene.values()),
            "findings": {
                unit: [f"{one.severity}: {one.subject}: {one.message}" for one in report.findings]
                for unit, report in self.hygiene.items()
            },
            "seconds": dict(self.seconds),
        }


def capture(
    tools: Tools, request: OperationRequest, model: ResolvedModel, *, outlet: Outlet | None = None
) -> CaptureResult:
    """Run a capture request to a committed artifact at ``request.output``.

    Raises Refused (gates, secrets, connections to the outside), ResourceBusy when the output exists, and what the
    engine, CRIU and the store raise. Whatever happens, no process it started is left.
    """
    with tools.state.in_use(), operation(tools, request, outlet=outlet) as op:
        with op.span("gates"):
            check_capture(tools, request)
        reached("capture.admitted")
        with (
            scratch_folder(tools.state, request.id) as scratch,
            freezer_for(tools, op, request.snapshot_driver.id) as freezer,
            UndoStack() as undo,
        ):
            prompts = request_prompts(request)
            running = _start(tools, op, request, model, freezer, scratch, undo)
            reached("capture.loaded")
            with op.span("answer"):
                body = AnswerBody(prompts=prompts)
                first, deadline_s = running.workers[0], tools.deadlines.answer_s
                answers = first.call(Verb.ANSWER, body, Answers, deadline_s=deadline_s).answers
            reached("capture.answered")
            frozen = freeze_tree(tools, op, request, running, freezer=freezer, prompts=prompts, answers=answers)
            with op.span("commit"):
                _commit(tools, Path(request.output), frozen.artifact)
            op.stays = f"{request.output} was committed before that, and stays"
            reached("capture.committed")
        result = _result(op, frozen)
        op.succeed(result.document())
    return result


def _start(
    tools: Tools,
    op: Operation,
    request: OperationRequest,
    model: ResolvedModel,
    freezer: Freezer,
    scratch: Path,
    undo: UndoStack,
) -> Running:
    plugin = choose_engine(tools.engines, request.launch.engine, field="launch.engine")
    logs = tools.services.folder(f"capture-{request.workload.cluster_id or 'engine'}")
    logs.mkdir(mode=0o700, exist_ok=True)
    launch = request.launch
    devices = {} if freezer.template else {unit.id: device_environment(tools, unit) for unit in launch.units}
    bring_roots(tools, op, launch, request.runtime)
    roots = unit_roots(tools, launch, request.runtime, service=request.workload.cluster_id)
    specs = cold_specs(launch, plugin, model, logs, port=None, template=freezer.template, devices=devices, roots=roots)
    with op.span("launch"):
        units = launch_all(tools, specs, undo)
    reached("capture.launched")
    workers = live_workers(tools, launch, units)
    running = Running(launch=launch, units=units, workers=workers, scratch=scratch)
    freezer.start(running)
    return running


def _commit(tools: Tools, output: Path, artifact: SnapshotArtifact) -> None:
    """The lease first, so that no sweep takes what the descriptor names; then the descriptor, exclusively."""
    record = lease(tools, output, artifact)
    try:
        reached("capture.leased")
        write_new(output, artifact_bytes(artifact))
    except BaseException:
        forget(tools, record.artifact)
        raise


def _result(op: Operation, frozen: FrozenTree) -> CaptureResult:
    captured = frozen.captured
    packs = {pack.sha256: pack.bytes for one in captured.exported.values() if (pack := one.pack) is not None}
    reasons: dict[str, int] = {}
    for one in captured.exported.values():
        for reason, num_bytes in one.residual_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + num_bytes
    return CaptureResult(
        artifact_path=Path(captured.request.output),
        artifact=frozen.artifact,
        artifact_digest=artifact_digest(frozen.artifact),
        answers=captured.answers,
        image_bytes=sum(report.bytes for report in captured.dumps.values()),
        capsule_bytes=sum(image.bytes for image in frozen.images.values()),
        pack_bytes=sum(packs.values()),
        pack_digests=tuple(packs),
        pack_shared=all(one.pack_shared for one in captured.exported.values()),
        residual_bytes=sum(one.residual_bytes for one in captured.exported.values()),
        residual_reasons=reasons,
        hygiene=captured.hygiene,
        processes=frozen.processes,
        seconds=op.seconds(),
    )
