"""The GPUs of a launch's units on this machine: found by selector, told by UUID, mapped slot by slot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.cuda.inventory import Inventory
from coldsnap.core.request import DriverId, Launch
from coldsnap.errors import InternalError, Refused, UsageError
from coldsnap.ops.activating import activation_request
from coldsnap.ops.devices import (
    device_environment,
    device_map,
    launch_device_problems,
    unit_facts,
    unit_gpus,
)
from coldsnap.ops.planning import plan_capture
from coldsnap.ops.recipe import Recipe
from coldsnap.ops.tools import Tools
from coldsnap.testing.cuda_checkpoint import FakeCheckpoints, fake_inventory
from coldsnap.testing.engine import PLUGIN

from .conftest import Shop  # isort: skip

TWO = fake_inventory(2)


def with_inventory(tools: Tools, inventory: Inventory) -> Tools:
    return replace(tools, accelerator=FakeCheckpoints().accelerator(inventory))


@pytest.fixture
def gpus(tools: Tools) -> Tools:
    return with_inventory(tools, TWO)


def launch_on(model: Path, *devices: str, **environment: str) -> Launch:
    recipe = Recipe.model_validate(
        {
            "name": "svc",
            "engine": "fake",
            "model": str(model),
            "devices": list(devices),
            "serve": {"gpu": "/gpus"} if devices else {},
            "environment": environment,
        }
    )
    driver = DriverId.N610 if devices else DriverId.HOST
    return plan_capture(recipe, PLUGIN, operation_id="op-1", output=Path("/out.json"), driver=driver).request.launch


def test_a_unit_sees_its_own_devices_by_uuid(gpus: Tools, model: Path) -> None:
    (unit,) = launch_on(model, "1").units
    assert unit_gpus(gpus, unit) == (TWO.gpus[1],)
    assert device_environment(gpus, unit) == {"CUDA_VISIBLE_DEVICES": TWO.gpus[1].uuid}
    facts = unit_facts(gpus, unit)
    assert [(one.slot, one.gpu_name) for one in facts.devices] == [(0, "Fake GPU")]
    assert facts.cuda_userspace == "13"


def test_a_unit_without_devices_asks_for_no_inventory(tools: Tools, model: Path) -> None:
    def never() -> Inventory:
        raise AssertionError("nobody needs to know")

    blind = replace(tools, accelerator=replace(FakeCheckpoints().accelerator(), inventory=never))
    launch = launch_on(model)
    (unit,) = launch.units
    assert (unit_gpus(blind, unit), device_environment(blind, unit)) == ((), {})
    assert unit_facts(blind, unit) == tools.host_facts()
    assert list(launch_device_problems(blind, launch)) == []


def test_a_device_that_is_not_here_is_named_with_those_that_are(gpus: Tools, model: Path) -> None:
    launch = launch_on(model, "5")
    (problem,) = launch_device_problems(gpus, launch)
    assert (problem.field, problem.value) == ("launch.units[0].devices[0]", "5")
    assert TWO.gpus[1].uuid in str(problem.cure)
    with pytest.raises(Refused, match="the devices of unit u0"):
        unit_gpus(gpus, launch.units[0])
    assert unit_facts(gpus, launch.units[0]).devices == (), "a gap is a mismatch, never a guess"


def test_an_environment_may_not_choose_devices_behind_the_launch(gpus: Tools, model: Path) -> None:
    (problem,) = launch_device_problems(gpus, launch_on(model, "0", CUDA_VISIBLE_DEVICES="1"))
    assert problem.field == "launch.units[0].environment.CUDA_VISIBLE_DEVICES"
    assert "devices: [...]" in str(problem.cure)


def test_a_map_names_every_device_or_none() -> None:
    first, second = TWO.gpus
    assert device_map((first.uuid, second.uuid), (first, second)) == {}
    assert device_map((first.uuid, second.uuid), (first, replace_uuid("GPU-x"))) == {
        first.uuid: first.uuid,
        second.uuid: "GPU-x",
    }
    with pytest.raises(InternalError):
        device_map((first.uuid,), (first, second))


def replace_uuid(uuid: str) -> Any:
    return TWO.gpus[1].model_copy(update={"uuid": uuid})


def test_devices_of_a_restore_must_be_as_many_as_captured(shop: Shop) -> None:
    with pytest.raises(UsageError, match="1 devices are named, and the artifact was captured with 0") as caught:
        activation_request(shop.loaded, operation_id="x", devices=("0",))
    assert "it uses none" in str(caught.value.cure)
