"""Overlays with real verbs and shipped fakes: made, preferred, and left aside for every reason there is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.driver import UnitSpec
from coldsnap.core.artifact import artifact_digest, artifact_from
from coldsnap.core.digest import Digest
from coldsnap.errors import AcceptanceFailed, CriuError, IntegrityError, OperationInterrupted, Refused, ResourceBusy
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.leases import find_references
from coldsnap.ops.live import sleep_service, stop_service, wake_service
from coldsnap.ops.materialize import materialize, materialize_request
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.overlay import drop_overlay, find_overlay, overlay_path, read_overlay
from coldsnap.ops.overlaying import OverlayMade
from coldsnap.ops.preparing import prepare
from coldsnap.ops.quarantine import clear_artifact, failures_of, quarantined
from coldsnap.ops.restore import RestoreResult, restore
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete, run_tidy
from coldsnap.testing.desk import EngineProcess, plan

from .conftest import HOST, Shop  # isort: skip


@pytest.fixture(autouse=True)
def _each_freeze_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real tree that was frozen twice has two images; so has the fake one here."""
    frozen = EngineProcess.freeze
    count = iter(range(1000))

    def another(process: EngineProcess) -> bytes:
        document = json.loads(frozen(process))
        return json.dumps({**document, "times": next(count)}).encode()

    monkeypatch.setattr(EngineProcess, "freeze", another)


def make(shop: Shop, operation_id: str = "overlay-1") -> OverlayMade:
    request = materialize_request(shop.loaded, operation_id=operation_id)
    made = materialize(shop.tools, shop.loaded, request, overlay=True).overlay
    assert made is not None
    return made


def steps(result: RestoreResult) -> list[tuple[str, str]]:
    return [(step.rung.value, step.outcome.value) for step in result.ladder]


def answers(shop: Shop) -> bool:
    prompts, expected = shop.loaded.acceptance()
    return OutsideClient(host=HOST, port=shop.port).complete(prompts, timeout_s=60) == expected


def capsule_of(shop: Shop) -> str:
    overlay = read_overlay(shop.tools, shop.loaded.digest)
    return overlay.artifact.capsule.images[0].digest.hex


