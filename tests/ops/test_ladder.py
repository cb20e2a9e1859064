"""Down the ladder with real verbs and shipped fakes: the order, each step's reason, and what a failure leaves."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.driver import UnitSpec
from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.request import request_document, request_from
from coldsnap.errors import (
    AcceptanceFailed,
    ColdsnapError,
    CriuError,
    EngineError,
    OutOfSpace,
    PayloadRejected,
    Refused,
    ResourceBusy,
    UserError,
)
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.ladder import plan_route
from coldsnap.ops.live import artifact_of, service_status, sleep_service, stop_service, wake_service
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.quarantine import artifact_digest_of, clear_artifact, failures_of, quarantined
from coldsnap.ops.restore import RestoreResult, restore
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.desk import Desk, EngineProcess, plan
from coldsnap.testing.engine_harness import free_port

from .conftest import HOST, Shop  # isort: skip


@pytest.fixture
def cold_shop(kit: Desk, model: Path, tmp_path: Path) -> Shop:
    """A capture whose recipe allows a cold start."""
    planned = plan(model, tmp_path / "artifact.json", cold_start=True)
    result = capture(kit.tools, planned.request, planned.model)
    kit.units.calls.clear()
    return Shop(kit=kit, result=result, loaded=load_artifact(result.artifact_path), port=free_port())


def listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def flip(path: Path, at: int = 5000) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def steps(result: RestoreResult) -> list[tuple[str, str]]:
    return [(step.rung.value, step.outcome.value) for step in result.ladder]


def kept(shop: Shop, operation_id: str) -> list[tuple[str, str]]:
    receipt = json.loads((shop.tools.state.receipts / f"{operation_id}.json").read_bytes())
    return [(step["rung"], step["outcome"]) for step in receipt["result"]["ladder"]]


def calls(shop: Shop, verb: str) -> int:
    return sum(one == verb for one, _ in shop.kit.units.calls)


def leaves_nothing(shop: Shop) -> None:
    assert shop.kit.units.running() == ()
    assert shop.tools.services.names() == ()
    assert not listening(shop.port)
    assert list(shop.tools.state.staging.iterdir()) == []
    assert calls(shop, "dump") == 0, "a failed restore never captures"
    with shop.tools.services.lock("svc"), shop.tools.state.not_in_use():
        pass


def answers(shop: Shop) -> bool:
    prompts, expected = shop.loaded.acceptance()
    return OutsideClient(host=HOST, port=shop.port).complete(prompts, timeout_s=60) == expected


def damage_thaw(shop: Shop, damage: Callable[[EngineProcess], None]) -> None:
    thaw = shop.kit.program.thaw

    def damaged(spec: UnitSpec, run_dir: Path, frozen: bytes) -> EngineProcess:
        process = thaw(spec, run_dir, frozen)
        damage(process)
        return process

    shop.kit.program.thaw = damaged  # type: ignore[method-assign]


def wrong_answers(process: EngineProcess) -> None:
    process.engine._ranges.pop()


# -- native and recovery ------------------------------------------------------------------------------


def test_a_restore_that_succeeds_has_one_step(shop: Shop) -> None:
    result = shop.restore()
    assert steps(result) == [("native", "used")]
    assert (result.rung, result.source, result.reason) == ("native", "native", "every pack is here")
    assert kept(shop, "restore-1") == [("native", "used")]
    assert service_status(shop.tools, "svc").document()["rung"] == "native"


def test_a_missing_pack_is_skipped_with_its_reason(shop: Shop) -> None:
    shop.pack.unlink()
    result = shop.restore()
    assert steps(result) == [("native", "skipped"), ("recovery", "used")]
    assert {step.reason for step in result.ladder} == {"packs are missing for worker/w0, and no repository is named"}
    assert answers(shop)


def test_a_pack_that_vanishes_on_the_way_leads_to_recovery(shop: Shop) -> None:
    def lose(process: EngineProcess) -> None:
        shop.pack.unlink(missing_ok=True)

    damage_thaw(shop, lose)
    result = shop.restore()
    assert steps(result) == [("native", "failed"), ("recovery", "used")]
    assert result.reason.startswith("native failed: ")
    assert "No such file" in result.reason
    assert calls(shop, "restore") == 2
    assert shop.kit.units.running() == ("u0",), "the tree of the failed step is gone"
    assert answers(shop)
    assert kept(shop, "restore-1") == [("native", "failed"), ("recovery", "used")]
    assert result.reason in shop.tools.services.must_load("svc").reasons
    assert failures_of(shop.tools, shop.loaded.digest) is None, "it is not the artifact's failure"


@pytest.mark.parametrize("mode", ["native", "auto", "cache-only-auto"])
@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_a_damaged_pack_is_an_error_in_every_mode_and_then_counts_as_missing(
    shop: Shop, mode: str, damage: str
) -> None:
    path = shop.pack
    if damage == "flipped":
        flip(path)
    else:
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(PayloadRejected) as caught:
        shop.restore("restore-1", weights=mode)
    leaves_nothing(shop)
    assert calls(shop, "restore") == 0, "nothing was started for it"
    aside = shop.tools.state.quarantine / f"{path.name}.0"
    assert aside.is_file()
    assert not path.exists()
    (note,) = [note for note in caught.value.__notes__ if "damaged pack" in note]
    assert f"moved to {aside} and counts as missing now" in note
    assert failures_of(shop.tools, shop.loaded.digest) is None, "a damaged disk is not the artifact's failure"
    if mode == "native":
        with pytest.raises(Refused, match="packs are missing"):
            shop.restore("restore-2", weights=mode)
    else:
        assert shop.restore("restore-2", weights=mode).source == "recovery"
        assert answers(shop)


def test_mode_recovery_looks_at_no_pack(shop: Shop) -> None:
    flip(shop.pack)
    result = shop.restore(weights="recovery")
    assert steps(result) == [("native", "skipped"), ("recovery", "used")]
    assert result.reason == "policy.weights.mode is recovery"
    assert shop.pack.is_file()


def test_a_link_in_place_of_a_pack_is_an_error_and_stays(shop: Shop, tmp_path: Path) -> None:
    path = shop.pack
    path.rename(tmp_path / "elsewhere.pack")
    path.symlink_to(tmp_path / "elsewhere.pack")
    with pytest.raises(PayloadRejected, match="links are not followed"):
        shop.restore()
    assert path.is_symlink()
    leaves_nothing(shop)


def test_a_set_aside_pack_is_proved_again_first(shop: Shop) -> None:
    digest = shop.result.pack_digests[0]
    size = next(iter(shop.loaded.packs().values())).bytes
    assert shop.tools.store.set_aside(digest, size) is None
    assert shop.pack.is_file()


def test_mode_native_does_not_step_down_to_recovery(shop: Shop) -> None:
    damage_thaw(shop, lambda process: shop.pack.unlink(missing_ok=True))
    with pytest.raises(PayloadRejected):
        shop.restore(weights="native")
    assert kept(shop, "restore-1") == [("native", "failed"), ("recovery", "skipped"), ("cold", "skipped")]
    leaves_nothing(shop)


# -- staged packs -------------------------------------------------------------------------------------


def staging(shop: Shop, path: Path, mode: str = "auto", **changes: Any) -> Any:
    pack = next(iter(shop.loaded.packs().values()))
    entry = {"worker": "w0", "path": str(path), "bytes": pack.bytes, "sha256": str(pack.sha256), **changes}
    document = request_document(shop.request())
    document["policy"]["weights"] |= {"mode": mode}
    document["policy"]["weights"]["native"] |= {"staged": [entry]}
    return request_from(document)


def run(shop: Shop, request: Any) -> RestoreResult:
    return restore(shop.tools, shop.loaded, request, host=HOST, port=shop.port)


@pytest.fixture
def staged(shop: Shop, tmp_path: Path) -> Path:
    """The pack as a file of the caller's; the store has it no more."""
    path = tmp_path / "staged.bin"
    shutil.copyfile(shop.pack, path)
    shop.pack.unlink()
    return path


