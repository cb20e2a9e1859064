"""Comparing real captures of the fake engine: a twin, another load order, the same state again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.artifactdiff import Section
from coldsnap.core.extentdiff import ChangeKind
from coldsnap.engines.safetensors import read_header
from coldsnap.ops import diff as diff_module
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.assembly import RECOVERY_MANIFEST, capsule_folder
from coldsnap.ops.capture import capture
from coldsnap.ops.diff import ArtifactDifference, WorkerState, compare
from coldsnap.ops.preparing import prepare
from coldsnap.testing.checkpoint import DEFAULT_TENSORS
from coldsnap.testing.desk import plan

from .conftest import Shop  # isort: skip

TUNED = ("layers.1", "norm")


def fine_tuned(model: Path, folder: Path) -> Path:
    """The checkpoint with one byte of each tensor of ``TUNED`` changed, headers untouched."""
    shutil.copytree(model, folder)
    for path in sorted(folder.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        for stored in read_header(path).tensors:
            if stored.name in TUNED:
                data[stored.offset + stored.size // 2] ^= 1
        path.write_bytes(data)
    return folder


def captured(shop: Shop, model: Path, path: Path, **changes: Any) -> LoadedArtifact:
    planned = plan(model, path, operation_id=path.stem, **changes)
    capture(shop.tools, planned.request, planned.model)
    return load_artifact(path)


def differing(found: ArtifactDifference) -> dict[str, Section]:
    return {section.name: section for section in found.sections if not section.same}


def compared(shop: Shop, other: LoadedArtifact) -> ArtifactDifference:
    return compare(shop.loaded, other, state_root=shop.tools.state.path)


def test_a_copy_of_a_descriptor_is_the_same_and_nothing_is_opened(shop: Shop, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(shop.loaded.path.read_bytes())
    found = compare(shop.loaded, load_artifact(copy), state_root=tmp_path / "nowhere")
    assert found.same
    assert differing(found) == {}
    assert [worker.state for worker in found.workers] == [WorkerState.SAME_MANIFESTS]
    assert (found.bytes.only_a_bytes, found.bytes.only_b_bytes) == (0, 0)
    assert found.bytes.stored_once_bytes == shop.result.pack_bytes


def test_another_capture_of_the_same_state(
    shop: Shop, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = captured(shop, model, tmp_path / "again.json")

    def never(data: bytes) -> Any:
        raise AssertionError("a manifest was parsed")

    monkeypatch.setattr(diff_module, "parse_recovery_manifest", never)
    found = compared(shop, again)
    assert [worker.state for worker in found.workers] == [WorkerState.SAME_BUT_CAPTURE]
    assert "packs" not in differing(found)
    assert "capture" in differing(found)


def test_a_fine_tuned_twin_is_named_by_its_tensors(shop: Shop, model: Path, tmp_path: Path) -> None:
    twin = captured(shop, fine_tuned(model, tmp_path / "tuned"), tmp_path / "twin.json")
    found = compared(shop, twin)
    assert not found.same
    assert {"model", "packs", "acceptance"} <= set(differing(found))
    assert [one.field for one in differing(found)["model"].changes][-1] == "launch.model.revision"
    (worker,) = found.workers
    assert worker.state is WorkerState.DIFFERS
    memory = worker.memory
    assert memory is not None
    assert {(one.kind, one.tensors) for one in memory.changes} == {(ChangeKind.CHANGED, (name,)) for name in TUNED}
    assert memory.equal_bytes == sum(DEFAULT_TENSORS.values()) - sum(DEFAULT_TENSORS[name] for name in TUNED)
    assert (memory.num_moved, memory.residual.same, memory.same_allocations) == (0, True, True)
    assert found.bytes.stored_once_bytes == 0, "packs with one other byte are other packs"


def test_another_load_order_is_the_same_model_elsewhere(shop: Shop, model: Path, tmp_path: Path) -> None:
    shuffled = captured(shop, model, tmp_path / "shuffled.json", serve={"shuffle": 9})
    found = compared(shop, shuffled)
    assert "packs" not in differing(found), "the pack does not depend on addresses"
    assert "launch" in differing(found)
    (worker,) = found.workers
    memory = worker.memory
    assert memory is not None
    assert memory.changes == ()
    assert memory.num_moved > 0
    assert not worker.same


@pytest.mark.parametrize("prepared", [True, False])
def test_manifests_come_from_the_prepared_folder_or_the_capsule(
    shop: Shop, model: Path, tmp_path: Path, prepared: bool
) -> None:
    twin = captured(shop, fine_tuned(model, tmp_path / "tuned"), tmp_path / "twin.json")
    if prepared:
        prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
        capsule = capsule_folder(shop.tools, shop.loaded.capsule_digest("u0"))
        capsule.rename(capsule.with_name("moved"))
    assert compared(shop, twin).workers[0].state is WorkerState.DIFFERS


def test_a_damaged_prepared_manifest_sends_the_reader_to_the_capsule(shop: Shop, model: Path, tmp_path: Path) -> None:
    twin = captured(shop, fine_tuned(model, tmp_path / "tuned"), tmp_path / "twin.json")
    prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
    entry = shop.loaded.worker_object("w0", RECOVERY_MANIFEST)
    assert entry is not None
    path = shop.tools.state.prepared / shop.loaded.capsule_digest("u0").hex / entry.path
    path.write_bytes(path.read_bytes().replace(b"layers.1", b"layers.9"))
    found = compared(shop, twin).workers[0]
    assert found.memory is not None
    assert {one.tensors for one in found.memory.changes} == {(name,) for name in TUNED}


def test_without_the_files_everything_else_is_said_and_the_memory_is_unknown(
    shop: Shop, model: Path, tmp_path: Path
) -> None:
    twin = captured(shop, fine_tuned(model, tmp_path / "tuned"), tmp_path / "twin.json")
    found = compare(shop.loaded, twin, state_root=tmp_path / "nowhere")
    (worker,) = found.workers
    assert worker.state is WorkerState.UNKNOWN
    assert str(shop.loaded.capsule_digest("u0")) in worker.reason
    assert "name another --state-root" in worker.reason
    assert not found.same
    assert "packs" in differing(found)


def test_the_document_says_it_all_as_json(shop: Shop, model: Path, tmp_path: Path) -> None:
    twin = captured(shop, fine_tuned(model, tmp_path / "tuned"), tmp_path / "twin.json")
    document = json.loads(json.dumps(compared(shop, twin).document()))
    assert document["same"] is False
    (worker,) = document["workers"]
    assert sorted(name for one in worker["changes"] for name in one["tensors"]) == sorted(TUNED)
    assert {one["kind"] for one in worker["changes"]} == {"changed"}
    packs = next(one for one in document["sections"] if one["name"] == "packs")
    assert packs["changes"][0]["field"] == "weights.model_payloads[w0]"
    both = document["bytes"]
    assert both["shared"] + both["only_a"] == sum(_contents(shop.loaded).values())


def _contents(loaded: LoadedArtifact) -> dict[str, int]:
    files = {str(digest): size for size, digest in loaded.expected_files("u0").values()}
    return files | {str(pack.sha256): pack.bytes for pack in loaded.packs().values()}