def damage_capsule(shop: Shop, hex_digest: str) -> None:
    """Damage the unpacked folder, so that it is unpacked again, and the layer it would be unpacked from."""
    unpacked = shop.tools.state.prepared / hex_digest / "process"
    for path in unpacked.iterdir() if unpacked.is_dir() else ():
        path.write_bytes(path.read_bytes() + b"x")
    blobs = shop.tools.state.capsules / hex_digest / "blobs" / "sha256"
    layer = max(blobs.iterdir(), key=lambda blob: blob.stat().st_size)
    data = bytearray(layer.read_bytes())
    data[len(data) // 2] ^= 1
    layer.chmod(0o600)
    layer.write_bytes(data)


def test_an_overlay_is_made_and_preferred(shop: Shop) -> None:
    made = make(shop)
    assert made.outcome == "made"
    assert made.path == str(overlay_path(shop.tools, shop.loaded.digest))
    assert shop.kit.units.running() == ()
    overlay = read_overlay(shop.tools, shop.loaded.digest)
    assert overlay.portable == shop.loaded.digest
    assert overlay.artifact.capture_id == shop.loaded.artifact.capture_id
    assert overlay.artifact.capsule.images[0].digest != shop.loaded.capsule_digest("u0")
    assert overlay.model_payloads == shop.loaded.artifact.weights.model_payloads.objects  # type: ignore[union-attr]
    result = shop.restore()
    assert steps(result) == [("overlay", "used")]
    assert (result.rung, result.source) == ("overlay", "native")
    assert answers(shop)
    record = shop.tools.services.must_load("svc")
    assert (record.rung, record.overlay, record.artifact_digest) == ("overlay", made.digest, shop.loaded.digest)


def test_prepare_makes_the_overlay_ready_too(shop: Shop) -> None:
    make(shop)
    first = prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
    assert (first.source, first.from_record) == ("native", False)
    assert first.overlay is not None
    assert first.overlay.startswith("an overlay was made on this machine")
    assert prepare(shop.tools, shop.loaded, shop.request("prepare-2")).from_record
    result = shop.restore()
    assert (result.rung, result.prepared_from_record) == ("overlay", True)


def test_an_overlay_that_cannot_be_prepared_fails_no_prepare(shop: Shop) -> None:
    make(shop)
    damage_capsule(shop, capsule_of(shop))
    result = prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
    assert result.source == "native"
    assert result.overlay is not None
    assert result.overlay.startswith("it cannot be prepared: ")
    assert failures_of(shop.tools, shop.loaded.digest) is None


def test_an_identical_capture_is_thrown_away(shop: Shop, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = EngineProcess.freeze

    def the_same(process: EngineProcess) -> bytes:
        document = json.loads(freeze(process))
        return json.dumps({**document, "times": 0}).encode()

    monkeypatch.setattr(EngineProcess, "freeze", the_same)
    planned = plan(model, shop.loaded.path.with_name("b.json"), operation_id="capture-2")
    result = capture(shop.tools, planned.request, planned.model)
    other = replace(shop, result=result, loaded=load_artifact(result.artifact_path))
    made = make(other)
    assert (made.outcome, made.path) == ("identical", None)
    assert "thrown away" in made.reason
    assert not overlay_path(shop.tools, other.loaded.digest).exists()
    assert (shop.tools.state.capsules / other.loaded.capsule_digest("u0").hex).is_dir(), "the portable one stays"
    assert steps(other.restore()) == [("native", "used")]


def test_a_restore_with_scope_target_local_makes_one_beside_the_service(shop: Shop) -> None:
    result = shop.restore(target_local=True)
    assert (result.rung, result.state) == ("native", "ready")
    assert result.overlay is not None
    assert result.overlay.outcome == "made"
    assert shop.kit.units.running() == ("u0",)
    assert answers(shop)
    again = shop.restore("restore-2", target_local=True)
    assert (again.rung, again.overlay) == ("overlay", None)


def test_a_failed_overlay_is_not_captured_again_unasked(shop: Shop) -> None:
    """What fails and makes a new capture each time goes on for ever."""
    make(shop)
    before = overlay_path(shop.tools, shop.loaded.digest).read_bytes()
    for index in range(3):
        shop.kit.units.calls.clear()
        if index < 2:
            shop.kit.units.fail_next("restore", CriuError("no"))
        result = shop.restore(f"restore-{index}", target_local=True)
        assert steps(result) == [("overlay", "failed" if index < 2 else "skipped"), ("native", "used")]
        assert result.overlay is None
        assert "dump" not in {verb for verb, _ in shop.kit.units.calls}
    assert overlay_path(shop.tools, shop.loaded.digest).read_bytes() == before


def test_a_stale_overlay_is_replaced_when_that_is_asked_for(shop: Shop) -> None:
    make(shop)
    shop.kit.facts.append(replace(shop.kit.facts[-1], kernel="6.2.0"))
    result = shop.restore(target_local=True)
    assert steps(result) == [("overlay", "skipped"), ("native", "used")]
    assert result.overlay is not None
    assert result.overlay.outcome == "made"
    assert steps(shop.restore("restore-2")) == [("overlay", "used")]


def test_ctrl_c_while_the_overlay_is_made_leaves_the_service(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(shop.kit.units, "dump", interrupted)
    with pytest.raises(OperationInterrupted) as caught:
        shop.restore(target_local=True)
    assert "svc serves; only its overlay was not made" in caught.value.__notes__
    assert shop.kit.units.running() == ("u0",)
    assert answers(shop)


def test_a_failed_overlay_leaves_the_service_alone(shop: Shop) -> None:
    def fail_after_the_first(*arguments: Any, **keywords: Any) -> Any:
        shop.kit.units.fail_next("dump", CriuError("cannot be frozen"))
        return thaw(*arguments, **keywords)

    thaw = shop.kit.units.restore
    shop.kit.units.restore = fail_after_the_first  # type: ignore[method-assign]
    result = shop.restore(target_local=True)
    assert result.overlay is not None
    assert (result.overlay.outcome, result.overlay.reason) == ("failed", "CriuError: cannot be frozen")
    assert shop.kit.units.running() == ("u0",)
    assert answers(shop)
    assert find_overlay(shop.tools, shop.loaded, shop.request()) is None


def test_sleep_and_wake_of_a_service_from_an_overlay(shop: Shop) -> None:
    make(shop)
    shop.restore()
    sleep_service(shop.tools, shop.live("sleep"))
    wake_service(shop.tools, shop.live("wake"))
    assert answers(shop)
    assert shop.tools.services.must_load("svc").rung == "overlay"
    with pytest.raises(ResourceBusy, match="in use by svc"):
        make(shop, "overlay-2")
    sleep_service(shop.tools, shop.live("sleep", "sleep-2"))
    overlay_path(shop.tools, shop.loaded.digest).unlink()
    with pytest.raises(IntegrityError, match="stop the service and restore it again"):
        wake_service(shop.tools, shop.live("wake", "wake-2"))


# -- left aside ---------------------------------------------------------------------------------------

STALE = {
    "kernel": ("target.machines[0].kernel", "6.1.0"),
    "criu_version": ("target.machines[0].criu", "4.2.1"),
    "nvidia_driver": ("target.machines[0].nvidia_driver", "none"),
    "cuda_userspace": ("target.machines[0].cuda_userspace", "none"),
}


@pytest.mark.parametrize("fact", sorted(STALE))
def test_another_driver_version_makes_it_stale(shop: Shop, fact: str) -> None:
    make(shop)
    shop.kit.facts.append(replace(shop.kit.facts[-1], **{fact: "999.1"}))  # type: ignore[arg-type]
    result = shop.restore()
    assert steps(result) == [("overlay", "skipped"), ("native", "used")]
    field, was = STALE[fact]
    reason = result.ladder[0].reason
    assert reason.startswith("it is stale: ")
    assert f"{field}: was another when the overlay was made" in reason
    assert was in reason
    assert "999.1 now" in reason
    assert "coldsnap materialize --overlay" in reason
    assert answers(shop)
    receipt = json.loads((shop.tools.state.receipts / "restore-1.json").read_bytes())
    assert receipt["result"]["ladder"][0]["reason"] == reason


def test_another_machine_makes_it_stale(shop: Shop) -> None:
    make(shop)
    there = replace(shop.tools, host_identity=lambda: Digest.of(b"another"))
    found = find_overlay(there, shop.loaded, shop.request())
    assert found is not None
    assert found.loaded is None
    assert "target.hosts[0]: is another machine" in found.reason


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "writable by all", "a link"])
def test_a_damaged_descriptor_is_left_aside(shop: Shop, damage: str, tmp_path: Path) -> None:
    make(shop)
    path = overlay_path(shop.tools, shop.loaded.digest)
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-100])
    elif damage == "flipped":
        path.write_bytes(data.replace(b'"portable":"sha256:', b'"portable":"sha257:'))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "writable by all":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "real.json")
        path.symlink_to(tmp_path / "real.json")
    result = shop.restore()
    assert steps(result) == [("overlay", "skipped"), ("native", "used")]
    assert result.ladder[0].reason.startswith("it is damaged: ")
    assert answers(shop)


