"""Verify finds every kind of damage, says where it is, repairs nothing, and believes no record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.assembly import NATIVE_MANIFEST, RECOVERY_MANIFEST, capsule_folder
from coldsnap.ops.preparing import prepare
from coldsnap.ops.verify import Proof, verify_artifact
from coldsnap.testing.tamper import changed, flipped, forge

from .conftest import Shop  # isort: skip


def findings(shop: Shop, loaded: LoadedArtifact | None = None) -> dict[str, tuple[str, ...]]:
    proofs: tuple[Proof, ...] = verify_artifact(shop.tools, loaded or shop.loaded)
    assert list(shop.tools.state.staging.iterdir()) == []
    return {proof.subject: tuple(map(str, proof.problems)) for proof in proofs}


def prepared_of(shop: Shop) -> Path:
    folder = shop.tools.state.prepared / shop.loaded.capsule_digest("u0").hex
    if not folder.exists():
        prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
    return folder


def test_everything_is_looked_at(shop: Shop) -> None:
    proofs = verify_artifact(shop.tools, shop.loaded)
    assert {proof.subject: bool(proof.problems) for proof in proofs} == {
        "capsule of u0": False,
        "manifests of w0": False,
        "pack of w0": False,
    }
    sizes = {proof.subject: proof.bytes for proof in proofs}
    assert sizes["pack of w0"] == shop.result.pack_bytes
    assert sizes["capsule of u0"] == sum(size for size, _ in shop.loaded.expected_files("u0").values())


@pytest.mark.parametrize("at", [0, 25_000, -1])
def test_a_flipped_bit_of_the_pack_is_found_whatever_its_record_says(shop: Shop, at: int) -> None:
    prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
    with flipped(shop.pack, at):
        found = findings(shop)
        assert [subject for subject, problems in found.items() if problems] == ["pack of w0"]
    assert not any(findings(shop).values())


def test_a_pack_of_another_length(shop: Shop) -> None:
    data = shop.pack.read_bytes()
    for other in (data[:-4096], data + bytes(4096), b""):
        with changed(shop.pack, other):
            assert findings(shop)["pack of w0"]


def test_a_pack_that_is_missing(shop: Shop) -> None:
    shop.pack.unlink()
    found = findings(shop)
    assert str(shop.pack) in "".join(found["pack of w0"])


def test_each_blob_of_the_capsule_counts(shop: Shop) -> None:
    folder = capsule_folder(shop.tools, shop.loaded.capsule_digest("u0"))
    for blob in sorted((folder / "blobs" / "sha256").iterdir()):
        with flipped(blob, blob.stat().st_size // 2):
            found = findings(shop)
            assert found["capsule of u0"], blob
            assert list(found) == ["capsule of u0"], "what a damaged capsule says is not believed"
    assert not any(findings(shop).values())


def test_a_capsule_that_is_missing(shop: Shop) -> None:
    shutil.rmtree(capsule_folder(shop.tools, shop.loaded.capsule_digest("u0")))
    assert findings(shop)["capsule of u0"]


def test_a_prepared_capsule_is_not_believed(shop: Shop) -> None:
    """Damage in the layout is found though the unpacked copy is whole."""
    prepared_of(shop)
    folder = capsule_folder(shop.tools, shop.loaded.capsule_digest("u0"))
    blob = max((folder / "blobs" / "sha256").iterdir(), key=lambda one: one.stat().st_size)
    with flipped(blob, 100):
        assert findings(shop)["capsule of u0"]


@pytest.mark.parametrize("role", [NATIVE_MANIFEST, RECOVERY_MANIFEST])
def test_a_gap_in_the_map(shop: Shop, tmp_path: Path, role: str) -> None:
    entry = shop.loaded.worker_object("w0", role)
    assert entry is not None
    document = json.loads((prepared_of(shop) / entry.path).read_bytes())
    lost = document["residual_extents"].pop()
    document["residual_bytes"] -= lost["size"]
    data = (json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode()
    forged = forge(shop.tools, shop.loaded, prepared_of(shop), tmp_path / "f.json", files={entry.path: data})
    assert f"{lost['ptr']:#x}" in "".join(findings(shop, forged)["manifests of w0"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("capture_id", "another"), ("worker", "w1")],
)
def test_a_manifest_of_something_else(shop: Shop, tmp_path: Path, field: str, value: str) -> None:
    entry = shop.loaded.worker_object("w0", NATIVE_MANIFEST)
    assert entry is not None
    document = json.loads((prepared_of(shop) / entry.path).read_bytes())
    document[field] = value
    data = (json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode()
    forged = forge(shop.tools, shop.loaded, prepared_of(shop), tmp_path / "f.json", files={entry.path: data})
    problems = findings(shop, forged)["manifests of w0"]
    assert any(field in problem and value in problem for problem in problems), problems


def test_a_descriptor_of_another_model(shop: Shop, tmp_path: Path) -> None:
    document = artifact_document(shop.loaded.artifact)
    revision = "sha256:" + "ab" * 32
    document["launch"]["model"]["revision"] = revision
    document["weights"]["recovery"]["revision"] = revision
    path = tmp_path / "other.json"
    path.write_bytes(artifact_bytes(artifact_from(document)))
    problems = findings(shop, load_artifact(path))["manifests of w0"]
    assert any("revision" in problem for problem in problems)
