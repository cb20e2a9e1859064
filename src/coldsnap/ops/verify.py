"""Full proof of an artifact and everything it names, believing no record. Needs neither root nor a GPU.

The document, then each capsule (every byte, by unpacking it aside), then each worker's manifests (they must
prove that every preserved byte is kept exactly once, and agree with the artifact and with each other), then each
pack (every extent, the padding, the whole). All findings are collected; nothing is repaired.

``verify_covers`` is the part that needs no payload: the manifests alone, from the prepared folder or straight out of
the capsules, each proved by its digest. 64 workers of 10,000 extents take seconds, whatever their packs weigh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.capsule.image import RESIDUAL, unpack_capsule
from coldsnap.core.artifact import ObjectRecord
from coldsnap.core.digest import Digest
from coldsnap.core.execution import global_rank
from coldsnap.core.manifest import MANIFEST_LIMIT_BYTES, parse_native_manifest
from coldsnap.core.workerproof import ExpectedWorker, WorkerProof, prove_worker
from coldsnap.errors import ColdsnapError, InvalidDocument, Problem, Refused
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.assembly import NATIVE_MANIFEST, RECOVERY_MANIFEST, capsule_folder
from coldsnap.ops.covers import CoverTask, prove_cover
from coldsnap.ops.manifests import ManifestShelf
from coldsnap.ops.processes import map_in_processes
from coldsnap.ops.report import Reporter
from coldsnap.ops.scratch import scratch_folder
from coldsnap.ops.tools import Tools
from coldsnap.store.admission import admit_file
from coldsnap.store.documents import read_private

__all__ = ["Proof", "verify_artifact", "verify_covers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One thing that was looked at: proved when it has no problems. ``bytes`` were read for it.

    ``cover`` has the numbers of a worker's cover, when its manifests could be read.
    """

    subject: str
    bytes: int
    problems: tuple[Problem, ...]
    cover: WorkerProof | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        document: dict[str, Any] = {
            "subject": self.subject,
            "bytes": self.bytes,
            "problems": [problem.document() for problem in self.problems],
        }
        if self.cover is not None:
            document["cover"] = {
                "preserved_bytes": self.cover.preserved_bytes,
                "model_bytes": self.cover.model_bytes,
                "residual_bytes": self.cover.residual_bytes,
                "model_extents": self.cover.num_model_extents,
                "residual_extents": self.cover.num_residual_extents,
            }
        return document


def verify_artifact(tools: Tools, loaded: LoadedArtifact) -> tuple[Proof, ...]:
    """Prove every file the artifact names. Problems are returned, never raised, so that all are seen."""
    proofs = []
    packs = _Packs(tools, loaded)
    with scratch_folder(tools.state, f"verify-{loaded.artifact.capture_id}") as scratch:
        for unit in loaded.artifact.launch.units:
            folder = scratch / unit.id
            capsule = _unpacked(tools, loaded, unit.id, folder)
            proofs.append(capsule)
            proofs.extend(_prepared_copy(tools, loaded, unit.id))
            if capsule.problems:
                continue
            for worker in loaded.artifact.launch.execution.workers:
                if worker.unit == unit.id:
                    proofs.extend(_worker_proofs(loaded, worker.id, folder, packs))
    return tuple(proofs)


def _prepared_copy(tools: Tools, loaded: LoadedArtifact, unit: str) -> Iterator[Proof]:
    """The unpacked copy that a restore would read, where there is one: a record is not believed here either."""
    folder = tools.state.prepared / loaded.capsule_digest(unit).hex
    if not folder.is_dir():
        return
    expected = loaded.expected_files(unit)
    problems: list[Problem] = []
    for path, (size, digest) in expected.items():
        try:
            with admit_file(folder / path, digest, size, record=False):
                pass
        except ColdsnapError as error:
            problems += _problems(f"prepared {path}", error)
    if problems:
        cure = f"remove {folder}; the next prepare unpacks the capsule again"
        problems = [Problem(field=p.field, message=p.message, value=p.value, cure=cure) for p in problems]
    yield Proof(
        subject=f"prepared copy of {unit}",
        bytes=sum(size for size, _ in expected.values()),
        problems=tuple(problems),
    )


def verify_covers(
    state_root: Path, loaded: LoadedArtifact, *, reporter: Reporter, num_processes: int = 0
) -> tuple[Proof, ...]:
    """Prove the cover of every worker from its manifests alone, on every core. Reads no pack and no process image.

    As with ``verify_artifact``, problems are returned, never raised.
    """
    shelf = ManifestShelf(state_root, loaded)
    proofs: dict[str, Proof] = {}
    tasks: list[CoverTask] = []
    for worker in loaded.artifact.launch.execution.workers:
        try:
            tasks.append(_cover_task(shelf, loaded, worker.id))
        except ColdsnapError as error:
            proofs[worker.id] = _manifest_proof(loaded, worker.id, problems=_problems(f"worker/{worker.id}", error))
    total = sum(task.bytes for task in tasks)
    with reporter.phase("prove that every preserved byte is kept exactly once", total_bytes=total) as advance:
        for task, found in zip(tasks, map_in_processes(prove_cover, tasks, num_processes=num_processes), strict=True):
            worker_id = task.expected.worker
            proofs[worker_id] = (
                _manifest_proof(loaded, worker_id, cover=found) if found else _cover_again(shelf, loaded, task)
            )
            advance(task.bytes)
    return tuple(proofs[worker.id] for worker in loaded.artifact.launch.execution.workers)