def test_an_overlay_of_another_artifact_is_left_aside(shop: Shop) -> None:
    make(shop)
    path = overlay_path(shop.tools, shop.loaded.digest)
    path.write_bytes(path.read_bytes().replace(str(shop.loaded.digest).encode(), f"sha256:{'1' * 64}".encode()))
    result = shop.restore()
    assert steps(result) == [("overlay", "skipped"), ("native", "used")]
    assert "portable: is another artifact than this one" in result.ladder[0].reason


def test_an_overlay_with_easier_answers_is_left_aside(shop: Shop) -> None:
    """What is right is said by the portable artifact; an overlay that says something else is not believed."""
    make(shop)
    path = overlay_path(shop.tools, shop.loaded.digest)
    document = json.loads(path.read_bytes())
    for binding in document["artifact"]["runtime"]["bindings"]:
        if binding["kind"] == "coldsnap-acceptance":
            binding["answers"] = binding["answers"][:1]
    document["artifact_sha256"] = str(artifact_digest(artifact_from(document["artifact"])))
    path.write_text(json.dumps(document))
    result = shop.restore()
    assert steps(result) == [("overlay", "skipped"), ("native", "used")]
    assert "artifact.acceptance: holds other answers" in result.ladder[0].reason


def test_a_missing_capsule_is_left_aside(shop: Shop) -> None:
    make(shop)
    shutil.rmtree(shop.tools.state.capsules / capsule_of(shop))
    result = shop.restore()
    assert steps(result) == [("overlay", "skipped"), ("native", "used")]
    assert "is not on this machine" in result.ladder[0].reason


