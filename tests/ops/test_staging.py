"""Packs copied into memory beside a restore: when, from where it is read then, what happens without, when it goes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coldsnap.core.copies import HostMemory
from coldsnap.core.digest import Digest
from coldsnap.errors import AcceptanceFailed, CriuError
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.copies import unused_copies
from coldsnap.ops.live import sleep_service, stop_service, wake_service
from coldsnap.ops.preparing import prepare
from coldsnap.ops.restore import restore
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete, run_tidy
from coldsnap.ops.usage import find_usage
from coldsnap.store.copies import MemoryCopies
from coldsnap.testing.desk import plan
from coldsnap.testing.engine_harness import free_port

from .conftest import HOST, Shop  # isort: skip

GIB = 1 << 30


def pack_of(shop: Shop) -> tuple[Digest, int]:
    (pack,) = shop.loaded.packs().values()
    return pack.sha256, pack.bytes


def in_memory(shop: Shop) -> bool:
    return MemoryCopies(shop.tools.state).is_there(*pack_of(shop))


def staging_of(shop: Shop, operation_id: str) -> list[dict[str, object]]:
    receipt = json.loads((shop.tools.state.receipts / f"{operation_id}.json").read_text())
    found: list[dict[str, object]] = receipt["result"].get("staging", [])
    return found


def test_a_restore_that_stages_reads_the_copy(shop: Shop) -> None:
    result = shop.restore(stage=True)
    (report,) = result.wake.values()
    assert report.transfer_path["pack"].endswith("out of the copy in memory")
    (said,) = staging_of(shop, "restore-1")
    assert (said["in_memory"], said["bytes"]) == (True, pack_of(shop)[1])
    assert shop.kit.memory_fs.mounted.keys() == {MemoryCopies(shop.tools.state).folder(pack_of(shop)[0])}
    assert "stage" in result.seconds
    stop_service(shop.tools, "svc")


def test_a_restore_that_does_not_stage_mounts_nothing(shop: Shop) -> None:
    result = shop.restore()
    (report,) = result.wake.values()
    assert "copy in memory" not in report.transfer_path["pack"]
    assert "stage" not in result.seconds
    assert not shop.kit.memory_fs.mounted
    stop_service(shop.tools, "svc")


def test_the_room_is_mounted_before_the_tree_comes_back(shop: Shop) -> None:
    """A unit sees only what was mounted before it was made."""
    seen: list[int] = []
    thaw = shop.kit.units.restore

    def watched(*args: object, **named: object) -> object:
        seen.append(len(shop.kit.memory_fs.mounted))
        return thaw(*args, **named)  # type: ignore[arg-type]

    shop.kit.units.restore = watched  # type: ignore[method-assign,assignment]
    shop.restore(stage=True)
    assert seen == [1]
    stop_service(shop.tools, "svc")


def test_what_prepare_staged_is_there_for_any_restore_and_is_copied_once(shop: Shop) -> None:
    first = prepare(shop.tools, shop.loaded, shop.request("prepare-1", stage=True))
    again = prepare(shop.tools, shop.loaded, shop.request("prepare-2", stage=True))
    assert [one.bytes for one in (*first.staging, *again.staging)] == [pack_of(shop)[1], 0]
    assert all(one.there for one in (*first.staging, *again.staging))
    (report,) = shop.restore().wake.values()
    assert report.transfer_path["pack"].endswith("out of the copy in memory")
    stop_service(shop.tools, "svc")
    assert not in_memory(shop)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (HostMemory(total_bytes=8 * GIB, available_bytes=4 * GIB), "would leave less than 4.0 GiB"),
        (HostMemory(total_bytes=512 * GIB, available_bytes=500 * GIB, unified=True), "would hold it twice"),
    ],
)
def test_a_limit_is_a_reason_and_no_error(shop: Shop, found: HostMemory, reason: str) -> None:
    shop.kit.memory_fs.found = found
    (report,) = shop.restore(stage=True).wake.values()
    assert "copy in memory" not in report.transfer_path["pack"]
    (said,) = staging_of(shop, "restore-1")
    assert said["in_memory"] is False
    assert reason in str(said["reason"])
    assert not shop.kit.memory_fs.mounted
    stop_service(shop.tools, "svc")


def test_a_pack_in_the_page_cache_is_copied_ahead_but_not_beside(shop: Shop) -> None:
    shop.kit.memory_fs.cached = 0.9
    (report,) = shop.restore(stage=True).wake.values()
    assert "copy in memory" not in report.transfer_path["pack"]
    (said,) = staging_of(shop, "restore-1")
    assert "90% of it is in the page cache" in str(said["reason"])
    stop_service(shop.tools, "svc")
    (copied,) = prepare(shop.tools, shop.loaded, shop.request("prepare-1", stage=True)).staging
    assert copied.there


def test_a_copy_that_answers_wrongly_is_not_believed_again(shop: Shop) -> None:
    """Memory that changed by itself: no time of the file says so, and its record still fits."""
    prepare(shop.tools, shop.loaded, shop.request("prepare-1", stage=True))
    path = MemoryCopies(shop.tools.state).path(pack_of(shop)[0])
    found, content = path.stat(), bytearray(path.read_bytes())
    content[100] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    path.chmod(found.st_mode)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert in_memory(shop)
    with pytest.raises(AcceptanceFailed):
        shop.restore(weights="native")
    assert not in_memory(shop)
    (copied,) = prepare(shop.tools, shop.loaded, shop.request("prepare-2", stage=True)).staging
    assert copied.bytes == pack_of(shop)[1]
    shop.restore("restore-2", weights="native")
    stop_service(shop.tools, "svc")


def test_a_refused_mount_is_a_reason_and_no_error(shop: Shop) -> None:
    shop.kit.memory_fs.refuse = "no huge pages here"
    shop.restore(stage=True)
    assert [one["reason"] for one in staging_of(shop, "restore-1")] == ["no huge pages here"]
    stop_service(shop.tools, "svc")


def test_a_recovery_stages_nothing(shop: Shop) -> None:
    shop.restore(stage=True, weights="recovery")
    assert not shop.kit.memory_fs.mounted
    stop_service(shop.tools, "svc")


def test_a_copy_that_vanished_is_done_without(shop: Shop) -> None:
    shop.restore(stage=True)
    request = shop.live("sleep")
    sleep_service(shop.tools, request)
    digest, _ = pack_of(shop)
    MemoryCopies(shop.tools.state).empty(digest)
    reports, _ = wake_service(shop.tools, shop.live("wake"))
    assert "copy in memory" not in next(iter(reports.values())).transfer_path["pack"]
    stop_service(shop.tools, "svc")


def test_a_copy_that_was_changed_is_not_read(shop: Shop) -> None:
    prepare(shop.tools, shop.loaded, shop.request("prepare-1", stage=True))
    path = MemoryCopies(shop.tools.state).path(pack_of(shop)[0])
    path.chmod(0o600)
    path.write_bytes(bytes(pack_of(shop)[1]))
    (report,) = shop.restore().wake.values()
    assert "copy in memory" not in report.transfer_path["pack"]
    stop_service(shop.tools, "svc")


def test_a_tree_that_does_not_come_back_leaves_no_copying(shop: Shop) -> None:
    def refused(*args: object, **named: object) -> object:
        raise CriuError("no tree", facts={"log": []})

    shop.kit.units.restore = refused  # type: ignore[method-assign,assignment]
    with pytest.raises(CriuError):
        shop.restore(stage=True)
    assert unused_copies(shop.tools) in ((pack_of(shop)[0],), ())
    run_tidy(shop.tools, plan_tidy(shop.tools))
    assert not shop.kit.memory_fs.mounted


def test_a_copy_stays_while_another_service_runs_from_the_pack(shop: Shop, model: Path, tmp_path: Path) -> None:
    planned = plan(model, tmp_path / "second.json", operation_id="capture-2", name="two")
    second = load_artifact(capture(shop.tools, planned.request, planned.model).artifact_path)
    assert set(second.packs().values()) == set(shop.loaded.packs().values())
    shop.restore(stage=True)
    port = free_port()
    restore(shop.tools, second, activation_request(second, operation_id="restore-2", port=port), host=HOST, port=port)
    stop_service(shop.tools, "svc")
    assert in_memory(shop)
    assert plan_tidy(shop.tools).copies == ()
    stop_service(shop.tools, "two")
    assert not in_memory(shop)
    assert not shop.kit.memory_fs.mounted


def test_gc_takes_a_copy_that_no_service_runs_from(shop: Shop) -> None:
    prepare(shop.tools, shop.loaded, shop.request("prepare-1", stage=True))
    (item,) = plan_tidy(shop.tools).copies
    assert item.bytes >= pack_of(shop)[1]
    assert in_memory(shop), "a plan changes nothing"
    report = run_tidy(shop.tools, plan_tidy(shop.tools))
    assert item in report.removed
    assert not in_memory(shop)
    assert shop.tools.store.exists(pack_of(shop)[0]), "the pack itself stays"


def test_gc_counts_an_empty_place_of_a_killed_stage(shop: Shop) -> None:
    folder = shop.tools.state.make_in_memory(pack_of(shop)[0].hex)
    (item,) = plan_tidy(shop.tools).copies
    report = run_tidy(shop.tools, plan_tidy(shop.tools))
    assert item in report.removed
    assert not folder.exists()


def test_no_copy_outlives_its_artifact(shop: Shop) -> None:
    prepare(shop.tools, shop.loaded, shop.request("prepare-1", stage=True))
    run_delete(shop.tools, plan_delete(shop.tools, shop.loaded.path))
    assert not shop.tools.store.exists(pack_of(shop)[0])
    assert not in_memory(shop)
    assert not shop.kit.memory_fs.mounted


def test_a_recipe_that_stages_is_remembered_and_may_be_overruled(shop: Shop, model: Path, tmp_path: Path) -> None:
    planned = plan(model, tmp_path / "staged.json", operation_id="capture-2", name="two", stage=True)
    loaded = load_artifact(capture(shop.tools, planned.request, planned.model).artifact_path)
    wanted = activation_request(loaded, operation_id="a").extension
    assert wanted is not None
    assert wanted.stage
    assert activation_request(loaded, operation_id="a", stage=False).extension is None
    assert activation_request(shop.loaded, operation_id="a").extension is None


def test_usage_counts_memory_apart_from_the_disk(shop: Shop) -> None:
    prepare(shop.tools, shop.loaded, shop.request("prepare-1", stage=True))
    usage = find_usage(shop.tools.state.path)
    by_folder = {folder.name: folder.disk_bytes for folder in usage.folders}
    assert by_folder.pop("in-memory") >= pack_of(shop)[1]
    assert {"capsules", "model-payloads", "prepared"} <= set(by_folder)
    assert usage.disk_bytes == sum(by_folder.values())
