"""What a prepare and a restore of an artifact would move here, and how long that takes by rates measured here.

Nothing of the artifact is read beyond its descriptor and the sizes and times of files. Rates come from the receipts
of this boot in the state root, else from a calibration (``calibration.py``), which takes a second and is
kept. How long a thaw takes only receipts can tell; before the first restore, the freeze of a capture stands in for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coldsnap.capsule.prepared import PROCESS_FOLDER, is_prepared
from coldsnap.capsule.roles import RESIDUAL
from coldsnap.core.bindings import cuda_states_of, worker_exports_of
from coldsnap.core.forecast import (
    WAITS,
    Forecast,
    Phase,
    Rate,
    Sample,
    Step,
    Work,
    choose_rate,
    choose_wait,
    forecast,
    samples_of,
    waits_of,
)
from coldsnap.core.receipt import MAX_RECEIPT_BYTES, Receipt, parse_receipt
from coldsnap.core.request import OperationRequest
from coldsnap.core.selection import Provider
from coldsnap.errors import ColdsnapError
from coldsnap.hydrate.choose import TransferPath, choose_path, file_facts
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.calibration import Calibration, calibrate, known_calibration
from coldsnap.ops.providers import decide_provider
from coldsnap.ops.tools import Tools
from coldsnap.store.admission import is_proved
from coldsnap.store.documents import read_private

__all__ = ["Prediction", "predict"]

_MAX_RECEIPTS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """``source`` is where model bytes would come from, with the reason; ``notes`` are what the reader should know."""

    source: str
    reason: str
    forecast: Forecast
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As JSON. ``seconds`` of a phase is a lower bound unless ``whole``."""
        return {
            "source": self.source,
            "reason": self.reason,
            "phases": {
                phase.value: {
                    "bytes": self.forecast.bytes(phase),
                    "seconds": self.forecast.seconds(phase),
                    "whole": self.forecast.is_whole(phase),
                }
                for phase in Phase
            },
            "steps": [
                {
                    "phase": one.phase.value,
                    "step": one.name,
                    "bytes": one.bytes,
                    "bytes_per_s": one.bytes_per_s,
                    "seconds": one.seconds,
                    "why": one.why,
                    "source": one.source,
                }
                for one in self.forecast.steps
            ],
            "notes": list(self.notes),
        }


def predict(
    tools: Tools, loaded: LoadedArtifact, request: OperationRequest, *, measure: bool | None = None
) -> Prediction:
    """Predict what ``prepare`` and then ``restore`` of this request would take here.

    ``measure`` True calibrates anew, False never, None when a rate is needed that nothing else knows. Raises Refused
    when no weight provider can be chosen, OutOfSpace or HostError from a calibration.
    """
    decision = decide_provider(tools, loaded, request)
    work = [*_prepare_work(tools, loaded, decision.provider), *_restore_work(tools, loaded, decision.provider)]
    receipts, notes = _receipts(tools)
    samples = [sample for receipt in receipts for sample in samples_of(receipt)]
    waits = [wait for receipt in receipts for wait in waits_of(receipt)]
    rates = _rates(tools, loaded, work, samples, measure=measure)
    artifact = str(loaded.digest)
    keeps_state = bool(cuda_states_of(loaded.artifact.runtime.bindings))
    phases = [name for name in WAITS if name != "resume" or keeps_state]
    steps = forecast(work, rates, [(name, choose_wait(name, waits, artifact=artifact)) for name in phases])
    return Prediction(source=decision.provider.value, reason=decision.reason, forecast=steps, notes=tuple(notes))


def _prepare_work(tools: Tools, loaded: LoadedArtifact, provider: Provider) -> Iterator[Work]:
    missing = {}
    for unit in loaded.artifact.launch.units:
        expected = loaded.expected_files(unit.id)
        if not is_prepared(tools.state, loaded.capsule_digest(unit.id), expected):
            missing[unit.id] = sum(size for size, _ in expected.values())
    why = f"not prepared: {', '.join(list(missing)[:4])}" if missing else "all capsules are prepared"
    yield Work(phase=Phase.PREPARE, step=Step.UNPACK, bytes=sum(missing.values()), why=why)
    if provider is Provider.NATIVE:
        packs = {pack.sha256: pack.bytes for pack in loaded.packs().values()}
        unproved = {
            digest: size for digest, size in packs.items() if not is_proved(tools.store.path(digest), digest, size)
        }
        why = f"{len(unproved)} of {len(packs)} packs have no proof yet"
        yield Work(phase=Phase.PREPARE, step=Step.ADMIT, bytes=sum(unproved.values()), why=why)