def test_a_damaged_capsule_steps_down_before_anything_is_evicted(shop: Shop) -> None:
    shop.restore("restore-1")
    make(shop)
    damage_capsule(shop, capsule_of(shop))
    shop.kit.units.calls.clear()
    result = shop.restore("restore-2")
    assert steps(result) == [("overlay", "failed"), ("native", "used")]
    assert shop.kit.units.calls == [("restore", "u0")]
    assert answers(shop)
    record = shop.tools.services.must_load("svc")
    assert record.overlay is None
    assert record.reasons[0].startswith("overlay failed: ")


@pytest.mark.parametrize("failure", ["thaw", "answers"])
def test_an_overlay_that_fails_steps_down_and_is_left_alone_after_two(shop: Shop, failure: str) -> None:
    make(shop)
    portable = shop.loaded.digest
    own = find_overlay(shop.tools, shop.loaded, shop.request())
    assert own is not None
    assert own.digest is not None
    thaw = shop.kit.program.thaw
    for index in range(2):
        if failure == "thaw":
            shop.kit.units.fail_next("restore", CriuError("no"))
        else:
            shop.kit.program.thaw = _broken_once(shop, thaw)  # type: ignore[method-assign]
        result = shop.restore(f"restore-{index}")
        assert steps(result) == [("overlay", "failed"), ("native", "used")]
        assert answers(shop)
    assert failures_of(shop.tools, portable) is None, "the portable artifact did not fail"
    assert [one.artifact for one in quarantined(shop.tools)] == [own.digest]
    result = shop.restore("restore-9")
    assert steps(result) == [("overlay", "skipped"), ("native", "used")]
    assert "quarantine" in result.ladder[0].reason
    assert clear_artifact(shop.tools, portable) == (own.digest,)
    assert steps(shop.restore("restore-10")) == [("overlay", "used")]


def _broken_once(shop: Shop, thaw: Any) -> Any:
    def broken(*arguments: Any) -> EngineProcess:
        shop.kit.program.thaw = thaw  # type: ignore[method-assign]
        process: EngineProcess = thaw(*arguments)
        process.engine._ranges.pop()
        return process

    return broken


def test_a_missing_pack_leads_from_the_overlay_to_recovery(shop: Shop) -> None:
    make(shop)
    shop.tools.store.path(shop.result.pack_digests[0]).unlink()
    result = shop.restore()
    assert steps(result) == [("overlay", "skipped"), ("native", "skipped"), ("recovery", "used")]
    assert result.ladder[0].reason.startswith("it goes with the packs, and packs are missing")
    assert answers(shop)


def test_an_overlay_serves_where_the_portable_capsule_is_gone(shop: Shop) -> None:
    make(shop)
    shutil.rmtree(shop.tools.state.capsules / shop.loaded.capsule_digest("u0").hex)
    shutil.rmtree(shop.tools.state.prepared / shop.loaded.capsule_digest("u0").hex)
    assert steps(shop.restore()) == [("overlay", "used")]
    assert answers(shop)