def test_a_staged_pack_is_used_where_it_lies(shop: Shop, staged: Path) -> None:
    result = run(shop, staging(shop, staged, "native"))
    assert result.source == "native"
    assert not shop.pack.exists()
    assert answers(shop)


@pytest.mark.parametrize("mode", ["native", "auto", "cache-only-auto", "recovery"])
@pytest.mark.parametrize("wrong", ["declared digest", "declared size", "size", "absent", "link"])
def test_a_staged_pack_of_another_identity_is_refused_in_every_mode(
    shop: Shop, staged: Path, mode: str, wrong: str
) -> None:
    changes: dict[str, object] = {}
    if wrong == "declared digest":
        changes = {"sha256": f"sha256:{'a' * 64}"}
    elif wrong == "declared size":
        changes = {"bytes": 4096}
    elif wrong == "size":
        staged.write_bytes(staged.read_bytes()[:-1])
    elif wrong == "absent":
        staged.unlink()
    else:
        staged.rename(staged.with_suffix(".real"))
        staged.symlink_to(staged.with_suffix(".real"))
    with pytest.raises(Refused) as caught:
        run(shop, staging(shop, staged, mode, **changes))
    assert all(problem.value and problem.cure for problem in caught.value.problems)
    leaves_nothing(shop)


@pytest.mark.parametrize("mode", ["native", "auto", "cache-only-auto"])
def test_a_staged_pack_of_other_bytes_is_an_error_and_is_left_alone(shop: Shop, staged: Path, mode: str) -> None:
    flip(staged)
    with pytest.raises(PayloadRejected, match="damaged"):
        run(shop, staging(shop, staged, mode))
    assert staged.is_file()
    assert list(shop.tools.state.quarantine.iterdir()) == []
    leaves_nothing(shop)