def _restore_work(tools: Tools, loaded: LoadedArtifact, provider: Provider) -> Iterator[Work]:
    images = sum(
        size
        for unit in loaded.artifact.launch.units
        for path, (size, _) in loaded.expected_files(unit.id).items()
        if path.startswith(f"{PROCESS_FOLDER}/")
    )
    yield Work(phase=Phase.RESTORE, step=Step.THAW, bytes=images, why="process images")
    memory = _memory_bytes(loaded)
    if provider is Provider.RECOVERY:
        why = "model bytes and residual, each extent proved as it arrives"
        yield Work(phase=Phase.RESTORE, step=Step.RECOVER, bytes=memory, why=why)
        return
    path, reason = _transfer_path(tools, loaded)
    step = Step.HYDRATE_DISK if path is TransferPath.DIRECT else Step.HYDRATE_CACHED
    yield Work(phase=Phase.RESTORE, step=step, bytes=memory, why=f"model bytes and residual; {reason}")


def _memory_bytes(loaded: LoadedArtifact) -> int:
    """Model bytes and residual of all workers: as their capture counted them, else the sizes of the files."""
    exported = {
        one.worker: one.model_bytes + one.residual_bytes for one in worker_exports_of(loaded.artifact.runtime.bindings)
    }
    total = 0
    for worker in loaded.artifact.launch.execution.workers:
        files = (loaded.packs().get(worker.id), loaded.worker_object(worker.id, RESIDUAL))
        total += exported.get(worker.id) or sum(file.bytes for file in files if file is not None)
    return total


def _transfer_path(tools: Tools, loaded: LoadedArtifact) -> tuple[TransferPath, str]:
    """How the largest pack would be read now, by the rule that a restore follows."""
    largest = max(loaded.packs().values(), key=lambda pack: pack.bytes, default=None)
    if largest is None:
        return TransferPath.BUFFERED, "there is no pack"
    try:
        fd = os.open(tools.store.path(largest.sha256), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return TransferPath.BUFFERED, f"the pack cannot be looked at: {error.strerror}"
    try:
        choice = choose_path(file_facts(fd, [(0, largest.bytes)], wanted_bytes=largest.bytes))
    finally:
        os.close(fd)
    return choice.path, choice.reason


def _rates(
    tools: Tools, loaded: LoadedArtifact, work: list[Work], samples: list[Sample], *, measure: bool | None
) -> dict[Step, Rate]:
    wanted = {one.step: one.bytes for one in work if one.bytes}
    artifact = str(loaded.digest)
    found = {step: choose_rate(step, samples, artifact=artifact, wanted_bytes=size) for step, size in wanted.items()}
    if Step.THAW in wanted and found[Step.THAW] is None:
        frozen = choose_rate(Step.FREEZE, samples, artifact=artifact, wanted_bytes=wanted[Step.THAW])
        if frozen is not None:
            source = f"nothing was thawed here yet; as fast as a freeze: {frozen.source}"
            found[Step.THAW] = Rate(bytes_per_s=frozen.bytes_per_s, source=source)
    known = known_calibration(tools.state)
    unknown = [step for step, rate in found.items() if rate is None and step is not Step.THAW]
    if measure or (measure is None and known is None and unknown):
        known = _calibrate(tools)
    calibrated = known.rates() if known is not None else {}
    return {step: rate for step in wanted if (rate := found[step] or calibrated.get(step)) is not None}


def _calibrate(tools: Tools) -> Calibration:
    with tools.state.in_use(), tools.reporter.phase("measure this machine"):
        return calibrate(tools.state)


def _receipts(tools: Tools) -> tuple[list[Receipt], list[str]]:
    """The receipts of this boot, newest first, and what had to be left out."""
    found: list[Receipt] = []
    notes = []
    booted = datetime.fromtimestamp(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), UTC)
    since = booted.strftime("%Y-%m-%dT%H:%M:%S")
    for path in _newest_first(tools.state.receipts)[:_MAX_RECEIPTS]:
        try:
            receipt = parse_receipt(read_private(path, MAX_RECEIPT_BYTES))
        except ColdsnapError as error:
            notes.append(f"receipt {path.name} cannot be read and was left out: {str(error).splitlines()[0]}")
            continue
        if receipt.started_at[: len(since)] >= since:
            found.append(receipt)
    return found, notes


def _newest_first(folder: Path) -> list[Path]:
    dated = []
    for path in folder.glob("*.json"):
        try:
            dated.append((path.lstat().st_mtime_ns, path))
        except FileNotFoundError:
            continue
    return [path for _, path in sorted(dated, reverse=True)]
