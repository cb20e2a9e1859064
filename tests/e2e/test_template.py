"""Capture a template before it knows of any device, and place it anew: a fake GPU, everything else real."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from coldsnap.core.bindings import cuda_states_of
from coldsnap.core.drivers import DriverId, FeatureResult, FeatureState
from coldsnap.core.messages import Answer, WorkerState
from coldsnap.errors import AcceptanceFailed, InvalidDocument, Refused
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.live import service_status
from coldsnap.ops.materialize import materialize, materialize_request
from coldsnap.ops.overlay import drop_overlay, read_overlay
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.gpu import GpuRack
from coldsnap.testing.source import running_source
from coldsnap.testing.stand import UNSEEN, Stand

from .conftest import TENSORS  # isort: skip

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def stand(criu: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A template of the fake engine, whose source was placed on a fake GPU, answered, and ended."""
    folder = tmp_path_factory.mktemp("template-stand")
    model = write_checkpoint(folder / "model", tensors=TENSORS)
    one = Stand(folder=folder, model=model, driver=DriverId.N580, gpus=GpuRack.make(folder / "gpus", 2))
    one.capture()
    yield one
    one.stop_all()
    one.tools.host.close()


def test_the_artifact_holds_no_cuda_state(stand: Stand, rack: GpuRack) -> None:
    artifact = stand.loaded.artifact
    assert cuda_states_of(artifact.runtime.bindings) == ()
    assert artifact.snapshot_driver.capture_boundary == "pre-cuda-process-template"
    assert (artifact.graph.policy.value, artifact.launch.units[0].devices) == ("recreate-from-plan", ("0",))
    assert rack.users() == ()


def test_a_restore_gives_the_cold_answers_on_whichever_gpu(
    stand: Stand, expected: tuple[Answer, ...], rack: GpuRack
) -> None:
    for number, gpu in enumerate(rack.inventory.gpus):
        result = stand.restore(f"restore-{number}", devices=(gpu.uuid,))
        assert (result.source, result.rung) == ("native", "native")
        assert stand.ask(UNSEEN) == expected
        assert rack.users() == rack.users_of(gpu) != ()
        stand.stop_all()
        assert rack.users() == ()


def test_it_needs_no_pack(stand: Stand, expected: tuple[Answer, ...]) -> None:
    assert stand.restore("recovery-1", weights="recovery").source == "recovery"
    assert stand.ask(UNSEEN) == expected


@pytest.mark.parametrize("weights", ["native", "recovery"])
def test_once_placed_it_sleeps_and_wakes_in_place(
    stand: Stand, expected: tuple[Answer, ...], rack: GpuRack, weights: str
) -> None:
    stand.restore(f"sleep-0-{weights}", weights=weights)
    pids, users = service_status(stand.tools, "svc").pids, rack.users()
    stand.sleep(f"sleep-1-{weights}")
    asleep = service_status(stand.tools, "svc").workers["w0"]
    assert not isinstance(asleep, str)
    assert (asleep.state, asleep.mapped_bytes) == (WorkerState.ASLEEP, 0)
    stand.wake(f"sleep-2-{weights}")
    assert (service_status(stand.tools, "svc").pids, rack.users()) == (pids, users)
    assert stand.ask(UNSEEN) == expected


def test_warm_is_refused_where_there_is_nothing_to_keep_warm(stand: Stand) -> None:
    with pytest.raises(InvalidDocument, match="impossible with driver n580"):
        stand.restore("warm-1", warm=True)


def test_a_restore_without_hydration_is_caught(stand: Stand, rack: GpuRack) -> None:
    with pytest.raises(AcceptanceFailed):
        stand.restore("negative-1", negative_control=True)
    assert rack.users() == ()


def test_a_missing_pack_is_written_again_from_a_placed_template(stand: Stand, expected: tuple[Answer, ...]) -> None:
    pack = stand.tools.store.path(stand.result.pack_digests[0])
    before = pack.read_bytes()
    pack.unlink()
    result = materialize(stand.tools, stand.loaded, materialize_request(stand.loaded, operation_id="again-1"))
    assert [one.outcome for one in result.packs] == ["written"]
    assert pack.read_bytes() == before
    stand.restore("again-2")
    assert stand.ask(UNSEEN) == expected