def _cover_task(shelf: ManifestShelf, loaded: LoadedArtifact, worker: str) -> CoverTask:
    return CoverTask(
        expected=_expected(loaded, worker),
        native=shelf.first_place(worker, NATIVE_MANIFEST),
        recovery=shelf.first_place(worker, RECOVERY_MANIFEST),
    )


def _cover_again(shelf: ManifestShelf, loaded: LoadedArtifact, task: CoverTask) -> Proof:
    """The first place had other bytes: look at every place, and say what is wrong when none is good."""
    worker = task.expected.worker
    try:
        native, recovery = (shelf.read(worker, role) for role in (NATIVE_MANIFEST, RECOVERY_MANIFEST))
    except ColdsnapError as error:
        return _manifest_proof(loaded, worker, problems=_problems(f"worker/{worker}", error))
    return _manifest_proof(loaded, worker, cover=prove_worker(native, recovery, task.expected))


def _manifest_proof(
    loaded: LoadedArtifact, worker: str, *, cover: WorkerProof | None = None, problems: tuple[Problem, ...] = ()
) -> Proof:
    files = (loaded.worker_object(worker, role) for role in (NATIVE_MANIFEST, RECOVERY_MANIFEST))
    return Proof(
        subject=f"manifests of {worker}",
        bytes=sum(file.bytes for file in files if file is not None),
        problems=cover.problems if cover is not None else problems,
        cover=cover,
    )


def _expected(loaded: LoadedArtifact, worker: str) -> ExpectedWorker:
    artifact = loaded.artifact
    return ExpectedWorker(
        capture_id=artifact.capture_id,
        worker=worker,
        rank=global_rank(artifact.launch.execution, worker),
        pack=_identity(loaded.packs().get(worker)),
        residual=_identity(loaded.worker_object(worker, RESIDUAL)),
        model_id=artifact.launch.model.id,
        revision=artifact.launch.model.revision,
    )


def _identity(entry: ObjectRecord | None) -> tuple[int, Digest] | None:
    return (entry.bytes, entry.sha256) if entry is not None else None


def _unpacked(tools: Tools, loaded: LoadedArtifact, unit: str, folder: Path) -> Proof:
    digest, expected = loaded.capsule_digest(unit), loaded.expected_files(unit)
    total = sum(size for size, _ in expected.values())

    def unpack() -> None:
        with tools.reporter.phase(f"verify capsule of {unit}", total_bytes=total) as advance:
            unpack_capsule(capsule_folder(tools, digest), digest, folder, expected=expected, progress=advance)

    return _proof(f"capsule of {unit}", total, unpack)


def _worker_proofs(loaded: LoadedArtifact, worker: str, folder: Path, packs: _Packs) -> list[Proof]:
    data = []
    for role in (NATIVE_MANIFEST, RECOVERY_MANIFEST):
        entry = loaded.worker_object(worker, role)
        if entry is None:
            problem = Problem(
                field=f"worker/{worker}", message=f"has no {role} in the capsule", value="none", cure="capture again"
            )
            return [_manifest_proof(loaded, worker, problems=(problem,))]
        data.append(read_private(folder / entry.path, MANIFEST_LIMIT_BYTES))
    cover = prove_worker(data[0], data[1], _expected(loaded, worker))
    manifests = _manifest_proof(loaded, worker, cover=cover)
    if cover.problems or worker not in loaded.packs():
        return [manifests]
    return [manifests, packs.prove(worker, data[0])]


class _Packs:
    """Proves packs, each once: workers with equal model bytes have one pack, however many they are."""

    def __init__(self, tools: Tools, loaded: LoadedArtifact) -> None:
        self._tools = tools
        self._loaded = loaded
        self._seen: dict[Digest, tuple[str, list[tuple[int, int, Digest]]]] = {}

    def prove(self, worker: str, native: bytes) -> Proof:
        pack = self._loaded.packs()[worker]
        extents = [(one.offset, one.size, one.sha256) for one in parse_native_manifest(native).model_weight_extents]
        first = self._seen.setdefault(pack.sha256, (worker, extents))
        if first[0] != worker and first[1] == extents:
            return Proof(subject=f"pack of {worker}, which is that of {first[0]}", bytes=0, problems=())
        path = self._tools.store.path(pack.sha256)

        def prove() -> None:
            with self._tools.reporter.phase(f"verify pack of {worker}", total_bytes=2 * pack.bytes) as advance:
                # Its extents first, which names the damaged ones; then the whole, which is the pack's identity.
                for parts in (extents, None):
                    with admit_file(path, pack.sha256, pack.bytes, extents=parts, record=False, progress=advance):
                        pass

        return _proof(f"pack of {worker}", pack.bytes, prove)


def _proof(subject: str, num_bytes: int, prove: Callable[[], None]) -> Proof:
    problems: tuple[Problem, ...] = ()
    try:
        prove()
    except ColdsnapError as error:
        problems = _problems(subject, error)
    return Proof(subject=subject, bytes=num_bytes, problems=problems)


def _problems(subject: str, error: ColdsnapError) -> tuple[Problem, ...]:
    if isinstance(error, InvalidDocument | Refused):
        return error.problems
    value = error.facts.get("path")
    return (Problem(field=subject, message=error.message, value=str(value) if value else None, cure=error.cure),)
