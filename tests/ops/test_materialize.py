"""Materialize: the missing pack comes back digest for digest, from a tree that serves nobody and never stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coldsnap.capsule.driver import UnitSpec
from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.messages import Verb
from coldsnap.errors import (
    AcceptanceFailed,
    ColdsnapError,
    CriuError,
    IntegrityError,
    OperationInterrupted,
    PayloadRejected,
    Refused,
)
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.materialize import MaterializeResult, materialize, materialize_request, plan_packs
from coldsnap.ops.preparing import prepare
from coldsnap.ops.quarantine import failures_of
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.desk import Desk, EngineProcess, plan
from coldsnap.testing.engine import FakePlugin
from coldsnap.testing.engine_harness import free_port

from .conftest import Shop  # isort: skip


def run(shop: Shop, operation_id: str = "materialize-1") -> MaterializeResult:
    return materialize(shop.tools, shop.loaded, materialize_request(shop.loaded, operation_id=operation_id))


def outcomes(result: MaterializeResult) -> list[str]:
    return [pack.outcome for pack in result.packs]


def nothing_stays(shop: Shop, *, services: tuple[str, ...] = ()) -> None:
    assert shop.kit.units.running() == (("u0",) * len(services))
    assert shop.tools.services.names() == services
    assert list(shop.tools.state.staging.iterdir()) == []
    with shop.tools.state.not_in_use():
        pass


def on_thaw(shop: Shop, act: Callable[[EngineProcess], None]) -> None:
    thaw = shop.kit.program.thaw

    def thawed(spec: UnitSpec, run_dir: Path, frozen: bytes) -> EngineProcess:
        process = thaw(spec, run_dir, frozen)
        act(process)
        return process

    shop.kit.program.thaw = thawed  # type: ignore[method-assign]


def test_a_missing_pack_is_written_with_the_identical_digest(shop: Shop) -> None:
    before = shop.pack.read_bytes()
    shop.pack.unlink()
    result = run(shop)
    assert shop.pack.read_bytes() == before
    assert outcomes(result) == ["written"]
    assert result.source == "recovery"
    assert {"gates", "unpack", "thaw", "hydrate", "accept", "materialize", "verify"} <= set(result.seconds)
    assert shop.kit.units.calls == [("restore", "u0")]
    nothing_stays(shop)
    assert shop.restore().source == "native"


def test_a_pack_that_is_here_costs_no_restore(shop: Shop) -> None:
    result = run(shop)
    assert (outcomes(result), result.source) == (["already here"], None)
    assert shop.kit.units.calls == []
    nothing_stays(shop)


def test_a_damaged_pack_is_set_aside_and_written_again(shop: Shop) -> None:
    before = shop.pack.read_bytes()
    shop.pack.chmod(0o600)
    shop.pack.write_bytes(before[:-1] + b"\x01")
    assert outcomes(run(shop)) == ["written"]
    assert shop.pack.read_bytes() == before
    assert (shop.tools.state.quarantine / f"{shop.pack.name}.0").is_file()


def test_a_link_where_the_pack_should_be_is_left_alone(shop: Shop, tmp_path: Path) -> None:
    shop.pack.rename(tmp_path / "real")
    shop.pack.symlink_to(tmp_path / "real")
    with pytest.raises(PayloadRejected, match="links are not followed"):
        run(shop)
    assert shop.pack.is_symlink()
    nothing_stays(shop)


def test_a_running_service_is_not_touched(shop: Shop) -> None:
    shop.restore()
    record = shop.tools.services.must_load("svc")
    shop.pack.unlink()
    assert outcomes(run(shop)) == ["written"]
    assert shop.tools.services.must_load("svc") == record
    nothing_stays(shop, services=("svc",))


def test_a_dry_run_changes_nothing(shop: Shop) -> None:
    request = materialize_request(shop.loaded, operation_id="materialize-1")
    shop.pack.unlink()
    planned = plan_packs(shop.tools, shop.loaded, request, overlay=True)
    size = next(iter(shop.loaded.packs().values())).bytes
    assert planned.document() == {
        "packs": [
            {
                "owner": "worker/w0",
                "sha256": str(shop.result.pack_digests[0]),
                "bytes": size,
                "outcome": "to be written",
            }
        ],
        "bytes": size,
        "temporary_restore": "recovery",
        "overlay": "to be made",
    }
    assert shop.kit.units.calls == []
    assert not shop.pack.exists()
    assert not (shop.tools.state.receipts / "materialize-1.json").exists()


def test_the_request_is_a_recovery_restore_under_a_name_of_its_own(shop: Shop) -> None:
    request = materialize_request(shop.loaded, operation_id="materialize-1")
    assert request.operation.value == "restore"
    assert request.workload.cluster_id == "materialize-1"
    assert request.policy.weights.mode.value == "recovery"
    assert request.policy.weights.native.materialize.value == "off"


def test_a_receipt_is_kept(shop: Shop) -> None:
    shop.pack.unlink()
    result = run(shop)
    receipt = json.loads((shop.tools.state.receipts / "materialize-1.json").read_bytes())
    assert receipt["state"] == "succeeded"
    assert receipt["result"]["packs"] == [pack.document() for pack in result.packs]


def test_wrong_answers_write_no_pack(shop: Shop) -> None:
    shop.pack.unlink()
    on_thaw(shop, lambda process: process.engine._ranges.pop() and None)
    with pytest.raises(AcceptanceFailed):
        run(shop)
    assert not shop.pack.exists()
    nothing_stays(shop)
    record = failures_of(shop.tools, shop.loaded.digest)
    assert record is not None
    assert [one.error for one in record.failures] == ["AcceptanceFailed"]


@pytest.mark.parametrize("verb", ["thaw", "write"])
def test_an_interruption_stops_the_tree(shop: Shop, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    shop.pack.unlink()
    if verb == "thaw":
        restore = shop.kit.units.restore

        def interrupted(*arguments: object, **keywords: object) -> object:
            restore(*arguments, **keywords)  # type: ignore[arg-type]
            raise KeyboardInterrupt

        monkeypatch.setattr(shop.kit.units, "restore", interrupted)
    else:
        from coldsnap.ops.workers import LiveWorker

        call = LiveWorker.call

        def stopped(self: LiveWorker, verb: Verb, *arguments: object, **keywords: object) -> object:
            if verb is Verb.MATERIALIZE:
                raise KeyboardInterrupt
            return call(self, verb, *arguments, **keywords)  # type: ignore[arg-type]

        monkeypatch.setattr(LiveWorker, "call", stopped)
    with pytest.raises(OperationInterrupted):
        run(shop)
    assert not shop.pack.exists()
    if verb == "thaw":
        shop.kit.units.end_all()  # the fake's unit was never handed over
    nothing_stays(shop)


def test_a_tree_that_does_not_come_back_writes_nothing_and_counts(shop: Shop) -> None:
    shop.pack.unlink()
    shop.kit.units.fail_next("restore", CriuError("no"))
    with pytest.raises(CriuError):
        run(shop)
    nothing_stays(shop)
    record = failures_of(shop.tools, shop.loaded.digest)
    assert record is not None
    assert [(one.operation_id, one.rung.value) for one in record.failures] == [("materialize-1", "recovery")]


def test_a_writer_that_wrote_something_else_is_found_out(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from coldsnap.ops.workers import LiveWorker

    call = LiveWorker.call

    def lying(self: LiveWorker, verb: Verb, *arguments: object, **keywords: object) -> object:
        reply: object = call(self, verb, *arguments, **keywords)  # type: ignore[arg-type]
        if verb is Verb.MATERIALIZE:
            path = shop.tools.store.path(shop.result.pack_digests[0])
            path.chmod(0o600)
            data = bytearray(path.read_bytes())
            data[0] ^= 1
            path.write_bytes(data)
        return reply

    shop.pack.unlink()
    monkeypatch.setattr(LiveWorker, "call", lying)
    with pytest.raises(IntegrityError, match="has the digest"):
        run(shop)
    nothing_stays(shop)


class NoWriter(FakePlugin):
    """An engine whose integration has no writer of packs."""

    supports = replace(FakePlugin.supports, materialize=frozenset({"off"}))


def refusals(shop: Shop, monkeypatch: pytest.MonkeyPatch, why: str) -> tuple[Shop, str]:
    if why == "writer":
        shop.pack.unlink()
        return replace(shop, kit=_with_engines(shop.kit)), "policy.weights.native.materialize"
    if why == "packs":
        document = artifact_document(shop.loaded.artifact)
        del document["weights"]["model_payloads"], document["weights"]["native"]
        path = shop.loaded.path.with_name("without.json")
        path.write_bytes(artifact_bytes(artifact_from(document)))
        return replace(shop, loaded=load_artifact(path)), "weights.model_payloads"
    prepare(shop.tools, shop.loaded, shop.request("prepare-1"))  # so that unpacking needs no room
    shop.pack.unlink()
    whole = shutil.disk_usage(shop.tools.state.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: whole._replace(free=64 * 1024 * 1024))
    return shop, "space"


def _with_engines(kit: Desk) -> Desk:
    return replace(kit, tools=replace(kit.tools, engines={FakePlugin.name: NoWriter()}))


@pytest.mark.parametrize("why", ["writer", "packs", "space"])
def test_what_cannot_be_materialized_is_refused_with_field_value_and_way_out(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    shop, field = refusals(shop, monkeypatch, why)
    with pytest.raises(Refused) as caught:
        run(shop)
    assert [problem.field for problem in caught.value.problems] == [field]
    assert all(problem.value and problem.cure for problem in caught.value.problems)
    assert shop.kit.units.calls == []
    nothing_stays(shop)


def test_a_changed_checkpoint_writes_no_pack(kit: Desk, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "mine")
    planned = plan(folder, tmp_path / "mine.json")
    result = capture(kit.tools, planned.request, planned.model)
    shop = Shop(kit=kit, result=result, loaded=load_artifact(result.artifact_path), port=free_port())
    shop.pack.unlink()
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ColdsnapError):
        run(shop)
    assert not shop.pack.exists()
    assert failures_of(kit.tools, shop.loaded.digest) is None, "a changed checkpoint is not the artifact's failure"
    nothing_stays(shop)


def test_a_quarantined_artifact_is_not_materialized(shop: Shop) -> None:
    shop.pack.unlink()
    for index in range(2):
        shop.kit.units.fail_next("restore", CriuError("no"))
        with pytest.raises(CriuError):
            run(shop, f"materialize-{index}")
    with pytest.raises(Refused, match="quarantine"):
        run(shop, "materialize-9")