# -- cold start ---------------------------------------------------------------------------------------


def test_without_the_recipes_leave_nothing_starts_cold(shop: Shop) -> None:
    shop.kit.units.fail_next("restore", CriuError("no"))
    with pytest.raises(CriuError) as caught:
        shop.restore()
    assert calls(shop, "launch") == 0
    leaves_nothing(shop)
    (step,) = [step for step in caught.value.facts["ladder"] if step["rung"] == "cold"]  # type: ignore[attr-defined]
    assert step == {"rung": "cold", "outcome": "skipped", "reason": "the recipe does not allow a cold start"}


def test_a_tree_that_does_not_come_back_leads_to_a_cold_start(cold_shop: Shop) -> None:
    cold_shop.kit.units.fail_next("restore", CriuError("no"))
    result = cold_shop.restore()
    assert steps(result) == [("native", "failed"), ("recovery", "skipped"), ("cold", "used")]
    assert (result.source, result.rung, result.state) == ("cold", "cold", "ready")
    assert result.reason == "native failed: no"
    assert cold_shop.kit.units.calls == [("restore", "u0"), ("launch", "u0")]
    assert answers(cold_shop)
    record = cold_shop.tools.services.must_load("svc")
    assert (record.source, record.rung, record.state, record.artifact_path) == ("cold", "cold", "ready", None)
    assert record.reasons == ("native failed: no",)
    cold_shop.kit.units.controller_dies()
    assert cold_shop.kit.units.running() == ("u0",), "a released unit outlives its controller"
    stop_service(cold_shop.tools, "svc")


