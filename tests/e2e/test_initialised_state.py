"""Capture and restore with CUDA state in the tree: fake GPUs, everything else real (CRIU, the helper process)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.cuda.suspend import Patience
from coldsnap.core.bindings import cuda_states_of
from coldsnap.core.drivers import DriverId
from coldsnap.core.messages import Answer
from coldsnap.core.points import install
from coldsnap.errors import (
    AcceptanceFailed,
    ColdsnapError,
    CriuError,
    CudaError,
    DeadlineExceeded,
    EngineError,
    HelperLost,
    IntegrityError,
    OutOfSpace,
    Refused,
)
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.live import service_status
from coldsnap.ops.materialize import materialize, materialize_request
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.gpu import GpuRack
from coldsnap.testing.source import FailingUnits, running_source
from coldsnap.testing.stand import UNSEEN, Stand, wait_for

from .conftest import TENSORS  # isort: skip

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def stand(criu: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A captured fake engine on a fake GPU, with a second process that has CUDA state of its own."""
    folder = tmp_path_factory.mktemp("gpu-stand")
    model = write_checkpoint(folder / "model", tensors=TENSORS)
    one = Stand(folder=folder, model=model, driver=DriverId.N610, gpus=GpuRack.make(folder / "gpus", 2))
    one.capture(serve={"companion": "spawn"})
    yield one
    one.stop_all()
    one.tools.host.close()


@pytest.fixture
def hasty(stand: Stand) -> Iterator[Stand]:
    """The stand with less patience for CUDA calls that hang."""
    usual = stand.tools
    patience = Patience(lock_s=6.0, checkpoint_s=8.0, restore_s=8.0, unlock_s=60.0)
    stand.tools = replace(usual, deadlines=replace(usual.deadlines, cuda=patience))
    yield stand
    stand.tools = usual


def test_the_artifact_says_who_had_cuda_state_and_where(stand: Stand, rack: GpuRack) -> None:
    artifact = stand.loaded.artifact
    (state,) = cuda_states_of(artifact.runtime.bindings)
    assert state.devices == (rack.inventory.gpus[0].uuid,)
    assert len(state.holders) == 2
    assert "engine_main" in state.holders[0].command
    assert "gpu_companion" in state.holders[1].command
    (machine,) = artifact.compatibility.units
    assert (machine.nvidia_driver_captured, machine.nvidia_driver_min) == ("580.159.04", "580")
    assert (machine.cuda_userspace, machine.devices[0].gpu_name) == ("13", "Fake GPU")
    assert artifact.launch.units[0].devices == ("0",)
    assert "cuda-checkpoint-roundtrip" in artifact.requires.features
    assert rack.users() == ()


# -- restores ----------------------------------------------------------------------------------------------


def test_a_restore_gives_the_cold_answers(stand: Stand, expected: tuple[Answer, ...], rack: GpuRack) -> None:
    result = stand.restore("restore-1")
    assert (result.source, result.rung) == ("native", "native")
    assert result.seconds["resume"] > 0
    assert stand.ask(UNSEEN) == expected
    assert len(rack.users()) == 2
    stand.stop_all()
    assert rack.users() == ()


def test_it_needs_no_pack(stand: Stand, expected: tuple[Answer, ...]) -> None:
    assert stand.restore("recovery-1", weights="recovery").source == "recovery"
    assert stand.ask(UNSEEN) == expected


