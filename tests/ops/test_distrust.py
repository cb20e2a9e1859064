"""After a restore that went wrong no earlier proof is believed, and verify reads what a restore would read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldsnap.errors import AcceptanceFailed, CriuError, IntegrityError, PayloadRejected
from coldsnap.ops.live import stop_service
from coldsnap.ops.preparing import prepare
from coldsnap.ops.verify import verify_artifact

from .conftest import Shop  # isort: skip


def change_silently(path: Path, offset: int = 0) -> None:
    """Change one byte as a bad disk would: every fact that a record knows stays what it was."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def prepared_of(shop: Shop) -> Path:
    prepare(shop.tools, shop.loaded, shop.request("prepare-first"))
    return shop.tools.state.prepared / shop.loaded.capsule_digest("u0").hex


def test_verify_reads_the_prepared_copy_and_believes_no_record(shop: Shop) -> None:
    folder = prepared_of(shop)
    image = next(path for path in sorted((folder / "process").iterdir()) if path.stat().st_size)
    change_silently(image)
    found = {proof.subject: [str(p) for p in proof.problems] for proof in verify_artifact(shop.tools, shop.loaded)}
    assert found["capsule of u0"] == []
    assert len(found["prepared copy of u0"]) == 1
    assert f"process/{image.name}" in found["prepared copy of u0"][0]
    assert f"remove {folder}" in found["prepared copy of u0"][0]


def test_a_pack_that_changed_silently_is_found_after_the_answers_differed(shop: Shop) -> None:
    prepared_of(shop)
    pack = shop.tools.store.path(shop.result.pack_digests[0])
    change_silently(pack)
    with pytest.raises(AcceptanceFailed):  # the record was believed, and the answers told
        shop.restore("restore-1")
    with pytest.raises(PayloadRejected, match=pack.name) as caught:
        shop.restore("restore-2")
    assert caught.value.reason == "digest_mismatch"


def test_a_residual_that_changed_silently_is_unpacked_again_after_the_answers_differed(shop: Shop) -> None:
    folder = prepared_of(shop)
    residual = folder / "workers" / "w0" / "weights.blob"
    good = residual.read_bytes()
    change_silently(residual, good.index(bytes([3, 10, 17, 24])))  # where the engine's table begins
    found = {proof.subject: proof.problems for proof in verify_artifact(shop.tools, shop.loaded)}
    assert [problem.field for problem in found["prepared copy of u0"]] == ["prepared workers/w0/weights.blob"]
    with pytest.raises(AcceptanceFailed):  # the record was believed, and the answers told
        shop.restore("restore-1")
    assert shop.restore("restore-2").rung == "native"
    assert residual.read_bytes() == good


def test_an_image_that_changed_silently_is_unpacked_again_after_the_tree_did_not_come_back(shop: Shop) -> None:
    folder = prepared_of(shop)
    image = next(path for path in sorted((folder / "process").iterdir()) if path.stat().st_size)
    good = image.read_bytes()
    change_silently(image)
    shop.kit.units.fail_next("restore", CriuError("an image cannot be read"))
    with pytest.raises(CriuError):
        shop.restore("restore-1")
    prepare(shop.tools, shop.loaded, shop.request("prepare-again"))
    assert image.read_bytes() == good


def test_a_checkpoint_with_other_bytes_does_not_cost_the_running_service(shop: Shop) -> None:
    shop.restore("restore-1")
    folder = Path(shop.tools.engines["fake"].read_command(shop.loaded.artifact.launch.units[0].command).model)
    file = min(folder.glob("*.safetensors"))
    good = file.read_bytes()
    try:
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(IntegrityError, match="other bytes in 1 tensor"):
            shop.restore("restore-2", weights="recovery")
        assert shop.tools.services.must_load("svc").state == "ready"
        stop_service(shop.tools, "svc")
    finally:
        file.write_bytes(good)
