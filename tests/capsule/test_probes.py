"""Features are proved by doing, and remembered only as long as the proof holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coldsnap.capsule import probes
from coldsnap.capsule.criu import Criu
from coldsnap.capsule.cuda.accelerator import Accelerator
from coldsnap.capsule.cuda.inventory import Inventory
from coldsnap.capsule.hostfacts import host_facts, parse_cpu_flags, parse_nvidia_driver
from coldsnap.capsule.probes import devices
from coldsnap.capsule.probes.ladder import FEATURES
from coldsnap.core.drivers import DRIVERS, FeatureResult, FeatureState
from coldsnap.errors import MissingCapability
from coldsnap.testing.cuda_checkpoint import FakeCheckpoints, fake_inventory
from coldsnap.testing.gpu import GpuRack


def _none() -> Criu:
    raise MissingCapability("no usable CRIU", cure="install it")


@pytest.mark.criu
def test_a_working_machine_passes_once_and_is_remembered(tmp_path: Path, criu: Criu) -> None:
    tmp_path.chmod(0o700)
    (first,) = probes.probe_features([probes.PROCESS_TREE], cache_dir=tmp_path, find=lambda: criu)
    assert first.state is FeatureState.PASSED, first.reason
    (again,) = probes.probe_features([probes.PROCESS_TREE], cache_dir=tmp_path, find=lambda: criu)
    assert (again.state, again.reason) == (FeatureState.PASSED, f"{first.reason} earlier in this boot")
    path = tmp_path / probes.CACHE_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    for stale in ({"boot_id": "another"}, {"criu_version": "9"}, {"criu_identity": [1, 2, 3, 4]}, {"gpus": ["one"]}):
        document = json.loads(path.read_text())
        document["passes"][0]["ground"] |= stale
        path.write_text(json.dumps(document))
        (probed,) = probes.probe_features([probes.PROCESS_TREE], cache_dir=tmp_path, find=lambda: criu)
        assert probed.reason == first.reason  # proved anew
    path.write_text(json.dumps({**document, "format": 1}))
    (probed,) = probes.probe_features([probes.PROCESS_TREE], cache_dir=tmp_path, find=lambda: criu)
    assert probed.reason == first.reason


@pytest.mark.criu
def test_a_criu_that_fails_its_own_check_is_no_pass_and_not_remembered(tmp_path: Path, criu: Criu) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "criu"
    path.write_text("#!/bin/sh\necho 'Error (criu/kerndat.c:1): no such feature'\nexit 1\n")
    path.chmod(0o700)
    broken = Criu(path=path, version=criu.version)
    (result,) = probes.probe_features([probes.PROCESS_TREE], cache_dir=tmp_path, find=lambda: broken)
    assert result.state is FeatureState.FAILED
    assert "no such feature" in result.reason
    assert not (tmp_path / probes.CACHE_NAME).exists()


@pytest.mark.criu
def test_a_criu_that_only_checks_well_is_no_pass(tmp_path: Path, criu: Criu) -> None:
    path = tmp_path / "criu"
    path.write_text('#!/bin/sh\n[ "$1" = check ] && exit 0\necho "Error: cannot"\nexit 1\n')
    path.chmod(0o700)
    (result,) = probes.probe_features([probes.PROCESS_TREE], find=lambda: Criu(path=path, version=criu.version))
    assert result.state is FeatureState.FAILED
    assert "dump of unit probe failed" in result.reason


def test_without_criu_the_feature_is_unsupported(tmp_path: Path) -> None:
    (result,) = probes.probe_features([probes.PROCESS_TREE], cache_dir=tmp_path, find=_none)
    assert result.state is FeatureState.UNSUPPORTED


def probe(rack: GpuRack, *features: str, cache_dir: Path | None = None) -> dict[str, FeatureResult]:
    results = probes.probe_features(
        features, accelerator=rack.accelerator(), driver=lambda: "580.159.04", cache_dir=cache_dir
    )
    assert [result.feature for result in results] == list(features)
    return {result.feature: result for result in results}


GPU_FEATURES = tuple(feature.name for feature in FEATURES.values() if feature.needs_gpu)


def test_every_feature_of_every_driver_is_on_the_ladder() -> None:
    wanted = {name for driver in DRIVERS.values() for name in (*driver.base_features, *driver.communicating_features)}
    assert set(FEATURES) == wanted
    assert all((feature.prove is None) == bool(feature.unproved) for feature in FEATURES.values())
    assert all(need in FEATURES for feature in FEATURES.values() for need in feature.needs)


def test_without_a_driver_no_feature_of_gpus_is_claimed() -> None:
    results = probes.probe_features(GPU_FEATURES, driver=lambda: None)
    assert {result.state for result in results} == {FeatureState.UNSUPPORTED}
    assert all("no NVIDIA driver" in result.reason for result in results)


def test_a_driver_without_a_device_says_so() -> None:
    nothing = replace(no_gpus(), inventory=lambda: Inventory(why_not="cuInit: CUDA_ERROR_NO_DEVICE"))
    (result,) = probes.probe_features(["cuda-checkpoint-api"], accelerator=nothing, driver=lambda: "580.159.04")
    assert result.state is FeatureState.UNSUPPORTED
    assert "CUDA_ERROR_NO_DEVICE" in result.reason


def no_gpus() -> Accelerator:
    return FakeCheckpoints().accelerator(Inventory())


def test_what_nothing_proves_here_is_unqualified_with_a_reason(rack: GpuRack) -> None:
    found = probe(rack, "cuda-classic-ipc", "nccl-communicator-roundtrip", "cuda-of-tomorrow")
    assert {result.state for result in found.values()} == {FeatureState.UNQUALIFIED}
    assert "CUDA IPC" in found["cuda-classic-ipc"].reason
    assert "NCCL" in found["nccl-communicator-roundtrip"].reason
    assert "no such feature" in found["cuda-of-tomorrow"].reason


def test_features_of_the_device_alone(rack: GpuRack) -> None:
    found = probe(rack, "cuda-checkpoint-api", "cuda-checkpoint-roundtrip", "cuda-vmm-exact-address")
    assert {result.state for result in found.values()} == {FeatureState.PASSED}, found
    assert "8 MiB of Fake GPU" in found["cuda-checkpoint-roundtrip"].reason
    assert "0x700000000000" in found["cuda-vmm-exact-address"].reason
    assert rack.users() == ()


@pytest.mark.criu
def test_features_of_frozen_processes(rack: GpuRack, tmp_path: Path, criu: Criu) -> None:
    tmp_path.chmod(0o700)
    names = ("cuda-initialized-state", "criu-process-template", "cuda-fresh-state")
    found = probe(rack, *names, cache_dir=tmp_path)
    assert {result.state for result in found.values()} == {FeatureState.PASSED}, found
    assert rack.users() == ()
    again = probe(rack, *names, cache_dir=tmp_path)
    assert all(again[name].reason == f"{found[name].reason} earlier in this boot" for name in names)
    moved = GpuRack(folder=rack.folder, inventory=fake_inventory(2, first=1))
    for gpu in moved.inventory.gpus:
        (rack.folder / gpu.uuid).mkdir(exist_ok=True)
    anew = probe(moved, *names, cache_dir=tmp_path)
    assert anew["cuda-initialized-state"].reason == found["cuda-initialized-state"].reason, "other GPUs: proved anew"
    assert anew["criu-process-template"].reason.endswith("earlier in this boot"), "and CRIU has nothing to do with them"


@pytest.mark.parametrize(
    ("call", "how", "said"),
    [
        ("lock", "busy", "could not be locked within"),
        ("checkpoint", "fail", "CUDA_ERROR_UNKNOWN"),
        ("restore", "die", "lost with the helper"),
        ("unlock", "fail", "CUDA_ERROR_UNKNOWN"),
    ],
)
def test_a_round_trip_that_fails_is_a_failure_and_leaves_nothing(
    rack: GpuRack, call: str, how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "STEP_DEADLINE_S", 6.0 if how == "busy" else 60.0)
    rack.fail_next(call, how)
    found = probe(rack, "cuda-checkpoint-roundtrip")["cuda-checkpoint-roundtrip"]
    assert found.state is FeatureState.FAILED
    assert said in found.reason
    assert rack.users() == ()


def test_a_feature_whose_ground_failed_is_not_tried(rack: GpuRack) -> None:
    rack.fail_next("checkpoint", "fail")
    found = probe(rack, "cuda-checkpoint-roundtrip", "cuda-initialized-state")
    assert found["cuda-initialized-state"].state is FeatureState.FAILED
    assert found["cuda-initialized-state"].reason.startswith("needs cuda-checkpoint-roundtrip, which is failed: ")


def test_addresses_that_move_fail_exact_addresses(rack: GpuRack) -> None:
    (rack.folder / "moves").write_text("4096")
    found = probe(rack, "cuda-vmm-exact-address")["cuda-vmm-exact-address"]
    assert found.state is FeatureState.FAILED
    assert "and got 0x700000002000" in found.reason


def test_facts_of_this_machine() -> None:
    facts = host_facts()
    assert facts.architecture
    assert facts.kernel == Path("/proc/sys/kernel/osrelease").read_text().strip()
    assert facts.cpu_flags


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n", "580.159.04"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  610.10  Release Build\nGCC version: 12.2.0\n",
            "610.10",
        ),
        ("GCC version: 12.2.0\n", None),
    ],
)
def test_the_nvidia_driver_is_read_from_either_module(text: str, version: str | None) -> None:
    assert parse_nvidia_driver(text) == version


def test_only_flags_of_every_processor_count() -> None:
    assert parse_cpu_flags("flags\t\t: fpu avx amx\nbugs\t\t: x\n\nflags\t\t: fpu avx\n") == {"fpu", "avx"}
    assert parse_cpu_flags("Features\t: fp asimd\n") == {"fp", "asimd"}
    assert parse_cpu_flags("vmx flags\t: x\n") == frozenset()