def test_sleep_and_wake_leave_the_cuda_state_where_it_is(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.restore("sleep-0")
    pids = service_status(stand.tools, "svc").pids
    stand.sleep("sleep-1")
    stand.wake("sleep-2")
    assert service_status(stand.tools, "svc").pids == pids
    assert stand.ask(UNSEEN) == expected


def test_a_warm_tree_has_its_cuda_state_and_not_its_weights(
    stand: Stand, expected: tuple[Answer, ...], rack: GpuRack
) -> None:
    assert stand.restore("warm-1", warm=True).state == "warm"
    assert len(rack.users()) == 2
    stand.wake("warm-2")
    assert stand.ask(UNSEEN) == expected


def test_it_goes_to_another_gpu(stand: Stand, expected: tuple[Answer, ...], rack: GpuRack) -> None:
    stand.restore("moved-1", devices=("1",))
    assert stand.ask(UNSEEN) == expected
    assert rack.users_of(rack.inventory.gpus[0]) == ()
    assert len(rack.users_of(rack.inventory.gpus[1])) == 2


def test_a_gpu_that_is_not_there_is_refused_before_anything_moves(stand: Stand) -> None:
    with pytest.raises(Refused) as caught:
        stand.restore("moved-2", devices=("7",))
    assert {problem.field for problem in caught.value.problems} >= {"launch.units[0].devices[0]"}
    assert any("it has 0 (GPU-" in str(problem.cure) for problem in caught.value.problems)


def test_a_restore_without_hydration_is_caught(stand: Stand, rack: GpuRack) -> None:
    with pytest.raises(AcceptanceFailed):
        stand.restore("negative-1", negative_control=True)
    assert rack.users() == ()


@pytest.mark.parametrize(
    ("call", "how", "error"),
    [
        ("restore", "fail", CudaError),
        ("restore", "full", OutOfSpace),
        ("restore", "hang", HelperLost),
        ("restore", "die", HelperLost),
        ("unlock", "die-after", HelperLost),
    ],
)
def test_a_restore_that_fails_leaves_the_gpu_empty(
    hasty: Stand, rack: GpuRack, call: str, how: str, error: type[ColdsnapError], expected: tuple[Answer, ...]
) -> None:
    rack.fail_next(call, how)
    with pytest.raises(error) as caught:
        hasty.restore(f"failed-{call}-{how}")
    assert caught.value.facts["unit"] == "u0"
    assert rack.users() == ()
    hasty.assert_nothing_left()
    hasty.restore(f"after-{call}-{how}")
    assert hasty.ask(UNSEEN) == expected


def test_an_artifact_that_does_not_say_who_had_cuda_state_is_refused_before_anything_moves(stand: Stand) -> None:
    def forget(document: dict[str, Any]) -> None:
        bindings = document["runtime"]["bindings"]
        document["runtime"]["bindings"] = [one for one in bindings if one["kind"] != "coldsnap-cuda-state"]

    with pytest.raises(Refused) as caught:
        stand.restore("unsaid-1", stand.rewritten("unsaid.json", forget))
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("runtime.bindings", "nothing")


def test_a_tree_that_comes_back_without_its_cuda_state_is_told_apart(stand: Stand) -> None:
    def forget(document: dict[str, Any]) -> None:
        (state,) = [one for one in document["runtime"]["bindings"] if one["kind"] == "coldsnap-cuda-state"]
        state["holders"][0]["pid"] = 4242

    with pytest.raises(IntegrityError, match="process 4242 of unit u0"):
        stand.restore("forgot-1", stand.rewritten("forgot.json", forget))


# -- captures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "how", "error"),
    [
        ("lock", "busy", DeadlineExceeded),
        ("lock", "die-after", HelperLost),
        ("checkpoint", "fail", CudaError),
        ("checkpoint", "hang", HelperLost),
        ("checkpoint", "die", HelperLost),
        ("checkpoint", "die-after", HelperLost),
    ],
)
def test_a_freeze_that_fails_leaves_the_source_serving(
    hasty: Stand, folder: Path, rack: GpuRack, call: str, how: str, error: type[ColdsnapError], expected: Any
) -> None:
    planned = hasty.plan(f"failing-{call}-{how}", str(folder / "a.json"), serve={"companion": "spawn"})
    with running_source(hasty.tools, planned) as source:
        rack.fail_next(call, how)
        with pytest.raises(error) as caught:
            source.freeze()
        assert source.serve_again(UNSEEN) == expected
        assert len(rack.users()) == 2
        notes = getattr(caught.value, "__notes__", [])
        assert notes, "what was brought back is said"
        assert not any("not brought back" in note for note in notes)
        if call == "checkpoint":
            source.freeze()  # and nothing of the failure is in the way of the next try
    assert rack.users() == ()


def test_a_dump_that_fails_leaves_the_source_serving(stand: Stand, folder: Path, rack: GpuRack, expected: Any) -> None:
    units = FailingUnits(stand.tools.units, dump=CriuError("CRIU gave up", facts={"log": []}))
    planned = stand.plan("failing-dump", str(folder / "a.json"), serve={"companion": "spawn"})
    with running_source(replace(stand.tools, units=units), planned) as source:
        with pytest.raises(CriuError, match="CRIU gave up"):
            source.freeze()
        assert source.serve_again(UNSEEN) == expected
        assert len(rack.users()) == 2


@pytest.mark.parametrize(("victim", "name"), [(0, "engine_main"), (1, "gpu_companion")])
def test_a_process_that_ends_while_its_state_is_taken_off_is_told_as_that(
    hasty: Stand, folder: Path, rack: GpuRack, victim: int, name: str
) -> None:
    """The second one stays a zombie, because the engine does not wait for it."""
    planned = hasty.plan(f"ended-{name}", str(folder / "a.json"), serve={"companion": "spawn"})
    with running_source(hasty.tools, planned) as source:

        def end(point: str) -> None:
            if point == "capture.held":
                pid = rack.users()[victim]
                os.kill(pid, signal.SIGKILL)
                wait_for("the killed process to let its GPU go", lambda: pid not in rack.users())

        install(end)
        try:
            with pytest.raises(EngineError, match=f"process .* of unit u0 .*{name}.* ended during suspend") as caught:
                source.freeze()
        finally:
            install(None)
        assert caught.value.facts["unit"] == "u0"
        assert caught.value.facts["log"], "what the engine printed last"
    assert rack.users() == ()


@pytest.mark.parametrize(
    ("companion", "said"),
    [("fork", "it was forked from one"), ("nvml", "still holds")],
)
def test_devices_that_cannot_be_taken_off_are_refused_by_name(
    stand: Stand, folder: Path, rack: GpuRack, companion: str, said: str
) -> None:
    planned = stand.plan(f"refused-{companion}", str(folder / "a.json"), serve={"companion": companion})
    with pytest.raises(Refused) as caught:
        capture(stand.tools, planned.request, planned.model)
    (problem,) = caught.value.problems
    assert said in problem.message
    assert str(rack.folder) in problem.message
    assert problem.field.startswith("u0: process ")
    assert "engine_main" in str(problem.value)
    assert problem.cure
    assert not (folder / "a.json").exists()
    assert rack.users() == ()


def test_an_overlay_of_it_is_captured_and_preferred(stand: Stand, expected: tuple[Answer, ...], rack: GpuRack) -> None:
    made = materialize(
        stand.tools, stand.loaded, materialize_request(stand.loaded, operation_id="overlay-1"), overlay=True
    ).overlay
    assert made is not None
    assert made.outcome == "made", made.reason
    assert rack.users() == ()
    assert stand.restore("overlay-2").rung == "overlay"
    assert stand.ask(UNSEEN) == expected


def test_the_driver_is_chosen_for_an_engine_on_a_gpu(stand: Stand, folder: Path) -> None:
    with stand.cli("capabilities", "--json") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert '"n610"' in out
    assert load_artifact(stand.result.artifact_path).artifact.snapshot_driver.id is DriverId.N610