def test_a_service_whose_secret_is_in_its_image_alone_never_starts_without_it(cold_shop: Shop, tmp_path: Path) -> None:
    """With the key that it asks its callers for: a server started cold would be open to anybody."""
    document = artifact_document(cold_shop.loaded.artifact)
    for binding in document["runtime"]["bindings"]:
        if binding["kind"] == "coldsnap-hygiene":
            binding.update(allowed_secrets=["VLLM_API_KEY"], publishable=False)
    path = tmp_path / "guarded.json"
    path.write_bytes(artifact_bytes(artifact_from(document)))
    shop = replace(cold_shop, loaded=load_artifact(path))
    shop.kit.units.fail_next("restore", CriuError("no"))
    with pytest.raises(CriuError) as caught:
        shop.restore()
    assert calls(shop, "launch") == 0
    leaves_nothing(shop)
    (step,) = [step for step in caught.value.facts["ladder"] if step["rung"] == "cold"]  # type: ignore[attr-defined]
    reason = "VLLM_API_KEY is in the process image alone, and a process that starts cold is without"
    assert step == {"rung": "cold", "outcome": "skipped", "reason": reason}


def test_wrong_answers_of_a_restored_tree_lead_to_a_cold_start(cold_shop: Shop) -> None:
    damage_thaw(cold_shop, wrong_answers)
    result = cold_shop.restore()
    assert steps(result) == [("native", "failed"), ("recovery", "skipped"), ("cold", "used")]
    assert answers(cold_shop)


def test_a_cold_start_is_held_to_the_captured_answers(cold_shop: Shop) -> None:
    damage_thaw(cold_shop, wrong_answers)
    start = cold_shop.kit.program.start

    def broken(spec: UnitSpec, run_dir: Path) -> EngineProcess:
        process = start(spec, run_dir)
        wrong_answers(process)
        return process

    cold_shop.kit.program.start = broken  # type: ignore[method-assign]
    with pytest.raises(AcceptanceFailed) as caught:
        cold_shop.restore()
    assert "native failed: " in "\n".join(caught.value.__notes__)
    assert kept(cold_shop, "restore-1")[-1] == ("cold", "failed")
    leaves_nothing(cold_shop)


@pytest.mark.parametrize("closed", ["feature", "capsule"])
def test_a_tree_that_may_not_be_restored_here_leads_to_a_cold_start(cold_shop: Shop, closed: str) -> None:
    if closed == "feature":
        cold_shop.kit.failed["criu-process-tree"] = "no CRIU here"
    else:
        digest = cold_shop.loaded.capsule_digest("u0").hex
        shutil.rmtree(cold_shop.tools.state.capsules / digest)
        shutil.rmtree(cold_shop.tools.state.prepared / digest, ignore_errors=True)
    result = cold_shop.restore()
    assert steps(result) == [("native", "skipped"), ("cold", "used")]
    assert ("no CRIU here" if closed == "feature" else "is not on this machine") in result.reason
    assert calls(cold_shop, "restore") == 0


@pytest.mark.parametrize("closed", ["port", "launch", "weights"])
def test_what_every_rung_needs_starts_nothing_cold(cold_shop: Shop, closed: str) -> None:
    changes: dict[str, Any] = {}
    if closed == "weights":
        cold_shop.pack.unlink()
        changes = {"weights": "native"}
    request = cold_shop.request(**changes)
    if closed == "launch":
        document = request_document(request)
        document["launch"]["units"][0]["command"].append("--another")
        request = request_from(document)
    with contextlib.ExitStack() as stack:
        if closed == "port":
            stack.enter_context(socket.create_server((HOST, cold_shop.port)))
        with pytest.raises(Refused) as caught:
            restore(cold_shop.tools, cold_shop.loaded, request, host=HOST, port=cold_shop.port)
    assert caught.value.facts["gates"] == [closed]
    assert cold_shop.kit.units.calls == []


@pytest.mark.parametrize("error", [OutOfSpace("disk"), ResourceBusy("address")])
def test_what_the_machine_did_ends_at_once_and_does_not_count(cold_shop: Shop, error: ColdsnapError) -> None:
    cold_shop.kit.units.fail_next("restore", error)
    with pytest.raises(type(error)):
        cold_shop.restore()
    assert calls(cold_shop, "launch") == 0
    assert failures_of(cold_shop.tools, cold_shop.loaded.digest) is None
    leaves_nothing(cold_shop)


