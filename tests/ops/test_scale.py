"""Many workers: what is promised for size is that large files stay closed, and that the cover proof spreads out.

Times are the business of ``benchmarks/offline.py``; here is proved why they hold, on artifacts of the same shape.
"""

from __future__ import annotations

import operator
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.artifact import MAX_ARTIFACT_BYTES
from coldsnap.core.manifest import (
    native_manifest_bytes,
    parse_native_manifest,
    parse_recovery_manifest,
    recovery_manifest_bytes,
)
from coldsnap.ops import diff as diff_module
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.diff import WorkerState, compare
from coldsnap.ops.manifests import ManifestShelf
from coldsnap.ops.processes import map_in_processes
from coldsnap.ops.report import Silent
from coldsnap.ops.usage import find_usage
from coldsnap.ops.verify import Proof, verify_artifact, verify_covers
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.desk import Desk
from coldsnap.testing.synthetic import SyntheticSpec, make_synthetic, tensor_name, worker_manifests

MANY = SyntheticSpec(num_units=8, workers_per_unit=8, num_extents=40, num_images=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state root with 64 workers, captured three times: base, the same again, and a twin."""
    folder = tmp_path_factory.mktemp("scale") / "state"
    state = StateRoot.open(folder)
    make_synthetic(state, folder.parent / "base.json", MANY)
    make_synthetic(state, folder.parent / "again.json", replace(MANY, capture_id="capture-2"))
    twin = replace(MANY, capture_id="capture-3", changed={"w9": frozenset({1}), "w63": frozenset({0, 39})})
    make_synthetic(state, folder.parent / "twin.json", twin)
    return folder


def artifact(root: Path, name: str) -> LoadedArtifact:
    return load_artifact(root.parent / f"{name}.json")


def covers(root: Path, loaded: LoadedArtifact, **changes: Any) -> dict[str, Proof]:
    proofs = verify_covers(root, loaded, reporter=Silent(), **changes)
    return {proof.subject.removeprefix("manifests of "): proof for proof in proofs}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The manifests that are read from now on, by role and worker."""
    read: list[str] = []
    places = ManifestShelf.places

    def counted(self: ManifestShelf, worker: str, role: str) -> Any:
        read.append(f"{role} of {worker}")
        return places(self, worker, role)

    monkeypatch.setattr(ManifestShelf, "places", counted)
    return read


def test_synthetic_manifests_are_canonical_and_complete() -> None:
    made = worker_manifests(SyntheticSpec(num_extents=250), "w0")
    assert native_manifest_bytes(parse_native_manifest(made.native)) == made.native
    assert recovery_manifest_bytes(parse_recovery_manifest(made.recovery)) == made.recovery


def test_a_descriptor_grows_with_workers_and_not_with_extents(tmp_path: Path) -> None:
    sizes = []
    for number, extents in enumerate((10, 400)):
        state = StateRoot.open(tmp_path / f"s{number}")
        made = make_synthetic(state, tmp_path / f"{number}.json", replace(MANY, num_units=1, num_extents=extents))
        sizes.append(made.path.stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 40 * MANY.workers_per_unit, "only the digits of sizes may differ"
    assert sizes[1] * 64 // 8 < MAX_ARTIFACT_BYTES // 100


def test_equal_captures_are_compared_without_a_manifest(root: Path, opened: list[str], tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes((root.parent / "base.json").read_bytes())
    found = compare(artifact(root, "base"), load_artifact(copy), state_root=root)
    assert found.same
    assert {worker.state for worker in found.workers} == {WorkerState.SAME_MANIFESTS}
    assert len(found.workers) == 64
    assert opened == []


def test_a_second_capture_is_compared_without_parsing(
    root: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(data: bytes) -> Any:
        raise AssertionError("a manifest was parsed")

    monkeypatch.setattr(diff_module, "parse_recovery_manifest", never)
    monkeypatch.setattr(diff_module, "parse_native_manifest", never)
    found = compare(artifact(root, "base"), artifact(root, "again"), state_root=root)
    assert found.same
    assert {worker.state for worker in found.workers} == {WorkerState.SAME_BUT_CAPTURE}
    assert {one.partition(" of ")[0] for one in opened} == {"recovery-manifest"}, "one manifest a side is enough"


def test_of_a_twin_only_the_workers_that_differ_are_parsed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def counted(data: bytes) -> Any:
        manifest = parse_recovery_manifest(data)
        parsed.append(manifest.worker)
        return manifest

    monkeypatch.setattr(diff_module, "parse_recovery_manifest", counted)
    found = compare(artifact(root, "base"), artifact(root, "twin"), state_root=root)
    assert sorted(parsed) == ["w63", "w63", "w9", "w9"]
    named = {
        worker.worker: [name for one in worker.memory.changes for name in one.tensors]
        for worker in found.workers
        if worker.memory is not None
    }
    assert named == {"w9": [tensor_name(1)], "w63": [tensor_name(0), tensor_name(39)]}
    assert sum(not worker.same for worker in found.workers) == 2
    packs = next(section for section in found.sections if section.name == "packs")
    assert packs.detail == "62 of 66 packs are shared"


def test_every_cover_is_proved(root: Path) -> None:
    loaded = artifact(root, "base")
    proofs = covers(root, loaded)
    assert list(proofs) == [f"w{number}" for number in range(64)]
    # 40 tensors: eight of each size, number 0 being 16 bytes short; the gap and the tail are residual.
    model = 8 * (4096 + 8192 + 64 + 1024 + 2048) - 16
    for worker, proof in proofs.items():
        assert proof.problems == (), worker
        assert proof.cover is not None
        assert (proof.cover.model_bytes, proof.cover.num_model_extents) == (model, 40)
        assert proof.cover.preserved_bytes == proof.cover.model_bytes + proof.cover.residual_bytes
    assert covers(root, loaded, num_processes=1) == proofs, "one process finds the same as many"


def test_a_damaged_capsule_closes_only_its_own_workers(tmp_path: Path) -> None:
    state = StateRoot.open(tmp_path / "state")
    loaded = make_synthetic(state, tmp_path / "a.json", replace(MANY, num_units=2, workers_per_unit=4))
    folder = state.capsules / loaded.capsule_digest("u1").hex / "blobs" / "sha256"
    largest = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    at = data.index(b'"rank":6')
    data[at : at + 8] = b'"rank":7'
    largest.write_bytes(data)
    proofs = covers(state.path, loaded)
    wrong = {worker for worker, proof in proofs.items() if proof.problems}
    assert wrong == {"w6"}
    assert "has digest" in str(proofs["w6"].problems[0])
    assert "workers/w6/" in str(proofs["w6"].problems[0])


def test_manifests_that_are_nowhere_are_named_for_every_worker(root: Path, tmp_path: Path) -> None:
    proofs = covers(tmp_path / "nowhere", artifact(root, "base"))
    assert len(proofs) == 64
    assert all("name another --state-root" in str(proof.problems[0].cure) for proof in proofs.values())


def test_a_damaged_prepared_copy_is_passed_over(tmp_path: Path) -> None:
    state = StateRoot.open(tmp_path / "state")
    loaded = make_synthetic(state, tmp_path / "a.json", replace(MANY, num_units=1, workers_per_unit=2))
    for worker in ("w0", "w1"):
        entry = loaded.worker_object(worker, "native-manifest")
        assert entry is not None
        copy = state.prepared / loaded.capsule_digest("u0").hex / entry.path
        copy.parent.mkdir(parents=True)
        copy.write_bytes(b"{}")
    assert {proof.problems for proof in covers(state.path, loaded).values()} == {()}


def test_a_pack_that_workers_share_is_proved_once(kit: Desk, tmp_path: Path) -> None:
    spec = SyntheticSpec(num_units=2, workers_per_unit=2, num_extents=30, replicas=True, payloads=True)
    loaded = make_synthetic(kit.tools.state, tmp_path / "a.json", spec)
    proofs = {proof.subject: proof for proof in verify_artifact(kit.tools, loaded)}
    assert all(proof.problems == () for proof in proofs.values())
    read = {subject: proof.bytes for subject, proof in proofs.items() if subject.startswith("pack of")}
    size = next(iter(loaded.packs().values())).bytes
    assert read == {"pack of w0": size} | {f"pack of w{number}, which is that of w0": 0 for number in (1, 2, 3)}
    usage = find_usage(kit.tools.state.path, [loaded.path])
    assert usage.saved_bytes == 3 * size
    assert [one.here for one in usage.packs] == [True]


def test_workers_with_packs_of_their_own_are_each_proved(kit: Desk, tmp_path: Path) -> None:
    spec = SyntheticSpec(num_units=1, workers_per_unit=2, num_extents=30, payloads=True)
    loaded = make_synthetic(kit.tools.state, tmp_path / "a.json", spec)
    pack = kit.tools.store.path(loaded.packs()["w1"].sha256)
    data = bytearray(pack.read_bytes())
    data[-1] = 1  # padding, which belongs to no extent
    pack.chmod(0o600)
    pack.write_bytes(data)
    proofs = {proof.subject: proof for proof in verify_artifact(kit.tools, loaded)}
    assert [subject for subject, proof in proofs.items() if proof.problems] == ["pack of w1"]


def test_processes_are_used_and_are_not_ours() -> None:
    pids = {int(pid) for pid in map_in_processes(os.readlink, ["/proc/self"] * 12, num_processes=2)}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2


@pytest.mark.parametrize(("tasks", "processes"), [(3, 2), (20, 1), (0, 2)])
def test_little_work_is_done_here(tasks: int, processes: int) -> None:
    here = list(map_in_processes(os.readlink, ["/proc/self"] * tasks, num_processes=processes))
    assert here == [str(os.getpid())] * tasks


def test_results_come_in_order() -> None:
    assert list(map_in_processes(operator.neg, range(30), num_processes=2)) == [-number for number in range(30)]


def test_what_other_processes_cannot_do_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function's module is in this process alone, so the others die of the first task."""

    def process_of(number: int) -> int:
        return os.getpid()

    only_here = types.ModuleType("only_here")
    only_here.__dict__["process_of"] = process_of
    process_of.__module__, process_of.__qualname__ = "only_here", "process_of"
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    assert list(map_in_processes(process_of, range(16), num_processes=2)) == [os.getpid()] * 16