def test_an_overlay_keeps_what_the_template_became_here(
    stand: Stand, expected: tuple[Answer, ...], rack: GpuRack
) -> None:
    try:
        made = materialize(
            stand.tools, stand.loaded, materialize_request(stand.loaded, operation_id="overlay-1"), overlay=True
        ).overlay
        assert made is not None
        assert made.outcome == "made"
        assert rack.users() == ()
        own = read_overlay(stand.tools, stand.loaded.digest).artifact
        assert own.snapshot_driver.id is DriverId.N610
        (state,) = cuda_states_of(own.runtime.bindings)
        assert state.devices == (rack.inventory.gpus[0].uuid,)
        packs = stand.loaded.artifact.weights.model_payloads
        assert own.weights.model_payloads is not None
        assert packs is not None
        assert [one.sha256 for one in own.weights.model_payloads.objects] == [one.sha256 for one in packs.objects]
        result = stand.restore("overlay-2")
        assert result.rung == "overlay"
        assert result.seconds["resume"] > 0, "its CUDA state came back"
        assert stand.ask(UNSEEN) == expected
        stand.sleep("overlay-3")
        stand.wake("overlay-4")
        assert stand.ask(UNSEEN) == expected
        with pytest.raises(AcceptanceFailed):
            stand.restore("overlay-5", negative_control=True)
    finally:
        stand.stop_all()
        drop_overlay(stand.tools, stand.loaded.digest)
    assert stand.restore("overlay-6").rung == "native"
    assert stand.ask(UNSEEN) == expected


def test_a_restore_may_ask_for_an_overlay_beside_it(stand: Stand, expected: tuple[Answer, ...]) -> None:
    try:
        result = stand.restore("local-1", target_local=True)
        assert (result.rung, result.overlay.outcome if result.overlay else None) == ("native", "made")
        assert stand.ask(UNSEEN) == expected
        stand.stop_all()
        assert stand.restore("local-2").rung == "overlay"
        assert stand.ask(UNSEEN) == expected
    finally:
        stand.stop_all()
        drop_overlay(stand.tools, stand.loaded.digest)


def test_a_host_without_what_initialised_state_needs_makes_no_overlay(stand: Stand) -> None:
    def probe(features: tuple[str, ...]) -> tuple[FeatureResult, ...]:
        found = usual.probe(features)
        return tuple(
            replace(one, state=FeatureState.FAILED, reason="not here")
            if one.feature == "cuda-initialized-state"
            else one
            for one in found
        )

    usual = stand.tools
    stand.tools = replace(usual, probe=probe)
    try:
        request = materialize_request(stand.loaded, operation_id="lacking-1")
        with pytest.raises(Refused) as caught:
            materialize(stand.tools, stand.loaded, request, overlay=True)
    finally:
        stand.tools = usual
    (problem,) = caught.value.problems
    assert problem.field == "features.cuda-initialized-state"
    assert "n610 freezes an overlay of n580" in str(problem.cure)


def test_the_pack_is_the_same_whichever_driver_captures(stand: Stand, folder: Any, rack: GpuRack) -> None:
    other = Stand(folder=folder, model=stand.model, state_root=stand.tools.state.path, driver=DriverId.N610, gpus=rack)
    try:
        result = other.capture("capture-n610", "n610.json")
        assert result.pack_digests == stand.result.pack_digests
        assert result.pack_shared
        assert load_artifact(result.artifact_path).artifact.snapshot_driver.id is DriverId.N610
    finally:
        other.tools.host.close()


def test_a_template_that_touched_a_device_is_refused_by_name(stand: Stand, folder: Any, rack: GpuRack) -> None:
    planned = stand.plan("touched", str(folder / "a.json"), serve={"companion": "early"})
    with pytest.raises(Refused) as caught:
        capture(stand.tools, planned.request, planned.model)
    (problem,) = caught.value.problems
    assert "before it was placed, so it is no template" in problem.message
    assert str(rack.folder) in problem.message
    assert not (folder / "a.json").exists()
    assert rack.users() == ()


def test_the_source_serves_after_its_template_was_frozen(stand: Stand, folder: Any, expected: Any) -> None:
    planned = stand.plan("serving", str(folder / "a.json"))
    with running_source(stand.tools, planned) as source:
        assert source.serve_again(UNSEEN) == expected