def test_warm_never_starts_cold(cold_shop: Shop) -> None:
    cold_shop.kit.units.fail_next("restore", CriuError("no"))
    with pytest.raises(CriuError):
        cold_shop.restore(warm=True)
    assert calls(cold_shop, "launch") == 0
    leaves_nothing(cold_shop)


def test_a_changed_checkpoint_is_served_by_nobody(kit: Desk, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "mine")
    planned = plan(folder, tmp_path / "mine.json", cold_start=True)
    result = capture(kit.tools, planned.request, planned.model)
    shop = Shop(kit=kit, result=result, loaded=load_artifact(result.artifact_path), port=free_port())
    kit.units.calls.clear()
    flip(next(folder.glob("*.safetensors")), -1)
    kit.units.fail_next("restore", CriuError("no"))
    with pytest.raises(Refused, match="the model of the request"):
        shop.restore()
    assert kept(shop, "restore-1") == [("native", "failed"), ("recovery", "skipped"), ("cold", "failed")]
    assert calls(shop, "launch") == 0
    leaves_nothing(shop)


def test_a_cold_service_has_nothing_to_sleep_to(cold_shop: Shop) -> None:
    cold_shop.kit.units.fail_next("restore", CriuError("no"))
    cold_shop.restore()
    with pytest.raises(UserError, match="was started cold"):
        artifact_of(cold_shop.tools.services.must_load("svc"))
    with pytest.raises(UserError, match="was started cold"):
        sleep_service(cold_shop.tools, cold_shop.live("sleep"))
    assert listening(cold_shop.port)
    cold_shop.restore("restore-2")
    assert service_status(cold_shop.tools, "svc").document()["source"] == "native"


def test_a_cold_start_evicts_like_any_other(cold_shop: Shop) -> None:
    cold_shop.restore("restore-1")
    cold_shop.kit.units.fail_next("restore", CriuError("no"))
    result = cold_shop.restore("restore-2")
    assert (result.evicted, result.source) == (True, "cold")
    assert cold_shop.kit.units.running() == ("u0",)


# -- quarantine ---------------------------------------------------------------------------------------


def fail(shop: Shop, operation_id: str, error: ColdsnapError | None = None) -> ColdsnapError:
    shop.kit.units.fail_next("restore", error or CriuError("no"))
    with pytest.raises(ColdsnapError) as caught:
        shop.restore(operation_id)
    return caught.value


def test_two_failures_quarantine_an_artifact_until_it_is_cleared(shop: Shop) -> None:
    fail(shop, "restore-1")
    assert quarantined(shop.tools) == ()
    second = fail(shop, "restore-2", EngineError("it died"))
    assert "in quarantine now" in "\n".join(second.__notes__)
    (record,) = quarantined(shop.tools)
    assert [(one.operation_id, one.error, one.reason) for one in record.failures] == [
        ("restore-1", "CriuError", "no"),
        ("restore-2", "EngineError", "it died"),
    ]
    shop.kit.units.calls.clear()
    with pytest.raises(Refused) as caught:
        shop.restore("restore-3")
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("quarantine", str(shop.loaded.digest))
    assert "it died" in problem.message
    assert "clear-quarantine" in str(problem.cure)
    assert shop.kit.units.calls == []
    assert clear_artifact(shop.tools, shop.loaded.digest) == (shop.loaded.digest,)
    assert clear_artifact(shop.tools, shop.loaded.digest) == ()
    assert shop.restore("restore-4").source == "native"


def test_a_success_forgets_earlier_failures(shop: Shop) -> None:
    fail(shop, "restore-1")
    shop.restore("restore-2")
    fail(shop, "restore-3")
    assert quarantined(shop.tools) == ()


