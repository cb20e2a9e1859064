"""The GPUs of a machine: asked once, remembered while it must be true, named by index or UUID."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coldsnap.capsule.cuda import inventory as inventory_module
from coldsnap.capsule.cuda.inventory import (
    CACHE_NAME,
    Inventory,
    chosen_gpus,
    device_facts,
    read_inventory,
    selector_problems,
)
from coldsnap.capsule.cuda.remote import HelperApi
from coldsnap.testing.cuda_checkpoint import fake_inventory
from coldsnap.testing.gpu import GpuRack

TWO = fake_inventory(2)


def test_it_is_asked_of_the_driver_once_a_boot_and_driver(
    rack: GpuRack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    asked: list[HelperApi] = []

    def open_helper() -> HelperApi:
        asked.append(HelperApi(rack.environment()))
        return asked[-1]

    def read(driver: str = "580.159.04") -> Inventory:
        return read_inventory(driver, open_helper=open_helper, cache_dir=tmp_path)

    first = read()
    assert [(gpu.index, gpu.uuid) for gpu in first.gpus] == [(gpu.index, gpu.uuid) for gpu in TWO.gpus]
    assert (first.cuda_userspace, first.gpus[0].compute_capability) == ("13", "9.0")
    assert read() == first
    assert len(asked) == 1
    assert all(helper.helper_pid is None for helper in asked)
    read("590.1")
    assert len(asked) == 2, "another driver is asked again"
    monkeypatch.setattr(inventory_module, "_device_nodes", lambda: ("/dev/nvidia7",))
    read("590.1")
    assert len(asked) == 3, "and so are other device nodes"
    path = tmp_path / CACHE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot_id": "another"}))
    read("590.1")
    assert len(asked) == 4
    path.write_text("{")
    assert read("590.1") == first


def test_without_a_driver_nothing_is_started() -> None:
    def never() -> HelperApi:
        raise AssertionError("no helper is needed to know that there is nothing")

    assert read_inventory(None, open_helper=never, cache_dir=None).why_not == "this machine has no NVIDIA driver"


def test_a_driver_that_does_not_answer_is_an_empty_machine_with_a_reason(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    found = read_inventory("580.159.04", open_helper=HelperApi, cache_dir=tmp_path)
    assert found.gpus == ()
    assert "libcuda.so.1" in found.why_not
    assert not (tmp_path / CACHE_NAME).exists(), "what is wrong now may be mended later"


def test_selectors_are_indices_or_uuids() -> None:
    first, second = TWO.gpus
    assert chosen_gpus(TWO, ("1", first.uuid.upper().replace("GPU-", "GPU-"))) == (second, first)
    assert selector_problems(TWO, ("1", "0"), field="devices") == ()
    unknown, twice = selector_problems(TWO, ("0", "9", first.uuid), field="launch.units[0].devices")
    assert (unknown.field, unknown.value) == ("launch.units[0].devices[1]", "9")
    assert first.uuid in str(unknown.cure)
    assert (twice.field, twice.value) == ("launch.units[0].devices[2]", first.uuid)
    assert "earlier slot" in twice.message
    (problem,) = selector_problems(Inventory(why_not="no driver"), ("0",), field="devices")
    assert problem.cure == "no driver"


def test_facts_are_by_slot() -> None:
    facts = device_facts(tuple(reversed(TWO.gpus)))
    assert [(one.slot, one.gpu_name, one.compute_capability) for one in facts] == [
        (0, "Fake GPU", "9.0"),
        (1, "Fake GPU", "9.0"),
    ]