def test_packs_that_are_not_the_artifacts_make_no_overlay(shop: Shop) -> None:
    thaw = shop.kit.program.thaw

    def another(spec: UnitSpec, run_dir: Path, frozen: bytes) -> EngineProcess:
        process = thaw(spec, run_dir, frozen)
        process.inner._observer._writes.pop()
        return process

    shop.kit.program.thaw = another  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="exports the pack"):
        make(shop)
    assert not overlay_path(shop.tools, shop.loaded.digest).exists()
    assert shop.kit.units.running() == ()
    assert list(shop.tools.state.staging.iterdir()) == []


def test_wrong_answers_make_no_overlay(shop: Shop) -> None:
    thaw = shop.kit.program.thaw
    shop.kit.program.thaw = _broken_once(shop, thaw)  # type: ignore[method-assign]
    with pytest.raises(AcceptanceFailed):
        make(shop)
    assert not overlay_path(shop.tools, shop.loaded.digest).exists()


# -- kept and taken away ------------------------------------------------------------------------------


def test_gc_keeps_what_an_overlay_needs_and_takes_what_it_left(shop: Shop) -> None:
    make(shop, "overlay-1")
    first = capsule_of(shop)
    labels = [one.label for one in find_references(shop.tools)]
    assert labels == [str(shop.loaded.path), f"the overlay of {shop.loaded.path}"]
    assert plan_tidy(shop.tools).items == ()
    make(shop, "overlay-2")
    run_tidy(shop.tools, plan_tidy(shop.tools))
    assert not (shop.tools.state.capsules / first).exists()
    assert (shop.tools.state.capsules / capsule_of(shop)).is_dir()
    assert steps(shop.restore()) == [("overlay", "used")]


def test_a_dropped_overlay_leaves_its_capsule_to_gc(shop: Shop) -> None:
    make(shop)
    capsule = capsule_of(shop)
    assert drop_overlay(shop.tools, shop.loaded.digest)
    assert not drop_overlay(shop.tools, shop.loaded.digest)
    run_tidy(shop.tools, plan_tidy(shop.tools))
    assert not (shop.tools.state.capsules / capsule).exists()
    assert steps(shop.restore()) == [("native", "used")]


def test_delete_removes_the_overlay_and_the_failures_with_the_artifact(shop: Shop) -> None:
    make(shop)
    capsule = capsule_of(shop)
    shop.restore()
    with pytest.raises(ResourceBusy):
        plan_delete(shop.tools, shop.loaded.path)
    stop_service(shop.tools, "svc")
    shop.kit.units.fail_next("restore", CriuError("no"))
    shop.restore("restore-2")
    stop_service(shop.tools, "svc")
    assert list(shop.tools.state.failures.iterdir())
    run_delete(shop.tools, plan_delete(shop.tools, shop.loaded.path))
    for folder in ("overlays", "capsules", "prepared", "failures"):
        assert list((shop.tools.state.path / folder).iterdir()) == [], folder
    assert not (shop.tools.state.capsules / capsule).exists()


def test_an_overlay_whose_artifact_is_forgotten_is_garbage(shop: Shop) -> None:
    make(shop)
    shop.loaded.path.unlink()
    planned = plan_tidy(shop.tools, forget_missing=True)
    assert {item.kind for item in planned.items} >= {"overlay", "capsule", "pack"}
    run_tidy(shop.tools, planned)
    assert list(shop.tools.state.overlays.iterdir()) == []
    assert list(shop.tools.state.capsules.iterdir()) == []


def test_a_quarantined_portable_artifact_is_refused_whatever_its_overlay(shop: Shop) -> None:
    for index in range(2):
        shop.kit.units.fail_next("restore", CriuError("no"))
        with pytest.raises(CriuError):
            shop.restore(f"restore-{index}")
    with pytest.raises(Refused, match="quarantine"):
        make(shop)
    request = shop.request("restore-9")
    ignoring = restore(shop.tools, shop.loaded, request, host=HOST, port=shop.port, ignore_quarantine=True)
    assert ignoring.rung == "native"