def test_ignoring_the_quarantine_clears_it_when_it_succeeds(shop: Shop) -> None:
    for operation_id in ("restore-1", "restore-2"):
        fail(shop, operation_id)
    shop.kit.units.fail_next("restore", CriuError("still"))
    ignoring = {"host": HOST, "port": shop.port, "ignore_quarantine": True}
    with pytest.raises(CriuError):
        restore(shop.tools, shop.loaded, shop.request("restore-3"), **ignoring)  # type: ignore[arg-type]
    assert len(quarantined(shop.tools)[0].failures) == 3
    restore(shop.tools, shop.loaded, shop.request("restore-4"), **ignoring)  # type: ignore[arg-type]
    assert quarantined(shop.tools) == ()
    assert shop.restore("restore-5").source == "native"


def test_a_quarantined_artifact_may_start_cold(cold_shop: Shop) -> None:
    for operation_id in ("restore-1", "restore-2"):
        cold_shop.kit.units.fail_next("restore", CriuError("no"))
        assert cold_shop.restore(operation_id).source == "cold"
    cold_shop.kit.units.calls.clear()
    result = cold_shop.restore("restore-3")
    assert steps(result) == [("native", "skipped"), ("cold", "used")]
    assert "failed 2 times here" in result.reason
    assert calls(cold_shop, "restore") == 0


def test_a_wake_with_wrong_answers_counts(shop: Shop) -> None:
    shop.restore()
    sleep_service(shop.tools, shop.live("sleep"))
    wrong_answers(shop.kit.program.started[-1])
    with pytest.raises(AcceptanceFailed):
        wake_service(shop.tools, shop.live("wake"))
    record = failures_of(shop.tools, shop.loaded.digest)
    assert record is not None
    assert [(one.operation_id, one.error) for one in record.failures] == [("wake-1", "AcceptanceFailed")]
    leaves_nothing(shop)


def test_a_running_service_of_a_quarantined_artifact_still_wakes(shop: Shop) -> None:
    shop.restore()
    for operation_id in ("a-1", "a-2"):
        shop.kit.units.fail_next("restore", CriuError("no"))
        request = shop.request(operation_id, name="other", port=free_port())
        with pytest.raises(CriuError):
            restore(shop.tools, shop.loaded, request, host=HOST, port=free_port())
    assert quarantined(shop.tools)
    sleep_service(shop.tools, shop.live("sleep", "sleep-9"))
    wake_service(shop.tools, shop.live("wake", "wake-9"))
    assert answers(shop)


def test_a_copied_state_root_brings_no_quarantine(shop: Shop) -> None:
    for operation_id in ("restore-1", "restore-2"):
        fail(shop, operation_id)
    other = replace(shop.tools, host_identity=lambda: shop.loaded.digest)
    assert failures_of(other, shop.loaded.digest) is None
    assert quarantined(other) == ()


def test_an_unreadable_record_closes_the_gate_and_can_be_cleared(shop: Shop) -> None:
    path = shop.tools.state.failures / f"{shop.loaded.digest.hex}.json"
    path.write_bytes(b"{")
    path.chmod(0o600)
    with pytest.raises(Refused) as caught:
        plan_route(shop.tools, shop.loaded, shop.request(), address=None)
    assert caught.value.facts["gates"] == ["quarantine"]
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("quarantine", str(path))
    assert clear_artifact(shop.tools, shop.loaded.digest)
    assert shop.restore().state == "ready"


def test_an_artifact_is_named_by_its_file_its_digest_or_its_overlay(shop: Shop) -> None:
    digest = shop.loaded.digest
    overlay = shop.tools.state.overlays / f"{digest.hex}.json"
    named = [artifact_digest_of(shop.tools, text) for text in (str(shop.loaded.path), str(digest), str(overlay))]
    assert named == [digest] * 3
    with pytest.raises(UserError, match="cannot read the artifact"):
        artifact_digest_of(shop.tools, str(shop.tools.state.overlays / "other.json"))


def test_the_negative_control_neither_steps_down_nor_counts(cold_shop: Shop) -> None:
    with pytest.raises(AcceptanceFailed):
        cold_shop.restore(negative_control=True)
    assert calls(cold_shop, "launch") == 0
    assert failures_of(cold_shop.tools, cold_shop.loaded.digest) is None
    leaves_nothing(cold_shop)
